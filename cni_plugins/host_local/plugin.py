"""The plugin host-local: assigns each pod one address of each range set, and stores the leases on
this host.

The bridge plugin calls `allocate` and `release` directly, because executing host-local would take
longer than the allocation.
"""

from __future__ import annotations

import os
import socket

from cni_plugins.host_local import leases, settings
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import DAMAGED, CniError
from cni_plugins.protocol.result import AssignedAddress, Result
from cni_plugins.skel import CniPlugin, serve


def allocate(call: CniCall, config: PluginConfig, *, link: str = "") -> Result:
    """Run ADD: lease addresses for the attachment, and return them with the configured routes and
    DNS settings. Raises CniError.

    `link`: the name of the veth's host end, empty if the caller does not know it. After DEL, the
    addresses are reused only when the kernel has removed the link of this name.
    """
    options = settings.parse(config, call)
    with leases.open_leases(options.folder, link_exists) as store:
        owner = leases.owner_name(call.container_id, call.ifname)
        assigned = store.take(
            owner, options.sets, options.requested, link=link, scope=config.scope()
        )
    ips = tuple(
        AssignedAddress(lease.range.interface(lease.address), lease.range.gateway)
        for lease in assigned
    )
    return Result(ips=ips, routes=options.routes, dns=options.dns)


def release(call: CniCall, config: PluginConfig) -> None:
    """Run DEL: release the attachment's addresses, if it has any."""
    folder = settings.folder_of(config)
    # A DEL must not create the folder of a network that is gone.
    if os.path.isdir(folder):
        with leases.open_leases(folder, link_exists) as store:
            store.release(leases.owner_name(call.container_id, call.ifname))


def check(call: CniCall, config: PluginConfig) -> None:
    """Run CHECK. Raises CniError DAMAGED if the attachment has lost a lease."""
    owner = leases.owner_name(call.container_id, call.ifname)
    with leases.open_leases(settings.folder_of(config), link_exists) as store:
        addresses = store.addresses_of(owner)
        if not addresses:
            raise CniError(DAMAGED, f"attachment {owner} has no address")
        for address in addresses:
            if store.owner_of(address) != owner:
                raise CniError(DAMAGED, f"address {address} is not leased to attachment {owner}")


def collect(call: CniCall, config: PluginConfig) -> None:
    """Run GC: release the addresses of attachments that the runtime no longer lists as valid."""
    valid = {leases.owner_name(*pair) for pair in config.valid_attachments()}
    folder = settings.folder_of(config)
    if os.path.isdir(folder):
        with leases.open_leases(folder, link_exists) as store:
            store.collect(valid.__contains__, scope=config.scope())


def status(call: CniCall, config: PluginConfig) -> None:
    """Run STATUS: check the configuration. Raises CniError."""
    settings.parse(config, call)


def link_exists(name: str) -> bool:
    """Return whether the host has a network interface called `name`."""
    try:
        return bool(name) and socket.if_nametoindex(name) > 0
    except OSError:
        return False


PLUGIN = CniPlugin(
    "host-local", add=allocate, delete=release, check=check, status=status, gc=collect
)


def main() -> None:
    serve(PLUGIN)
