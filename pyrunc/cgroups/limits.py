"""Writes settings to a group's files: in order, with one policy for missing controllers, and
with restoring on failure.

On a hybrid host most controllers live on v1, where they are left alone. The caller decides per call
whether a limit that cannot be set there is an error.
"""

from __future__ import annotations

import errno
import os

from pyrunc.cgroups import convert
from pyrunc.errors import InvalidArgument, KernelError, Unsupported
from pyrunc.kernel import cgroup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from pyrunc.cgroups.convert import CgroupSetting

# The beginning of errors about a missing controller, and the reason for which `missing_controllers`
# decides.
CANNOT_SET, NOT_ON_THE_TREE = "cannot set", "is not on the cgroup v2 tree"

# The kernel's errnos for a value: not valid for this file, out of range, a missing device.
NOT_A_VALUE = (errno.EINVAL, errno.ERANGE, errno.EDOM, errno.E2BIG, errno.EOVERFLOW, errno.ENODEV)

# Per-device files and their text for "no limit": writing one line leaves the other lines unchanged.
NO_LIMIT = {
    "io.max": "rbps=max wbps=max riops=max wiops=max",
    "io.weight": "default",
    "rdma.max": "hca_handle=max hca_object=max",
}


def write(directory: str, resources: Mapping[str, Any], missing_controllers: str) -> list[str]:
    """Write all of `resources`; returns warnings. Stops at the first failure. Errors: see
    `Cgroup.apply`."""
    _check_choice(missing_controllers)
    notes = convert.warnings(resources)
    for setting in convert.settings(resources, lambda file: cgroup.read(directory, file)):
        notes += _write_or_note(directory, setting, missing_controllers)
    _burst_after_quota(directory, resources)
    return notes


def replace(
    directory: str,
    resources: Mapping[str, Any],
    missing_controllers: str,
    then: Callable[[], None] | None = None,
) -> list[str]:
    """Write like `write`, then call `then`; a failure of either first restores the old values."""
    _check_choice(missing_controllers)
    new = convert.settings(resources, lambda file: cgroup.read(directory, file))
    old = [(setting, _content(directory, setting.file)) for setting in new]
    try:
        # The files first: a limit that the kernel refuses must not reach systemd.
        notes = write(directory, resources, missing_controllers)
        if then is not None:
            then()
    except Exception as error:
        for setting, content in reversed(old):
            _restore(directory, setting, content, error)
        raise
    return notes


def _content(directory: str, file: str) -> str | None:
    """Return the content to restore; None for a file that cannot be read, such as
    memory.reclaim."""
    try:
        return cgroup.read(directory, file)
    except KernelError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _check_choice(missing_controllers: str) -> None:
    if missing_controllers not in ("error", "warn"):
        raise InvalidArgument(f"missing_controllers is {missing_controllers!r}: one of error, warn")


def _write_or_note(directory: str, setting: CgroupSetting, missing_controllers: str) -> list[str]:
    try:
        cgroup.write(directory, setting.file, setting.content)
    except KernelError as error:
        if setting.file == "cpu.max.burst" and error.errno == errno.EINVAL:
            # It is above the present quota until cpu.max is written; written again at the end.
            return []
        if (
            error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM)
            or cgroup.read(directory, setting.file) is not None
        ):
            if error.errno in NOT_A_VALUE:
                raise InvalidArgument(
                    f"{error.message} ({os.strerror(error.errno).lower()})"
                ) from None
            raise
        return _missing(directory, setting, missing_controllers)
    return []


def _missing(directory: str, setting: CgroupSetting, missing_controllers: str) -> list[str]:
    """Report a missing file: a warning, or Unsupported."""
    # "No limit" is what a missing file means already.
    if setting.dispensable:
        return []
    if setting.controller in cgroup.controllers(directory):
        raise Unsupported(f"{CANNOT_SET} {setting.file}: this kernel does not offer it")
    here = setting.controller in cgroup.controllers(cgroup.root())
    controller = setting.controller
    reason = "is not enabled for this cgroup" if here else NOT_ON_THE_TREE
    limit = f"{CANNOT_SET} {setting.file} to {setting.content}"
    text = f"{limit}: the {controller} controller {reason}"
    if here or missing_controllers == "error":
        raise Unsupported(text)
    return [text]


def _burst_after_quota(directory: str, resources: Mapping[str, Any]) -> None:
    burst = (resources.get("cpu") or {}).get("burst")
    if burst and cgroup.read(directory, "cpu.max.burst") not in (None, f"{int(burst)}\n"):
        cgroup.write(directory, "cpu.max.burst", str(int(burst)))


def _restore(directory: str, setting: CgroupSetting, content: str | None, error: Exception) -> None:
    if content is None:
        return
    key = setting.content.partition(" ")[0]
    if setting.file in NO_LIMIT and ":" in key:
        lines = [line for line in content.splitlines() if line.split(" ")[0] == key] or [
            f"{key} {NO_LIMIT[setting.file]}"
        ]
    else:
        lines = content.splitlines() or [""]
    for line in lines:
        try:
            cgroup.write(directory, setting.file, line)
        except KernelError as failure:
            error.add_note(f"could not restore {setting.file}: {failure}")
