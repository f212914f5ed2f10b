"""Which namespaces are joined, in which order, and which are new.

The descriptors of the runtime's rights come first: everything but the user namespace is joined
while the runtime still is itself, the user namespace last. Namespaces that only the runtime's user
namespace may not enter would need a third round; a rootful runtime never does.
"""

from __future__ import annotations

from pyrunc.plan.model import Join

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.plan.model import Op
    from pyrunc.spec.model import Linux

# The specification's words -> names in /proc/PID/ns and `abi.clone.NAMESPACES`
KERNEL_NAMES = {
    "mount": "mnt",
    "cgroup": "cgroup",
    "uts": "uts",
    "ipc": "ipc",
    "user": "user",
    "pid": "pid",
    "network": "net",
    "time": "time",
}


def joins(linux: Linux) -> tuple[list[Op], list[Op]]:
    """One operation for each namespace that is given by path, the user namespace last: before and
    after the birth.

    The cgroup namespace comes after it: with nsdelegate, as systemd mounts the tree, it is a border
    that no process may be moved across from inside (cgroup-v2.rst, "Delegation"). Not so for the
    root of a new user namespace, who may not join it.
    """
    user = linux.namespace("user")
    late = "" if user is not None and not user.path else "cgroup"
    paths = [entry for entry in linux.namespaces if entry.path]
    paths.sort(key=lambda entry: entry.type == "user")
    found: tuple[list[Op], list[Op]] = [], []
    for entry in paths:
        found[entry.type == late].append(Join(KERNEL_NAMES[entry.type], f"namespace:{entry.type}"))
    return found


def new(linux: Linux) -> tuple[str, ...]:
    """Kernel names of the namespaces that clone makes. A new time namespace is made before it
    (`OffsetClocks`)."""
    return tuple(
        [KERNEL_NAMES[e.type] for e in linux.namespaces if not e.path and e.type != "time"]
    )


def own(linux: Linux) -> tuple[str, ...]:
    """Kernel names of all namespaces in which the container's processes differ from the runtime."""
    return tuple([KERNEL_NAMES[entry.type] for entry in linux.namespaces])
