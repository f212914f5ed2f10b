"""The plugin host-local: an address of each range set for a pod, from leases on this host.

The bridge plugin calls `allocate` and `release` directly: running a program for them would cost
more than they do.
"""

from __future__ import annotations

import os
import socket

from cni_plugins.host_local import leases, settings
from cni_plugins.protocol.call import Call
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import DAMAGED, CniError
from cni_plugins.protocol.result import AssignedAddress, Result
from cni_plugins.skel import Plugin, serve


def allocate(call: Call, config: PluginConfig, *, link: str = "") -> Result:
    """ADD. `link` is the host's interface of the attachment, where the caller knows it. Raises
    CniError."""
    wanted = settings.parse(config, call)
    with leases.opened(wanted.folder, link_exists) as store:
        owner = leases.owner_name(call.container_id, call.ifname)
        taken = store.take(owner, wanted.sets, wanted.requested, link=link, scope=config.scope())
    ips = tuple(
        AssignedAddress(lease.range.interface(lease.address), lease.range.gateway)
        for lease in taken
    )
    return Result(ips=ips, routes=wanted.routes, dns=wanted.dns)


def release(call: Call, config: PluginConfig) -> None:
    """DEL; nothing to release is no error."""
    folder = settings.folder_of(config)
    if os.path.isdir(folder):
        with leases.opened(folder, link_exists) as store:
            store.release(leases.owner_name(call.container_id, call.ifname))


def check(call: Call, config: PluginConfig) -> None:
    """CHECK: the attachment has its leases. Raises CniError 120."""
    owner = leases.owner_name(call.container_id, call.ifname)
    with leases.opened(settings.folder_of(config), link_exists) as store:
        addresses = store.addresses_of(owner)
        if not addresses:
            raise CniError(DAMAGED, f"{owner} has no address")
        for address in addresses:
            if store.owner_of(address) != owner:
                raise CniError(DAMAGED, f"the lease of {address} is not {owner}'s")


def collect(call: Call, config: PluginConfig) -> None:
    """GC: release the addresses of every attachment that is not valid any more."""
    valid = {leases.owner_name(*pair) for pair in config.valid_attachments()}
    folder = settings.folder_of(config)
    if os.path.isdir(folder):
        with leases.opened(folder, link_exists) as store:
            store.collect(valid.__contains__, scope=config.scope())


def status(call: Call, config: PluginConfig) -> None:
    """STATUS: the configuration can be used. Raises CniError."""
    settings.parse(config, call)


def link_exists(name: str) -> bool:
    """Whether the host has an interface of that name."""
    try:
        return bool(name) and socket.if_nametoindex(name) > 0
    except OSError:
        return False


PLUGIN = Plugin("host-local", add=allocate, delete=release, check=check, status=status, gc=collect)


def main() -> None:
    serve(PLUGIN)
