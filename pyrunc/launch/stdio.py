"""Prepares stdin, stdout and stderr of a process that is about to start: their owner, and private
null devices instead of the host's."""

from __future__ import annotations

import os
from errno import EINVAL, EPERM, EROFS
from stat import S_ISCHR

from pyrunc.errors import KernelError
from pyrunc.launch.null import DEVICE, is_null, open_null

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def own_nulls(stdio: Sequence[int]) -> tuple[Sequence[int], int]:
    """Replace each null device in `stdio` by one private null device. Returns the new stdio, and
    the private device's descriptor, which the caller closes. The descriptor is -1 when there was
    nothing to replace."""
    nulls = [is_null(number) for number in stdio]
    if not any(nulls):
        return stdio, -1
    own = open_null()
    return [own if null else number for null, number in zip(nulls, stdio, strict=True)], own


def give_to(owner: int, stdio: Sequence[int]) -> None:
    """Make `owner`, a uid on the host, the owner of the files in `stdio`, so that the process can
    open /dev/stdout again. Skips null devices. Raises KernelError."""
    for number in stdio:
        status = os.fstat(number)
        if status.st_uid == owner or (S_ISCHR(status.st_mode) and status.st_rdev == DEVICE):
            continue
        try:
            # /proc/self/fd/1 is opened with the file's own permissions: a pipe of root could not be
            # opened by the user (runc does the same).
            os.fchown(number, owner, -1)
        except OSError as error:
            # EINVAL: the id is not mapped; setresuid will fail and report that.
            # EPERM: the caller's file may be another user's, when we are root of a user namespace.
            # EROFS: the file of a read-only mount.
            if error.errno not in (EINVAL, EPERM, EROFS):
                raise KernelError.of(error, "fchown", f"stdio {number}") from None
