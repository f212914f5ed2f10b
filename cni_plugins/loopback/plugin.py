"""The plugin loopback: sets the pod's interface `lo` up, which makes the kernel add 127.0.0.1/8 and
::1/128."""

from __future__ import annotations

from cni_plugins.net import netns
from cni_plugins.net.pod import open_pod
from cni_plugins.net.rtnetlink import IFF_UP, addresses, find_link, set_link
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import DAMAGED, CniError
from cni_plugins.protocol.result import AssignedAddress, Interface, Result
from cni_plugins.skel import CniPlugin, serve

_NAME, _MAC = "lo", "00:00:00:00:00:00"


def add(call: CniCall, config: PluginConfig) -> Result:
    """Run ADD: set `lo` up. Returns prevResult unchanged, as the reference plugin does. Without
    prevResult, returns the addresses of `lo`."""
    with open_pod(call.netns) as pod:
        pod.bring_loopback_up()
        pod.send_pending()
        lo_addresses = [each.address for each in addresses(pod.route, 1)]
    # In a chain prevResult is the pod's result. If loopback returned a result of `lo` instead, it
    # would replace the pod's addresses by 127.0.0.1.
    previous = config.previous_result()
    if previous is not None:
        return previous
    return Result(
        interfaces=(Interface(name=_NAME, mac=_MAC, sandbox=call.netns),),
        ips=tuple(AssignedAddress(address, interface=0) for address in lo_addresses),
    )


def delete(call: CniCall, config: PluginConfig) -> None:
    """Run DEL: set `lo` down, as the reference plugin does. Does nothing if the namespace is
    gone."""
    if call.netns and netns.exists(call.netns):
        with open_pod(call.netns) as pod:
            pod.route.call(set_link(index=1, change=IFF_UP))


def check(call: CniCall, config: PluginConfig) -> None:
    """Run CHECK. Raises CniError DAMAGED if `lo` is not up."""
    with open_pod(call.netns) as pod:
        link = find_link(pod.route, index=1)
        if link is None or not link.up:
            raise CniError(DAMAGED, "lo is not up")


def nothing(call: CniCall, config: PluginConfig) -> None:
    """Run STATUS or GC: does nothing, because the plugin changes nothing outside the pod."""


PLUGIN = CniPlugin("loopback", add=add, delete=delete, check=check, status=nothing, gc=nothing)


def main() -> None:
    serve(PLUGIN)
