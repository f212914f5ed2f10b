"""A container's cgroup as a transient scope of systemd, delegated to us.

systemd makes a scope around processes and never an empty one, but the container's process is to be
born inside it. So a placeholder, a forked child that waits for end of file, is the scope's first
process and leaves when the container is in.
"""

from __future__ import annotations

import os

from pyrunc.cgroups import scope_properties
from pyrunc.errors import Error
from pyrunc.kernel import cgroup as tree
from pyrunc.kernel.credential import is_machine_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.kernel.systemd import Property

# systemd refuses to change these on a unit that runs; the kernel's own file was written before.
FIXED_AT_START = frozenset({"OOMPolicy"})
ACCOUNTING = ("CPUAccounting", "MemoryAccounting", "IOAccounting", "TasksAccounting")


class Placeholder:
    """A child that does nothing until `end`, or until its parent dies."""

    __slots__ = ("_write_end", "pid")

    def __init__(self) -> None:
        read_end, self._write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _wait_for_end_of_file(read_end)
        os.close(read_end)

    def end(self) -> None:
        os.close(self._write_end)
        os.waitpid(self.pid, 0)

    def release(self) -> int:
        """The pipe's write end, for another process to close; the child is reaped by that one, or
        by this one's parent."""
        return self._write_end


def _wait_for_end_of_file(read_end: int) -> None:
    try:
        os.dup2(read_end, 0)
        os.closerange(1, os.sysconf("SC_OPEN_MAX"))
        os.read(0, 1)
    finally:
        os._exit(0)


def start(
    group: Cgroup, resources: Mapping[str, Any], annotations: Mapping[str, str]
) -> Placeholder | None:
    """Start the unit and learn where systemd put it. None for a slice, which may be empty.

    Raises PeerError, DeadlineExceeded, Unsupported (no D-Bus), InvalidSpec.
    """
    from pyrunc.kernel.systemd import Systemd

    is_slice = group.unit.endswith(".slice")
    wanted = [
        *scope_properties.properties(resources),
        *scope_properties.from_annotations(annotations),
    ]
    placeholder = None if is_slice else Placeholder()
    try:
        with Systemd() as systemd:
            systemd.start_transient(group.unit, [*_frame(group, placeholder), *wanted])
            group.path = systemd.control_group(group.unit) or group.path
        if is_machine_root():
            group.hand_down_unmanaged()
        reach(group)
    except BaseException:
        if placeholder is not None:
            placeholder.end()
        raise
    return placeholder


def reach(group: Cgroup) -> None:
    """See to it that a child of ours may be born in the group. Raises PeerError, DeadlineExceeded,
    Unsupported.

    Who takes a process from one group to another must own what is above both (cgroup-v2.rst,
    "Delegation Containment"). Above a login session and the groups of the user's systemd only root
    does; that systemd then moves us, into a scope of our own, which ends with us.
    """
    if is_machine_root() or tree.may_move(tree.own_path() or "/", group.path):
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


def _frame(group: Cgroup, placeholder: Placeholder | None) -> list[Property]:
    """What every container's unit has, whatever its limits."""
    common: list[Property] = [
        ("Description", ("s", f"pyrunc container {group.unit}")),
        ("DefaultDependencies", ("b", False)),
        *((name, ("b", True)) for name in ACCOUNTING),
    ]
    if placeholder is None:
        return [*common, ("Wants", ("as", [group.slice]))]
    return [
        *common,
        ("Slice", ("s", group.slice)),
        ("Delegate", ("b", True)),
        ("CollectMode", ("s", "inactive-or-failed")),
        ("PIDs", ("au", [placeholder.pid])),
    ]


def update(group: Cgroup, resources: Mapping[str, Any]) -> None:
    """Tell systemd about new limits, so that it does not write the old ones again. Raises
    PeerError, DeadlineExceeded."""
    from pyrunc.kernel.systemd import Systemd

    properties = [p for p in scope_properties.properties(resources) if p[0] not in FIXED_AT_START]
    if properties:
        with Systemd() as systemd:
            systemd.set_properties(group.unit, properties)


def stop(group: Cgroup) -> None:
    """End the unit. A scope whose last process is gone has ended by itself; without systemd the
    group is simply removed."""
    if not group.exists():
        return
    from pyrunc.kernel.systemd import Systemd

    try:
        with Systemd() as systemd:
            systemd.stop(group.unit)
            systemd.reset_failed(group.unit)
    except Error:
        if group.populated():
            raise
