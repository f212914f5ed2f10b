"""Checks that paths in requests and images are not too long for system calls.

Source: path_resolution(7), ENAMETOOLONG; PATH_MAX and NAME_MAX of linux/limits.h.
"""

from __future__ import annotations

from pyrunc.errors import InvalidArgument

PATH_MAX = 4096  # bytes, with the NUL at the end
NAME_MAX = 255  # bytes of one component


def check(path: str, field: str) -> None:
    """Raise InvalidArgument for a path that is too long. The message names `field`, not the
    path."""
    size = _size(path)
    if size >= PATH_MAX:
        raise InvalidArgument(f"{field} has {size} bytes; a path has at most {PATH_MAX - 1}")
    if size > NAME_MAX and (longest := max(map(_size, path.split("/")))) > NAME_MAX:
        raise InvalidArgument(
            f"{field} has a name of {longest} bytes; a name has at most {NAME_MAX}"
        )


def _size(text: str) -> int:
    """Return the length of a path in bytes. A surrogate in `text` stands for one byte that is not
    UTF-8."""
    return len(text.encode("utf-8", "replace"))
