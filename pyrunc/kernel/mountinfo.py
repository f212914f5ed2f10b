"""Reads the mounts of this process's mount namespace from /proc/self/mountinfo
(proc_pid_mountinfo(5))."""

from __future__ import annotations

import os

from pyrunc.kernel.fd import read_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class MountPoint:
    """One mount of the process's mount namespace (proc_pid_mountinfo(5)).

    - `root`: the folder of the mounted file system that appears at the mount point
    - `path`: the mount point
    - `propagation`: tags (`shared`, `master`, …)
    - `kind`: the type of the file system
    - `superblock`: the superblock's options
    """

    __slots__ = ("kind", "path", "propagation", "root", "superblock")

    def __init__(self, line: bytes) -> None:
        left, _, right = line.partition(b" - ")
        fields = left.split(b" ")
        self.root, self.path = _unescaped(fields[3]), _unescaped(fields[4])
        # The optional fields, any number of them up to the hyphen (proc_pid_mountinfo(5)).
        self.propagation = {os.fsdecode(tag.partition(b":")[0]) for tag in fields[6:]}
        kind, _, others = right.partition(b" ")
        self.kind = os.fsdecode(kind)
        self.superblock = os.fsdecode(others.rpartition(b" ")[2]).split(",")


def mount_points() -> Iterator[MountPoint]:
    """Yield every mount in the order of /proc/self/mountinfo: the newest mount comes last."""
    for line in read_file("/proc/self/mountinfo").split(b"\n"):
        if line:
            yield MountPoint(line)


def mount_of(path: str, table: Iterable[MountPoint]) -> MountPoint | None:
    """Return the mount in `table` that contains `path`, an absolute path without symbolic links.
    Only compares the paths as texts.

    The result is the mount with the longest mount point. If several mounts have this mount point,
    it is the last one in the table. None if no mount contains `path`.
    """
    covering = None
    for point in table:
        beneath = point.path == "/" or f"{path}/".startswith(f"{point.path}/")
        # Of two mounts at one place, the later covers the earlier.
        if beneath and (covering is None or len(point.path) >= len(covering.path)):
            covering = point
    return covering


def _unescaped(place: bytes) -> str:
    """Decode the octal escapes of a mount point. The kernel writes a blank or a backslash as a
    backslash and three octal digits."""
    first, *others = place.split(b"\\")
    return os.fsdecode(first + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in others))
