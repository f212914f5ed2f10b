"""The mounts of this process's mount namespace, as /proc/self/mountinfo lists them
(proc_pid_mountinfo(5)).

A line is split at line feeds and blanks only: a mount point may hold any other byte, also a
carriage return, which `splitlines` would take for the end of a line, and bytes that are no UTF-8.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class MountPoint:
    """One mount: the folder of the file system that it shows, where, its propagation (`shared`,
    `master`, …), its type, the options of its superblock."""

    __slots__ = ("kind", "path", "propagation", "root", "superblock")

    def __init__(self, line: bytes) -> None:
        left, _, right = line.partition(b" - ")
        fields = left.split(b" ")
        self.root, self.path = _unescaped(fields[3]), _unescaped(fields[4])
        self.propagation = {os.fsdecode(tag.partition(b":")[0]) for tag in fields[6:]}
        kind, _, others = right.partition(b" ")
        self.kind = os.fsdecode(kind)
        self.superblock = os.fsdecode(others.rpartition(b" ")[2]).split(",")


def mount_points() -> Iterator[MountPoint]:
    """Every mount, the last mounted last."""
    with open("/proc/self/mountinfo", "rb", buffering=0) as file:
        content = file.readall() or b""
    for line in content.split(b"\n"):
        if line:
            yield MountPoint(line)


def mount_of(path: str, table: Iterable[MountPoint]) -> MountPoint | None:
    """The mount that an absolute path without links lies on, by its text: the last one mounted of
    those with the longest path."""
    covering = None
    for point in table:
        beneath = point.path == "/" or f"{path}/".startswith(f"{point.path}/")
        if beneath and (covering is None or len(point.path) >= len(covering.path)):
            covering = point
    return covering


def _unescaped(place: bytes) -> str:
    """The kernel writes blanks and backslashes as a backslash and three octal digits."""
    first, *others = place.split(b"\\")
    return os.fsdecode(first + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in others))
