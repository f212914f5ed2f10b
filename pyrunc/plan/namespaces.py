"""Plans namespaces: which ones the process joins, in which order, and which ones are new.

The user namespace is joined last, so that the process joins all others with the runtime's rights. A
rootless runtime lacks these rights, and would have to join the user namespace first. This order is
not implemented.
"""

from __future__ import annotations

from pyrunc.plan.model import Join
from pyrunc.spec.model import KERNEL_NAMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.plan.model import Op
    from pyrunc.spec.model import Linux


def joins(linux: Linux) -> tuple[list[Op], list[Op]]:
    """Plan a `Join` for each namespace with a path. Returns two lists: the joins before the clone
    (user namespace last) and the joins after the clone.

    The cgroup namespace is joined after the clone. If the tree is mounted with nsdelegate (as
    systemd does), a process inside the cgroup namespace cannot be cloned into a cgroup outside of
    it (cgroup-v2.rst, "Delegation"). With a new user namespace the cgroup namespace is joined
    before the clone, because root of the new user namespace may not join it.
    """
    user = linux.namespace("user")
    late = "" if user is not None and not user.path else "cgroup"
    paths = [entry for entry in linux.namespaces if entry.path]
    # From inside a user namespace, setns(2) into a namespace that an outer one owns fails with
    # EPERM.
    paths.sort(key=lambda entry: entry.type == "user")
    operations: tuple[list[Op], list[Op]] = [], []
    for entry in paths:
        operations[entry.type == late].append(
            Join(KERNEL_NAMES[entry.type], f"namespace:{entry.type}")
        )
    return operations


def new(linux: Linux) -> tuple[str, ...]:
    """Return the namespaces that the clone makes, by their names in /proc/PID/ns (`mnt`, `net`, …).
    The time namespace is left out, because it is made before the clone (`OffsetClocks`)."""
    return tuple(
        [KERNEL_NAMES[e.type] for e in linux.namespaces if not e.path and e.type != "time"]
    )


def own(linux: Linux) -> tuple[str, ...]:
    """Return all namespaces that the container does not share with the runtime, by their names in
    /proc/PID/ns (`mnt`, `net`, …)."""
    return tuple([KERNEL_NAMES[entry.type] for entry in linux.namespaces])
