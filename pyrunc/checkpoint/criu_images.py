"""Checks the folder of CRIU's images before CRIU, as root, opens files in it by name.

Only regular files, folders and sockets are allowed, and a link `parent` to the folder of a
pre-dump, for which the same rules hold. CRIU would follow any other link: it would read a file of
the host into a container's memory or, in a dump, overwrite it. A pipe would make CRIU wait forever.
CRIU itself checks the files' content.

A user who can change the folder during the restore gets the rights that CRIU restores with. So only
root should be able to change it.
"""

from __future__ import annotations

import os
from stat import S_IFMT, S_ISDIR, S_ISLNK, S_ISREG, S_ISSOCK

from pyrunc import jsontext
from pyrunc.errors import InvalidArgument, NotFound

PARENT = "parent"
PARENTS_AT_MOST = 100
DESCRIPTORS, INVENTORY = "descriptors.json", "inventory.img"
MOST_STREAMS_BYTES = 1 << 16
_HEX = frozenset("0123456789abcdef")
_KINDS = {
    0o120000: "a link",
    0o010000: "a pipe",
    0o140000: "a socket",
    0o020000: "a device",
    0o060000: "a device",
}


def check(folder: int, name: str) -> None:
    """Raise InvalidArgument if a file in the folder, or in the folders of its earlier pre-dumps,
    cannot be an image. `name`: the folder's name in errors."""
    current, names = os.dup(folder), [name]
    try:
        while _has_parent(current, "/".join(names)):
            if len(names) > PARENTS_AT_MOST:
                raise InvalidArgument(f"{name}: more than {PARENTS_AT_MOST} parents")
            # A chain of pre-dumps can be long, but links that lead in a circle would never end.
            below, current = current, _open_parent(current, "/".join(names))
            os.close(below)
            names.append(PARENT)
    finally:
        os.close(current)


def check_log(folder: int, name: str, log: str) -> None:
    """Raise InvalidArgument unless the log file, which CRIU will overwrite, is absent or a regular
    file."""
    try:
        _require_regular(
            os.stat(log, dir_fd=folder, follow_symlinks=False).st_mode, f"{name}/{log}"
        )
    except FileNotFoundError:
        pass


def require_dump(folder: int, name: str) -> None:
    """Raise NotFound unless the folder has the files of a complete dump."""
    for file in (DESCRIPTORS, INVENTORY):
        try:
            if os.stat(file, dir_fd=folder, follow_symlinks=False).st_size:
                continue
        except FileNotFoundError:
            pass
        raise NotFound(f"{name} has no checkpoint: {file} is missing")


def streams(folder: int, name: str) -> list[str]:
    """Return the names of descriptors 0 to 2 that `checkpoint` has stored in the folder. `name`:
    the folder's name in errors. Raises InvalidArgument, OSError."""
    number = os.open(
        DESCRIPTORS, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
    )
    with open(number, "rb", buffering=0) as file:
        content = file.read(MOST_STREAMS_BYTES) or b""
    try:
        names = jsontext.loads(content)
    except ValueError:
        names = None
    if (
        not isinstance(names, list)
        or len(names) > 3
        or not all(isinstance(word, str) for word in names)
    ):
        raise InvalidArgument(f"{name}/{DESCRIPTORS} is not a list of three names")
    return names


def is_external(stream: str) -> bool:
    """Return whether the restored process gets one of the runtime's own streams instead of
    `stream`. True for a pipe (`pipe:[12]`) and for a file of the host (`file[mount:inode]`, in
    hex)."""
    kind, _, rest = stream.partition("[")
    number, end, after = rest.partition("]")
    parts = number.split(":")
    if not end or after or not all(part and _HEX.issuperset(part) for part in parts):
        return False
    return (kind, len(parts)) in (("pipe:", 1), ("file", 2))


def _has_parent(folder: int, name: str) -> bool:
    has_parent = False
    with os.scandir(folder) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if entry.name == PARENT and S_ISLNK(mode):
                has_parent = True
            # Folders and sockets cannot be opened as a file for writing.
            elif not S_ISDIR(mode) and not S_ISSOCK(mode):
                _require_regular(mode, f"{name}/{entry.name}")
    return has_parent


def _open_parent(folder: int, name: str) -> int:
    target = os.readlink(PARENT, dir_fd=folder)
    if target.startswith("/"):
        raise InvalidArgument(
            f"{name}/{PARENT} is an absolute link; a pre-dump makes a relative one"
        )
    try:
        # This link is followed on purpose, and the folder behind it is checked by the same rules.
        return os.open(PARENT, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        raise NotFound(f"{name}/{PARENT} does not lead to a folder") from None


def _require_regular(mode: int, path: str) -> None:
    if not S_ISREG(mode):
        raise InvalidArgument(
            f"{path} is {_KINDS.get(S_IFMT(mode), 'not a regular file')}, not an image"
        )
