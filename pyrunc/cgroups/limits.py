"""Settings into a group's files: in their order, with one answer to a missing controller, and
undone when asked to.

On a hybrid host most controllers live on v1, where they are left alone. Whether a limit that cannot
be set there stops the work is the caller's decision, made per call.
"""

from __future__ import annotations

import errno
import os

from pyrunc.cgroups import convert
from pyrunc.errors import InvalidArgument, KernelError, Unsupported
from pyrunc.kernel import cgroup as tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from pyrunc.cgroups.convert import Setting

# How errors about a missing controller begin, and what they say where `missing_controllers`
# decides.
CANNOT_SET, NOT_ON_THE_TREE = "cannot set", "is not on the cgroup v2 tree"

# What the kernel says about a value: not one of this file's, out of its range, a device that is not
# there.
NOT_A_VALUE = (errno.EINVAL, errno.ERANGE, errno.EDOM, errno.E2BIG, errno.EOVERFLOW, errno.ENODEV)

# Per-device files: writing one line leaves the other lines as they are; what stands for "no limit"
# there.
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
    for setting in convert.settings(resources, lambda file: tree.read(directory, file)):
        notes += _write_or_note(directory, setting, missing_controllers)
    _burst_after_quota(directory, resources)
    return notes


def replace(
    directory: str,
    resources: Mapping[str, Any],
    missing_controllers: str,
    then: Callable[[], None] | None = None,
) -> list[str]:
    """Like `write`, and `then` after it; a failure of either first puts back what was there before."""
    _check_choice(missing_controllers)
    wanted = convert.settings(resources, lambda file: tree.read(directory, file))
    old = [(setting, _content(directory, setting.file)) for setting in wanted]
    try:
        notes = write(directory, resources, missing_controllers)
        if then is not None:
            then()
    except Exception as error:
        for setting, content in reversed(old):
            _put_back(directory, setting, content, error)
        raise
    return notes


def _content(directory: str, file: str) -> str | None:
    """What to put back; None for what cannot be read, such as memory.reclaim."""
    try:
        return tree.read(directory, file)
    except KernelError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _check_choice(missing_controllers: str) -> None:
    if missing_controllers not in ("error", "warn"):
        raise InvalidArgument(f"missing_controllers is {missing_controllers!r}: one of error, warn")


def _write_or_note(directory: str, setting: Setting, missing_controllers: str) -> list[str]:
    try:
        tree.write(directory, setting.file, setting.content)
    except KernelError as error:
        if setting.file == "cpu.max.burst" and error.errno == errno.EINVAL:
            # above the quota that is in force until cpu.max is written: tried again at the end
            return []
        if (
            error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM)
            or tree.read(directory, setting.file) is not None
        ):
            if error.errno in NOT_A_VALUE:
                raise InvalidArgument(
                    f"{error.message} ({os.strerror(error.errno).lower()})"
                ) from None
            raise
        return _missing(directory, setting, missing_controllers)
    return []


def _missing(directory: str, setting: Setting, missing_controllers: str) -> list[str]:
    """The answer to a file that is not there."""
    if setting.dispensable:
        return []
    if setting.controller in tree.controllers(directory):
        raise Unsupported(f"{CANNOT_SET} {setting.file}: this kernel does not offer it")
    here = setting.controller in tree.controllers(tree.root())
    reason = "is not handed down to this cgroup" if here else NOT_ON_THE_TREE
    text = f"{CANNOT_SET} {setting.file} to {setting.content}: the {setting.controller} controller {reason}"
    if here or missing_controllers == "error":
        raise Unsupported(text)
    return [text]


def _burst_after_quota(directory: str, resources: Mapping[str, Any]) -> None:
    burst = (resources.get("cpu") or {}).get("burst")
    if burst and tree.read(directory, "cpu.max.burst") not in (None, f"{int(burst)}\n"):
        tree.write(directory, "cpu.max.burst", str(int(burst)))


def _put_back(directory: str, setting: Setting, content: str | None, error: Exception) -> None:
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
            tree.write(directory, setting.file, line)
        except KernelError as failure:
            error.add_note(f"could not put back {setting.file}: {failure}")
