"""The pod's network namespace, made by the shim: ahead, in the zygote's spare, or when it is asked for.

It is never used again for another pod: it ends with the shim that made it. It belongs to the shim's user namespace, so a pod
with a user namespace of its own does not take it: there the holder's clone makes one that the pod's root owns.
"""

from __future__ import annotations

import os

from pyrunc.abi.clone import CLONE_NEWNET
from pyrunc.kernel.link import IFF_UP, Routing
from pyrunc.kernel.namespace import open_own, setns, unshare

_LOOPBACK = 1  # the index of `lo` in every network namespace (include/net/net_namespace.h, LOOPBACK_IFINDEX)


def open_network() -> int:
    """A descriptor of a new network namespace whose `lo` is up; the caller is in its own again. Raises KernelError."""
    home = open_own("net")
    try:
        unshare(CLONE_NEWNET)
        try:
            with Routing() as routing:
                routing.change_link(_LOOPBACK, flags=IFF_UP, mask=IFF_UP, what="link 'lo' of a new namespace")
            return open_own("net")
        finally:
            setns(home, CLONE_NEWNET)
    finally:
        os.close(home)
