"""Writes limits to a group's cgroup files in order, and restores the old values after a failure.

On a hybrid host most controllers are on cgroup v1, which this module does not change.
`missing_controllers` decides whether a limit of such a controller is an error or a warning.
"""

from __future__ import annotations

import errno
import os

from pyrunc.cgroups import convert
from pyrunc.cgroups.convert import CgroupSetting
from pyrunc.errors import InvalidArgument, KernelError, Unsupported
from pyrunc.kernel import cgroup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

# Parts of errors about a missing controller: their beginning, and the one reason that
# `missing_controllers` can turn into a warning.
CANNOT_SET, NOT_ON_THE_TREE = "cannot set", "is not on the cgroup v2 tree"

# The kernel's errnos for a refused value: not valid for this file, out of range, a missing device.
NOT_A_VALUE = (errno.EINVAL, errno.ERANGE, errno.EDOM, errno.E2BIG, errno.EOVERFLOW, errno.ENODEV)

BURST = "cpu.max.burst"

# Per-device files and their text for "no limit": writing one line leaves the other lines unchanged.
NO_LIMIT = {
    "io.max": "rbps=max wbps=max riops=max wiops=max",
    "io.weight": "default",
    "rdma.max": "hca_handle=max hca_object=max",
}


def write(directory: str, resources: Mapping[str, Any], missing_controllers: str) -> list[str]:
    """Write all of `resources` to the group's files; returns warnings. Stops at the first failure.

    Raises KernelError, InvalidSpec for contradictions, InvalidArgument for a value that the kernel
    refuses, and Unsupported for a missing controller if `missing_controllers` is "error".
    """
    _check_choice(missing_controllers)
    notes = convert.warnings(resources)
    refused = []
    for setting in convert.settings(resources, lambda file: cgroup.read(directory, file)):
        try:
            notes += _write_or_note(directory, setting, missing_controllers)
        except InvalidArgument:
            if setting.file != BURST:
                raise
            refused.append(setting)
    # A burst may be no larger than the quota (EINVAL, tg_set_bandwidth in kernel/sched/core.c). A
    # later setting may have raised the quota, so a refused burst is written again.
    for setting in refused:
        notes += _write_or_note(directory, setting, missing_controllers)
    return notes


def replace(
    directory: str,
    resources: Mapping[str, Any],
    missing_controllers: str,
    then: Callable[[], None] | None = None,
) -> list[str]:
    """Write `resources` with `write`, then call `then`. If either fails, restore the old values and
    raise the error."""
    _check_choice(missing_controllers)
    new = convert.settings(resources, lambda file: cgroup.read(directory, file))
    old = [
        setting for changed in reversed(new) for setting in _restoring_writes(directory, changed)
    ]
    try:
        # The files first: a limit that the kernel refuses must not reach systemd.
        notes = write(directory, resources, missing_controllers)
        if then is not None:
            then()
    except Exception as error:
        _restore(directory, old, error)
        raise
    return notes


def _restore(directory: str, old: list[CgroupSetting], error: Exception) -> None:
    """Write the old values. Then try again to write those that the kernel has refused. Add a note
    to `error` for each value that it refuses twice."""
    # Quota and burst bound each other: the kernel may refuse the old value of one as long as the
    # other has its new value.
    refused = [setting for setting in old if _try_write(directory, setting) is not None]
    for setting in refused:
        if (failure := _try_write(directory, setting)) is not None:
            error.add_note(f"could not restore {setting.file}: {failure}")


def _try_write(directory: str, setting: CgroupSetting) -> KernelError | None:
    """Write a setting; returns the error when the kernel refuses it."""
    try:
        cgroup.write(directory, setting.file, setting.content)
    except KernelError as error:
        return error
    return None


def _restoring_writes(directory: str, changed: CgroupSetting) -> list[CgroupSetting]:
    """Return the writes that restore the present content of the file that `changed` will overwrite.
    Empty if the file is missing, or cannot be read (for example memory.reclaim)."""
    try:
        content = cgroup.read(directory, changed.file)
    except KernelError as error:
        if error.errno != errno.EINVAL:
            raise
        return []
    if content is None:
        return []
    lines = content.splitlines() or [""]
    key = changed.content.partition(" ")[0]
    if changed.file in NO_LIMIT and ":" in key:
        own = [line for line in lines if line.split(" ")[0] == key]
        lines = own or [f"{key} {NO_LIMIT[changed.file]}"]
    return [CgroupSetting(changed.file, line) for line in lines]


def _check_choice(missing_controllers: str) -> None:
    if missing_controllers not in ("error", "warn"):
        raise InvalidArgument(
            f"missing_controllers {missing_controllers!r} is not one of error, warn"
        )


def _write_or_note(directory: str, setting: CgroupSetting, missing_controllers: str) -> list[str]:
    try:
        cgroup.write(directory, setting.file, setting.content)
    except KernelError as error:
        if (
            error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM)
            or cgroup.read(directory, setting.file) is not None
        ):
            if error.errno in NOT_A_VALUE:
                raise InvalidArgument(
                    f"{error.message} ({os.strerror(error.errno).lower()})"
                ) from None
            raise
        return _note_missing(directory, setting, missing_controllers)
    return []


def _note_missing(directory: str, setting: CgroupSetting, missing_controllers: str) -> list[str]:
    """Return a list with a warning that the file of `setting` is missing; an empty list if the
    setting means "no limit". Raises Unsupported unless `missing_controllers` allows the warning."""
    # "No limit" is what a missing file means already.
    if setting.dispensable:
        return []
    if setting.controller in cgroup.controllers(directory):
        raise Unsupported(f"{CANNOT_SET} {setting.file}: this kernel has no such file")
    here = setting.controller in cgroup.controllers(cgroup.root())
    controller = setting.controller
    reason = "is not enabled for this cgroup" if here else NOT_ON_THE_TREE
    limit = f"{CANNOT_SET} {setting.file} to {setting.content}"
    text = f"{limit}: the {controller} controller {reason}"
    if here or missing_controllers == "error":
        raise Unsupported(text)
    return [text]
