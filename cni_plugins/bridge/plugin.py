"""The plugin bridge: a veth between the pod and a bridge of the host, addresses, routes,
masquerade.

ADD is the list of steps in `add`; every step that leaves something behind pushes its undo. DEL
needs nothing but the attachment's names: they are derived from container id and interface, so it
works after a kill anywhere in ADD.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from cni_plugins import ipam
from cni_plugins.bridge import links
from cni_plugins.bridge.addressing import Addressing, derive
from cni_plugins.bridge.settings import Settings, host_link_name, parse
from cni_plugins.net import host_rules
from cni_plugins.net.pod import opened
from cni_plugins.net.rtnetlink import host_socket
from cni_plugins.protocol.call import Call
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import CniError
from cni_plugins.protocol.result import Interface, Result, dns_from_json
from cni_plugins.skel import Plugin, serve


@dataclass(frozen=True, slots=True)
class _Names:
    """What an attachment is called on the host."""

    link: str
    tag: str


def add(call: Call, config: PluginConfig) -> Result:
    """ADD. Raises CniError, KernelError."""
    settings = parse(config, call)
    names = _names(call, config)
    with opened(call.netns) as pod, host_socket() as host, ExitStack() as undo:
        bridge = links.ensure_bridge(host, settings)
        answer = ipam.allocate(call, config, link=names.link)
        undo.callback(ipam.release, call, config)
        addressing = derive(answer, settings, seed=names.tag)
        links.connect(
            host,
            pod,
            bridge,
            settings,
            name=names.link,
            ifname=call.ifname,
            tag=names.tag,
            mac=addressing.mac,
        )
        undo.callback(links.disconnect, host, names.link)
        inner = links.configure_pod(pod, call.ifname, addressing, settings)
        links.be_gateway(host, bridge, addressing, settings)
        port = links.await_forwarding(host, names.link, settings)
        links.introduce(host, pod, bridge, inner, addressing)
        if settings.ip_masq:
            _masquerade(addressing, names.tag)
        undo.pop_all()
    interfaces = (
        Interface(name=bridge.name, mac=bridge.mac, mtu=bridge.mtu),
        Interface(name=port.name, mac=port.mac, mtu=port.mtu),
        Interface(name=call.ifname, mac=inner.mac, mtu=inner.mtu, sandbox=call.netns),
    )
    return _result(answer, addressing, config).with_interfaces(interfaces, 2)


def delete(call: Call, config: PluginConfig) -> None:
    """DEL: each step runs whatever the others did; the first error is raised at the end."""
    settings = parse(config, call)
    names = _names(call, config)
    failures: list[Exception] = []
    _attempt(failures, _retract_masquerade, call, config, names.tag)
    _attempt(failures, _take_down, call, settings, names.link)
    _attempt(failures, ipam.release, call, config)
    if failures:
        raise failures[0]


def check(call: Call, config: PluginConfig) -> None:
    """CHECK."""
    from cni_plugins.bridge.check import check as find_damage

    find_damage(call, config)


def status(call: Call, config: PluginConfig) -> None:
    """STATUS: the configuration can be used, and addresses can be had."""
    parse(config, call)
    ipam.status(call, config)


def collect(call: Call, config: PluginConfig) -> None:
    """GC: links, masquerades and addresses of attachments of this network that are not valid any
    more."""
    from cni_plugins.net.inventory import links as all_links

    valid = {
        host_rules.owner_tag(config.name, *pair, config.scope())
        for pair in config.valid_attachments()
    }

    def stale(tag: str) -> bool:
        return host_rules.belongs_to(tag, config.name, config.scope()) and tag not in valid

    leftover = [
        link.name
        for link in all_links()
        if link.kind == "veth" and link.alias and stale(link.alias)
    ]
    with host_socket() as host:
        for name in leftover:
            links.disconnect(host, name)
    host_rules.retract(
        e for e in host_rules.everything(host_rules.MASQUERADE_SETS) if stale(e.comment)
    )
    ipam.collect(call, config)


def _masquerade(addressing: Addressing, tag: str) -> None:
    found = [
        host_rules.masquerade_element(a.address.ip, a.address.network, tag) for a in addressing.ips
    ]
    host_rules.publish(found, {a.address.network for a in addressing.ips})


def _result(answer: Result, addressing: Addressing, config: PluginConfig) -> Result:
    """The address plugin's answer with what we derived; the network's own `dns` where that plugin
    gave none."""
    dns = answer.dns if answer.dns != Result().dns else dns_from_json(config.raw.get("dns"))
    return Result(ips=addressing.ips, routes=addressing.reported, dns=dns)


def _retract_masquerade(call: Call, config: PluginConfig, tag: str) -> None:
    """By the addresses that are remembered; where nothing is, by looking through all elements for
    the owner."""
    try:
        previous = config.previous_result()
    except CniError:
        previous = None
    known = previous.addresses_of(call.ifname, call.netns) if previous else ()
    wanted = [host_rules.masquerade_element(a.address.ip, a.address.network, tag) for a in known]
    found = [e for e in host_rules.lookup(wanted) if e is not None and e.comment == tag]
    host_rules.retract(found or host_rules.owned(host_rules.MASQUERADE_SETS, tag))


def _take_down(call: Call, settings: Settings, link: str) -> None:
    with host_socket() as host:
        done = (
            links.quiesce(host, link)
            if settings.background_teardown
            else links.disconnect(host, link)
        )
    if not done and not settings.background_teardown:
        links.remove_from_pod(call.netns, call.ifname)


def _attempt(failures: list[Exception], function: Callable[..., None], *arguments: object) -> None:
    try:
        function(*arguments)
    except Exception as error:
        failures.append(error)


def _names(call: Call, config: PluginConfig) -> _Names:
    return _Names(
        link=host_link_name(call.container_id, call.ifname),
        tag=host_rules.owner_tag(config.name, call.container_id, call.ifname, config.scope()),
    )


PLUGIN = Plugin("bridge", add=add, delete=delete, check=check, status=status, gc=collect)


def main() -> None:
    serve(PLUGIN)
