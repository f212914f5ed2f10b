"""The plugin loopback: sets the pod's `lo` up; the kernel gives it 127.0.0.1/8 and ::1/128."""

from __future__ import annotations

from cni_plugins.net import netns
from cni_plugins.net.pod import opened
from cni_plugins.net.rtnetlink import IFF_UP, addresses, find_link, open_route_socket, set_link
from cni_plugins.protocol.call import Call
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import DAMAGED, CniError
from cni_plugins.protocol.result import AssignedAddress, Interface, Result
from cni_plugins.skel import Plugin, serve

_NAME, _MAC = "lo", "00:00:00:00:00:00"


def add(call: Call, config: PluginConfig) -> Result:
    """ADD. As in the reference, an earlier plugin's result is handed on."""
    with opened(call.netns) as pod:
        pod.bring_loopback_up()
        pod.settle()
        found = [each.address for each in addresses(pod.route, 1)]
    previous = config.previous_result()
    if previous is not None:
        return previous
    return Result(
        interfaces=(Interface(name=_NAME, mac=_MAC, sandbox=call.netns),),
        ips=tuple(AssignedAddress(address, interface=0) for address in found),
    )


def delete(call: Call, config: PluginConfig) -> None:
    """DEL: `lo` goes with its namespace; while that exists it is set down, as the reference does."""
    if call.netns and netns.exists(call.netns):
        with netns.opened(call.netns) as pod, netns.inside(pod), open_route_socket() as route:
            route.call(set_link(index=1, change=IFF_UP))


def check(call: Call, config: PluginConfig) -> None:
    """CHECK: `lo` is up. Raises CniError 120."""
    with netns.opened(call.netns) as pod, netns.inside(pod), open_route_socket() as route:
        link = find_link(route, index=1)
        if link is None or not link.up:
            raise CniError(DAMAGED, "lo is not up")


def nothing(call: Call, config: PluginConfig) -> None:
    """STATUS and GC: there is nothing outside the pod."""


PLUGIN = Plugin("loopback", add=add, delete=delete, check=check, status=nothing, gc=nothing)


def main() -> None:
    serve(PLUGIN)
