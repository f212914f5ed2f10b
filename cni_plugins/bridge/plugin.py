"""The plugin bridge: connects a pod to a bridge of the host with a veth, and sets up its addresses,
routes and masquerade.

If ADD fails, it removes the address and the veth again. DEL derives the names of the veth and the
leases from container id and interface, so DEL works even if ADD was killed at any point.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from cni_plugins import ipam
from cni_plugins.bridge import links, masquerade
from cni_plugins.bridge.addressing import derive
from cni_plugins.bridge.settings import BridgeSettings, host_link_name, parse
from cni_plugins.net import host_rules
from cni_plugins.net.pod import open_pod
from cni_plugins.net.rtnetlink import host_socket
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import CniError
from cni_plugins.protocol.result import Dns, Interface, Result, dns_from_json
from cni_plugins.skel import CniPlugin, serve


def add(call: CniCall, config: PluginConfig) -> Result:
    """Run ADD: connect the pod to the bridge; return interfaces, addresses and routes.

    After an error the veth and the lease are removed again. Raises CniError, KernelError."""
    settings = parse(config, call)
    link_name = host_link_name(call.container_id, call.ifname)
    tag = host_rules.tag_of(call, config)
    with open_pod(call.netns) as pod, host_socket() as host, ExitStack() as undo:
        bridge = links.ensure_bridge(host, settings)
        # Before the veth: the pod's hardware address is derived from its IPv4 address, and is set
        # when the link is created.
        answer = ipam.allocate(call, config, link=link_name)
        undo.callback(ipam.run, "DEL", call, config)
        addressing = derive(answer, settings, seed=tag)
        links.attach_veth(
            host,
            pod,
            bridge,
            settings,
            name=link_name,
            ifname=call.ifname,
            tag=tag,
            mac=addressing.mac,
        )
        undo.callback(links.disconnect, host, link_name)
        inner = links.configure_pod(pod, call.ifname, addressing, settings)
        links.configure_gateway(host, bridge, addressing, settings)
        port = links.wait_for_forwarding(host, link_name, settings)
        links.announce(host, pod, bridge, inner, addressing)
        if settings.ip_masq:
            subnets = {a.address.network for a in addressing.ips}
            host_rules.add_elements(masquerade.elements(addressing.ips, tag), subnets)
        undo.pop_all()
    # The IPAM plugin's dns; if that is empty, the network configuration's.
    dns = answer.dns if answer.dns != Dns() else dns_from_json(config.raw.get("dns"))
    return Result(
        interfaces=(
            Interface(name=bridge.name, mac=bridge.mac, mtu=bridge.mtu),
            Interface(name=port.name, mac=port.mac, mtu=port.mtu),
            Interface(name=call.ifname, mac=inner.mac, mtu=inner.mtu, sandbox=call.netns),
        ),
        ips=tuple(replace(assigned, interface=2) for assigned in addressing.ips),
        routes=addressing.reported,
        dns=dns,
    )


def delete(call: CniCall, config: PluginConfig) -> None:
    """Run DEL: remove masquerade, veth and address. If one removal fails, try the others, and raise
    the first error at the end."""
    settings = parse(config, call)
    link_name = host_link_name(call.container_id, call.ifname)
    tag = host_rules.tag_of(call, config)
    failures: list[Exception] = []
    # The address is released last: its next pod must not meet rules or the link of this one.
    _attempt(failures, _retract_masquerade, call, config, tag)
    _attempt(failures, _take_down, call, settings, link_name)
    _attempt(failures, ipam.run, "DEL", call, config)
    if failures:
        raise failures[0]


def check(call: CniCall, config: PluginConfig) -> None:
    """Run CHECK. Raises CniError DAMAGED for a difference from the result of ADD."""
    from cni_plugins.bridge.check import check as check_state

    check_state(call, config)


def status(call: CniCall, config: PluginConfig) -> None:
    """Run STATUS: check the configuration, and run STATUS of the IPAM plugin. Raises CniError."""
    parse(config, call)
    ipam.run("STATUS", call, config)


def collect(call: CniCall, config: PluginConfig) -> None:
    """Run GC: remove links, masquerade elements and addresses of stale attachments to this network.
    An attachment is stale if the runtime does not list it as valid."""
    from cni_plugins.net.inventory import links as all_links

    stale = host_rules.stale_tags(config)
    leftover = [
        link.name
        for link in all_links()
        if link.kind == "veth" and link.alias and stale(link.alias)
    ]
    with host_socket() as host:
        for name in leftover:
            links.disconnect(host, name)
    host_rules.remove_elements(
        e for e in host_rules.all_elements(host_rules.MASQUERADE_SETS) if stale(e.comment)
    )
    ipam.run("GC", call, config)


def _retract_masquerade(call: CniCall, config: PluginConfig, tag: str) -> None:
    """Remove the attachment's masquerade elements: those with the comment `tag`. First looks for
    elements of the addresses in prevResult. If none exists, searches the elements of all pods."""
    try:
        previous = config.previous_result()
    except CniError:
        previous = None
    addresses = previous.addresses_of(call.ifname, call.netns) if previous else ()
    expected = masquerade.elements(addresses, tag)
    # The address may belong to another pod by now, if an earlier DEL has released it.
    existing = [e for e in host_rules.lookup(expected) if e is not None and e.comment == tag]
    host_rules.remove_elements(existing or host_rules.all_elements(host_rules.MASQUERADE_SETS, tag))


def _take_down(call: CniCall, settings: BridgeSettings, link: str) -> None:
    with host_socket() as host:
        removed = (
            links.quiesce(host, link)
            if settings.background_teardown
            else links.disconnect(host, link)
        )
    # The link has another name if the reference plugin attached the pod, before the node changed to
    # pyrunc's plugin.
    if not removed and not settings.background_teardown:
        links.remove_from_pod(call.netns, call.ifname)


def _attempt(failures: list[Exception], function: Callable[..., None], *arguments: object) -> None:
    try:
        function(*arguments)
    except Exception as error:
        failures.append(error)


PLUGIN = CniPlugin("bridge", add=add, delete=delete, check=check, status=status, gc=collect)


def main() -> None:
    serve(PLUGIN)
