"""Stdin, stdout and stderr of a process that is about to start: whose they are, and no null device
of the host among them."""

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
    """`stdio` with one null device that no other process has in place of each null device, and its
    descriptor, which is the caller's to close; -1 when there was none."""
    nulls = [is_null(number) for number in stdio]
    if not any(nulls):
        return stdio, -1
    own = open_null()
    return [own if null else number for null, number in zip(nulls, stdio, strict=True)], own


def give_to(owner: int, stdio: Sequence[int]) -> None:
    """Make `owner`, an id of the host, the owner of descriptors that are not /dev/null, so that the
    process can open /dev/stdout again. KernelError."""
    for number in stdio:
        status = os.fstat(number)
        if status.st_uid == owner or (S_ISCHR(status.st_mode) and status.st_rdev == DEVICE):
            continue
        try:
            os.fchown(number, owner, -1)
        except OSError as error:
            # EINVAL: an id that is not mapped, which setresuid will tell.
            if error.errno not in (EINVAL, EPERM, EROFS):
                raise KernelError.of(error, "fchown", f"stdio {number}") from None
