"""Makes a container's cgroup as a transient scope of systemd, which systemd delegates to the
runtime.

systemd makes a scope only around a process, but the container's process is cloned into the scope
later. So the first process of the scope is a placeholder: a forked child, which exits when the
container's process is in the scope.
"""

from __future__ import annotations

import os

from pyrunc.cgroups import scope_properties
from pyrunc.cgroups.group import Placeholder
from pyrunc.errors import Error
from pyrunc.kernel import cgroup
from pyrunc.kernel.credential import is_machine_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.kernel.systemd import Property

# systemd refuses to change these on a running unit; the kernel's own file is written before.
# kubelet sets memory.oom.group at creation and sends it again with each resize in place.
FIXED_AT_START = frozenset({"OOMPolicy"})
ACCOUNTING = ("CPUAccounting", "MemoryAccounting", "IOAccounting", "TasksAccounting")


def _fork_placeholder() -> Placeholder:
    """Fork a child that waits on a pipe. The child exits when no process has the pipe's write end
    open any more."""
    read_end, write_end = os.pipe()
    # A fork, not a spawn: it must be there before systemd is asked, and needs no executable.
    pid = os.fork()
    if pid == 0:
        _wait_for_end_of_file(read_end)
    os.close(read_end)
    return Placeholder(write_end, pid)


def _wait_for_end_of_file(read_end: int) -> None:
    try:
        os.dup2(read_end, 0)
        # A descriptor of ours in the placeholder would keep pipes and locks open for as long as it
        # waits.
        os.closerange(1, os.sysconf("SC_OPEN_MAX"))
        os.read(0, 1)
    finally:
        os._exit(0)


def start(
    group: Cgroup, resources: Mapping[str, Any], annotations: Mapping[str, str]
) -> Placeholder | None:
    """Start the group's unit, a scope or a slice, and set the group's path to the one that systemd
    chose. Returns a scope's placeholder process; None for a slice, which needs no process.

    Raises PeerError, DeadlineExceeded, Unsupported (no D-Bus), InvalidSpec.
    """
    from pyrunc.kernel.systemd import Systemd

    is_slice = group.unit.endswith(".slice")
    limits = [
        *scope_properties.properties(resources),
        *scope_properties.from_annotations(annotations),
    ]
    placeholder = None if is_slice else _fork_placeholder()
    try:
        with Systemd() as systemd:
            systemd.start_transient(group.unit, [*_unit_properties(group, placeholder), *limits])
            # Not the path in the request: a user's systemd puts slices beneath its cgroup.
            group.path = systemd.control_group(group.unit) or group.path
        if is_machine_root():
            group.enable_unmanaged_controllers()
        reach(group)
    except BaseException:
        if placeholder is not None:
            placeholder.end()
        raise
    return placeholder


def reach(group: Cgroup) -> None:
    """Make sure that this process can clone children into the group. If it lacks the right, ask
    systemd to move this process into a new scope, which ends with the process. Raises PeerError,
    DeadlineExceeded, Unsupported.

    Moving a process needs write access to a common ancestor of the old and the new group
    (cgroup-v2.rst, "Delegation Containment"). If the process is in a login session, this ancestor
    belongs to root. If the process is in the new scope, this ancestor belongs to the user.
    """
    if is_machine_root() or cgroup.may_move(cgroup.own_path() or "/", group.path):
        return
    from pyrunc.kernel.systemd import Systemd

    properties: list[Property] = [
        ("Description", ("s", f"pyrunc, making or entering {group.unit}")),
        ("Slice", ("s", group.slice)),
        ("CollectMode", ("s", "inactive-or-failed")),
        ("PIDs", ("au", [os.getpid()])),
    ]
    with Systemd() as systemd:
        systemd.start_transient(f"pyrunc-{os.getpid()}.scope", properties)


def _unit_properties(group: Cgroup, placeholder: Placeholder | None) -> list[Property]:
    """Return the properties that every container's unit has."""
    common: list[Property] = [
        ("Description", ("s", f"pyrunc container {group.unit}")),
        # With default dependencies systemd would stop the scope at shutdown by itself
        # (Conflicts=shutdown.target), while the engine stops its containers in order.
        ("DefaultDependencies", ("b", False)),
        *((name, ("b", True)) for name in ACCOUNTING),
    ]
    if placeholder is None:
        return [*common, ("Wants", ("as", [group.slice]))]
    return [
        *common,
        ("Slice", ("s", group.slice)),
        # Otherwise systemd moves processes out of groups that we make below, and resets controllers
        # (systemd's CGROUP_DELEGATION.md).
        ("Delegate", ("b", True)),
        # A failed unit stays loaded otherwise, and its name cannot be used again until it is reset.
        ("CollectMode", ("s", "inactive-or-failed")),
        ("PIDs", ("au", [placeholder.pid])),
    ]


def update(group: Cgroup, resources: Mapping[str, Any]) -> None:
    """Send new limits to systemd, which would otherwise restore the old limits. Raises PeerError,
    DeadlineExceeded."""
    from pyrunc.kernel.systemd import Systemd

    properties = [p for p in scope_properties.properties(resources) if p[0] not in FIXED_AT_START]
    if properties:
        with Systemd() as systemd:
            systemd.set_properties(group.unit, properties)


def stop(group: Cgroup) -> None:
    """Stop the group's unit. If systemd fails, raises Error only if the group still has processes;
    a scope without processes has ended anyway."""
    if not group.exists():
        return
    from pyrunc.kernel.systemd import Systemd

    try:
        with Systemd() as systemd:
            systemd.stop(group.unit)
            # A scope that ended badly counts as failed, and its name would stay taken.
            systemd.reset_failed(group.unit)
    except Error:
        if group.populated():
            raise
