"""Parses the portmap plugin's options and the requested port mappings."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address as parse_address

from cni_plugins.net.host_rules import PROTOCOLS
from cni_plugins.protocol.addresses import Address
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import IMPOSSIBLE, INVALID_CONFIG, UNSUPPORTED_FIELD, CniError

_UNSUPPORTED = ("conditionsV4", "conditionsV6", "externalSetMarkChain")
_MAPPINGS_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Mapping:
    """A host port to forward. `versions`: the IP versions for which it is forwarded;
    `host_address`: None for all addresses of the host."""

    protocol: str
    host_port: int
    container_port: int
    host_address: Address | None
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PortmapSettings:
    """The options of portmap. `snat`: masquerade clients in the pod's subnet and on loopback;
    `masquerade_all`: masquerade every client."""

    mappings: tuple[Mapping, ...]
    snat: bool
    masquerade_all: bool


def parse(config: PluginConfig) -> PortmapSettings:
    """Parse the options. Raises CniError:

    - UNSUPPORTED_FIELD for an option that only the reference plugin has
    - IMPOSSIBLE for the hostIP ::1
    - INVALID_CONFIG for any other invalid value
    """
    for key in _UNSUPPORTED:
        if config.raw.get(key):
            raise CniError(UNSUPPORTED_FIELD, f"{key}: not supported by this portmap plugin")
    requested = config.capability("portMappings") or []
    if not isinstance(requested, list) or len(requested) > _MAPPINGS_LIMIT:
        raise CniError(
            INVALID_CONFIG,
            f"runtimeConfig.portMappings: not a list of at most {_MAPPINGS_LIMIT} mappings",
        )
    mappings = (
        _mapping(item, f"runtimeConfig.portMappings[{index}]")
        for index, item in enumerate(requested)
    )
    return PortmapSettings(
        mappings=tuple(mapping for mapping in mappings if mapping is not None),
        snat=config.flag("snat", default=True),
        masquerade_all=config.flag("masqAll"),
    )


def _mapping(value: object, where: str) -> Mapping | None:
    """Parse a port mapping; None for host port 0, which requests no forwarding. Raises CniError."""
    if not isinstance(value, dict):
        raise CniError(INVALID_CONFIG, f"{where}: not an object")
    protocol = value.get("protocol") or "tcp"
    if not isinstance(protocol, str) or protocol.lower() not in PROTOCOLS:
        raise CniError(
            INVALID_CONFIG, f"{where}.protocol: {str(protocol)[:20]!r} is not tcp, udp or sctp"
        )
    # kubelet also sends a container's ports without a host port, as 0.
    host_port = _port(value.get("hostPort", 0), f"{where}.hostPort", lowest=0)
    if host_port == 0:
        return None
    address = _address(value.get("hostIP"), f"{where}.hostIP")
    if address is not None and address.version == 6 and address.is_loopback:
        raise CniError(
            IMPOSSIBLE, f"{where}.hostIP: the kernel routes no packets from ::1 to a pod"
        )
    return Mapping(
        protocol=protocol.lower(),
        host_port=host_port,
        container_port=_port(value.get("containerPort"), f"{where}.containerPort", lowest=1),
        host_address=None if address is None or address.is_unspecified else address,
        versions=(4, 6) if address is None else (address.version,),
    )


def _port(value: object, where: str, *, lowest: int) -> int:
    # bool is a kind of int in Python: JSON's `true` would be port 1.
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= 65535:
        raise CniError(INVALID_CONFIG, f"{where}: {str(value)[:20]} is not a port")
    return value


def _address(value: object, where: str) -> Address | None:
    if value is None or value == "":
        return None
    try:
        return parse_address(str(value))
    except ValueError:
        raise CniError(INVALID_CONFIG, f"{where}: {str(value)[:60]!r} is not an address") from None
