"""`linux.netDevices`: moves network devices of the host into the container's network namespace,
with their addresses.

A move removes a device's addresses, so the permanent global ones are read before the move and added
again afterwards. A device is down while it moves. One netlink request moves the device and renames
it, so that its name cannot collide in between. The runtime does not move devices back: when the
namespace ends, the kernel moves a physical device to the host, and deletes a virtual one. Source:
runtime-spec config-linux.md, "Network Devices".
"""

from __future__ import annotations

from errno import EEXIST

from pyrunc.abi.clone import NAMESPACES
from pyrunc.errors import KernelError
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.link import IFA_F_PERMANENT, IFF_UP, RT_SCOPE_UNIVERSE, Routing
from pyrunc.kernel.namespace import open_namespace, open_own, setns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def move(devices: Mapping[str, str], pid: int) -> None:
    """Move network devices into the network namespace of the process `pid`, and bring them up.
    `devices`: name on the host -> name in the container. Raises KernelError."""
    with (
        closing_fd(open_namespace(f"/proc/{pid}/ns/net", "net")) as there,
        Routing() as outside,
        _open_routing_in(there) as inside,
    ):
        for name, new_name in devices.items():
            _move_one(outside, inside, there, name, new_name)


def _move_one(outside: Routing, inside: Routing, there: int, name: str, new_name: str) -> None:
    what = f"link '{name}'"
    index = outside.index(name)
    # Checked before, because a move that fails half-way would leave the device down and without its
    # addresses.
    if "%" not in new_name and inside.has(new_name):
        raise KernelError("netlink", f"link '{new_name}' of the container", EEXIST)
    addresses = [
        address
        for address in outside.addresses(index)
        if address.scope == RT_SCOPE_UNIVERSE and address.flags & IFA_F_PERMANENT
    ]
    before = inside.indices()
    # Before Linux 6.2 a device that is up cannot be renamed.
    outside.change_link(index, mask=IFF_UP, what=f"{what} down")
    outside.change_link(
        index, name=new_name, namespace_fd=there, what=f"{what} to the container as '{new_name}'"
    )
    (index,) = inside.indices() - before  # the kernel changes a number that is taken there
    for address in addresses:
        inside.add_address(index, address, f"address of {what}")
    inside.change_link(index, flags=IFF_UP, mask=IFF_UP, what=f"{what} up")


def _open_routing_in(namespace: int) -> Routing:
    """Open a netlink socket in the network namespace of the descriptor `namespace`. A socket
    belongs to the namespace in which it was made, so the calling thread is in this namespace during
    the call."""
    with closing_fd(open_own("net")) as own:
        setns(namespace, NAMESPACES["net"])
        try:
            return Routing()
        finally:
            setns(own, NAMESPACES["net"])
