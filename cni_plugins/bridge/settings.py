"""Parses the bridge plugin's options. Rejects unsupported options by name instead of ignoring
them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from cni_plugins.protocol.call import CniCall, check_interface_name
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import (
    INVALID_CONFIG,
    INVALID_ENVIRONMENT,
    UNSUPPORTED_FIELD,
    CniError,
)

_MAC = re.compile(r"[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}\Z")
_UNSUPPORTED = ("vlan", "vlanTrunk", "macspoofchk")


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """The bridge plugin's options, with the meaning that they have in the reference plugin.

    - `mtu`: 0 for the kernel's default.
    - `mac`: empty if no MAC address was requested.
    - `background_teardown`: DEL leaves the deletion of the veth to the kernel.
    """

    bridge: str
    is_gateway: bool
    is_default_gateway: bool
    force_address: bool
    ip_masq: bool
    hairpin: bool
    promiscuous: bool
    isolated: bool
    detect_duplicates: bool
    container_interface_down: bool
    mtu: int
    mac: str
    background_teardown: bool


def parse(config: PluginConfig, call: CniCall) -> BridgeSettings:
    """Parse the options. Raises CniError:

    - UNSUPPORTED_FIELD for an option that only the reference plugin has
    - INVALID_ENVIRONMENT for an invalid MAC address or bridge name
    - INVALID_CONFIG for any other invalid option
    """
    raw = config.raw
    # These options separate pods from each other. If they were ignored, the network would only seem
    # to separate its pods.
    for key in _UNSUPPORTED:
        if raw.get(key):
            raise CniError(UNSUPPORTED_FIELD, f"{key}: not supported by this bridge plugin")
    name = raw.get("bridge") or "cni0"
    if not isinstance(name, str):
        raise CniError(INVALID_CONFIG, "bridge: not a string")
    check_interface_name(name, "bridge")
    hairpin = config.flag("hairpinMode")
    promiscuous = config.flag("promiscMode")
    if hairpin and promiscuous:
        raise CniError(INVALID_CONFIG, "hairpinMode and promiscMode cannot both be on")
    is_default = config.flag("isDefaultGateway")
    return BridgeSettings(
        bridge=name,
        is_gateway=config.flag("isGateway") or is_default,
        is_default_gateway=is_default,
        force_address=config.flag("forceAddress"),
        ip_masq=config.flag("ipMasq"),
        hairpin=hairpin,
        promiscuous=promiscuous,
        isolated=config.flag("portIsolation"),
        detect_duplicates=config.flag("enabledad"),
        container_interface_down=config.flag("disableContainerInterface"),
        mtu=_mtu(raw.get("mtu")),
        mac=_mac(config, call),
        background_teardown=config.cni_argument("teardown") == "background",
    )


def host_link_name(container_id: str, ifname: str) -> str:
    """Return the name of the veth's host end. DEL computes the same name, so ADD stores none."""
    # 15 characters: IFNAMSIZ is 16 with the final NUL.
    return "veth" + hashlib.sha256(f"{container_id}/{ifname}".encode()).hexdigest()[:11]


def _mtu(value: object) -> int:
    if value is None:
        return 0
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        # ETH_MIN_MTU, which is IPv4's least (RFC 791), and ETH_MAX_MTU of the kernel.
        or (value != 0 and not 68 <= value <= 65535)
    ):
        raise CniError(INVALID_CONFIG, f"mtu: {str(value)[:20]} is neither 0 nor in 68..65535")
    return value


def _mac(config: PluginConfig, call: CniCall) -> str:
    """Return the requested MAC address; empty if none is requested. Raises CniError
    INVALID_ENVIRONMENT.

    Looks in runtimeConfig first, then in `args.cni`, then in CNI_ARGS.
    """
    for value, where in (
        (config.capability("mac"), "runtimeConfig.mac"),
        (config.cni_argument("mac"), "args.cni.mac"),
        (call.argument("MAC"), "CNI_ARGS MAC"),
    ):
        if not value:
            continue
        # The lowest bit of the first byte marks a group: is_valid_ether_addr() refuses it, with
        # EADDRNOTAVAIL and no text.
        if not isinstance(value, str) or not _MAC.match(value) or int(value[:2], 16) & 1:
            raise CniError(
                INVALID_ENVIRONMENT,
                f"{where}: {str(value)[:30]!r} is not a unicast hardware address",
            )
        return value.lower().replace("-", ":")
    return ""
