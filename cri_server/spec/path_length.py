"""Limits of a path in a request or an image: what is longer, no system call takes.

Source: path_resolution(7), ENAMETOOLONG; PATH_MAX and NAME_MAX of linux/limits.h.
"""

from __future__ import annotations

from pyrunc.errors import InvalidArgument

PATH_MAX = 4096  # bytes, with the NUL at the end
NAME_MAX = 255  # bytes of one component


def check(path: str, field: str) -> None:
    """Raises InvalidArgument that names the field for a path that is too long. The error does not
    repeat the path."""
    size = _size(path)
    if size >= PATH_MAX:
        raise InvalidArgument(f"{field} has {size} bytes; a path has at most {PATH_MAX - 1}")
    if size > NAME_MAX and (longest := max(map(_size, path.split("/")))) > NAME_MAX:
        raise InvalidArgument(
            f"{field} has a name of {longest} bytes; a name has at most {NAME_MAX}"
        )


def _size(text: str) -> int:
    """In bytes; a byte that is not UTF-8 is one surrogate here."""
    return len(text.encode("utf-8", "replace"))
