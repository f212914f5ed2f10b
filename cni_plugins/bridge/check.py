"""The bridge plugin's CHECK: compares the kernel's state with the result of ADD. Each error names
one difference."""

from __future__ import annotations

from cni_plugins import ipam
from cni_plugins.bridge import masquerade
from cni_plugins.bridge.addressing import installed_routes
from cni_plugins.bridge.settings import BridgeSettings, host_link_name, parse
from cni_plugins.net import host_rules
from cni_plugins.net.inventory import LinkState, addresses, link_named, routes
from cni_plugins.net.pod import open_pod
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import DAMAGED, INVALID_CONFIG, CniError
from cni_plugins.protocol.result import AssignedAddress, Result


def check(call: CniCall, config: PluginConfig) -> None:
    """Run CHECK. Raises CniError DAMAGED for the first difference from the result of ADD,
    INVALID_CONFIG without `prevResult`."""
    settings = parse(config, call)
    previous = config.previous_result()
    if previous is None:
        raise CniError(INVALID_CONFIG, "CHECK needs prevResult")
    ipam.run("CHECK", call, config)
    _check_host(settings, host_link_name(call.container_id, call.ifname))
    _check_pod(call, previous, settings)
    if settings.is_gateway:
        _check_gateway(settings, previous.ips)
    if settings.ip_masq:
        _check_masquerade(call, config, previous)


def _check_host(settings: BridgeSettings, name: str) -> None:
    bridge, port = link_named(settings.bridge), link_named(name)
    _require(
        bridge is not None and bridge.kind == "bridge", f"the bridge {settings.bridge} is gone"
    )
    assert bridge is not None
    _require(bridge.up, f"the bridge {bridge.name} is down")
    _require(
        not settings.promiscuous or bridge.promiscuous,
        f"the bridge {bridge.name} is not promiscuous",
    )
    _require(port is not None, f"the host's interface {name} is gone")
    assert port is not None
    _require(port.up, f"the host's interface {name} is down")
    _require(port.master == bridge.index, f"the host's interface {name} is not on {bridge.name}")
    _require(
        not settings.hairpin or bool(port.hairpin),
        f"the host's interface {name} is not in hairpin mode",
    )
    _require(
        not settings.isolated or bool(port.isolated), f"the host's interface {name} is not isolated"
    )


def _check_pod(call: CniCall, previous: Result, settings: BridgeSettings) -> None:
    with open_pod(call.netns) as pod, pod.entered():
        link = link_named(call.ifname)
        _require(link is not None, f"the pod's {call.ifname} is gone")
        assert link is not None
        _check_pod_link(link, call, previous, settings)
        assigned_addresses = addresses(link.index)
        for assigned in previous.addresses_of(call.ifname, call.netns):
            _require(
                assigned.address in assigned_addresses,
                f"the pod's {call.ifname} has lost {assigned.address}",
            )
        installed = {(r.destination, r.gateway) for r in routes()}
        for route in installed_routes(previous.routes, previous.ips):
            # The kernel may have completed the other fields of a route (metric, scope), so they do
            # not count.
            expected = (route.destination, str(route.gateway or ""))
            _require(expected in installed, f"the pod has lost its route to {route.destination}")


def _check_pod_link(
    link: LinkState, call: CniCall, previous: Result, settings: BridgeSettings
) -> None:
    _require(link.kind == "veth", f"the pod's {link.name} is not a veth")
    _require(link.up or settings.container_interface_down, f"the pod's {link.name} is down")
    _require(
        not settings.mtu or link.mtu == settings.mtu, f"the pod's {link.name} has mtu {link.mtu}"
    )
    mac = next(
        (i.mac for i in previous.interfaces if i.name == call.ifname and i.sandbox == call.netns),
        "",
    )
    # Another program may spell the MAC address in upper case or with dashes.
    mac = mac.lower().replace("-", ":")
    _require(
        not mac or link.mac == mac,
        f"the pod's {link.name} has the hardware address {link.mac}, not {mac}",
    )


def _check_gateway(settings: BridgeSettings, ips: tuple[AssignedAddress, ...]) -> None:
    bridge = link_named(settings.bridge)
    bridge_addresses = {address.ip for address in addresses(bridge.index)} if bridge else set()
    for assigned in ips:
        if assigned.gateway is not None:
            _require(
                assigned.gateway in bridge_addresses,
                f"{settings.bridge} has lost {assigned.gateway}",
            )


def _check_masquerade(call: CniCall, config: PluginConfig, previous: Result) -> None:
    _require(host_rules.is_intact(), "rules of pyrunc's nftables table are missing")
    addresses_of_pod = previous.addresses_of(call.ifname, call.netns)
    elements = masquerade.elements(addresses_of_pod, host_rules.tag_of(call, config))
    for expected, existing in zip(elements, host_rules.lookup(elements), strict=True):
        _require(existing == expected, f"the masquerade of {expected.key.hex()} is gone")


def _require(true: bool, damage: str) -> None:
    if not true:
        raise CniError(DAMAGED, damage)
