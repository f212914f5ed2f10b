"""Renames and deletes log files to rotate them. Without a kubelet, rotation is the server's task.

Rotated files are named as kubelet names them, `LOG.YYYYMMDD-HHMMSS` in UTC, but are not compressed,
so that `pyrunc-cri logs` can read them.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping
from typing import NamedTuple

ANNOTATION = "io.pyrunc.log-rotation"
"""The annotation with the limits of a container's log: `BYTES FILES`. The author of a pod cannot
set it: kubelet copies a pod's annotations to the sandbox, never to a container."""
ROTATED = re.compile(r"\.\d{8}-\d{6}")
LEAST_FILES = 2  # the current one and a rotated one


class RotationLimits(NamedTuple):
    """The limits of a container's log. The defaults are kubelet's (containerLogMaxSize,
    containerLogMaxFiles).

    - `max_bytes`: a longer file is rotated.
    - `max_files`: the number of files to keep, the current one included.
    """

    max_bytes: int = 10 << 20
    max_files: int = 5

    def __str__(self) -> str:
        return f"{self.max_bytes} {self.max_files}"


def limits(annotations: Mapping[str, str]) -> RotationLimits | None:
    """Return the limits in a container's annotation `io.pyrunc.log-rotation`; None if the
    annotation is missing or malformed."""
    match = re.fullmatch(r"(\d{1,18}) (\d{1,6})", annotations.get(ANNOTATION, ""))
    if match is None or int(match[2]) < LEAST_FILES:
        return None
    return RotationLimits(int(match[1]), int(match[2]))


def rotated(path: str) -> list[str]:
    """Return the paths of the rotated files of the log at `path`, oldest first. Raises OSError."""
    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    rotated_names = [
        each for each in names if each.startswith(name) and ROTATED.fullmatch(each[len(name) :])
    ]
    return [os.path.join(folder, each) for each in sorted(rotated_names)]


def move(path: str, max_bytes: int) -> str | None:
    """Rename the log at `path` if it is longer than `max_bytes`.

    Return the new name, or None if no rotation is due. Return an empty string if the log is missing
    but a rotated file exists (a server was killed during a rotation). Raises OSError.
    """
    try:
        log_stat = os.lstat(path)
    except FileNotFoundError:
        return "" if rotated(path) else None
    if not stat.S_ISREG(log_stat.st_mode) or log_stat.st_size <= max_bytes:
        return None
    target = path + time.strftime(".%Y%m%d-%H%M%S", time.gmtime())
    if os.path.lexists(target):  # rotated in this second already: left to the next interval
        return None
    # The shim writes to the renamed file until it reopens the log, so no line is lost.
    os.rename(path, target)
    return target


def move_back(path: str, target: str) -> None:
    """Rename the rotated log `target` back to `path`, unless a new log is there. Raises OSError."""
    if target and not os.path.lexists(path):
        os.rename(target, path)


def remove_oldest(path: str, max_files: int) -> None:
    """Delete the oldest rotated files of the log at `path` until at most `max_files` files remain,
    the log itself included. Raises OSError."""
    files = rotated(path)
    for each in files[: max(0, len(files) - (max_files - 1))]:
        os.unlink(each)
