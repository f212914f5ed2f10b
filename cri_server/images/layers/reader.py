"""Reads a layer's tar for the unpacker and for the EROFS index builder, so that both refuse the
same names.

Names with `..` are refused. Links on the way to a name are followed as if the layer's root were
`/`; the last name is never followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Protocol

from cri_server.images.layers import tar_headers
from cri_server.images.layers.inflate import BadLayer, UnpackLimits
from cri_server.images.layers.tar_headers import TarMember, TarSource, members, quoted
from cri_server.images.layers.walk_budget import WalkBudget
from pyrunc.errors import ResourceExhausted

ROOT, HIDDEN, OPAQUE = "root", "hidden", "opaque"
# What is wrong with a hard link's target.
ABSENT, NO_FILE = ", which the layer does not have", ", which is not a file"
WHITEOUT = b".wh."
OPAQUE_NAME = b".wh..wh..opq"
AUFS = b".wh..wh."
# As MAXSYMLINKS of Linux (include/linux/namei.h), so that the kernel, which the unpacker uses, and
# the index builder agree.
LINKS_AT_MOST = 40
STEPS_AT_MOST = 4096  # on the path of one name, including its links
# PATH_MAX is 4096 with the final NUL.
PATH_LIMIT_BYTES = 4095
# The kernel's dev_t has 12 and 20 bits (include/linux/kdev_t.h).
MAJOR_LIMIT, MINOR_LIMIT = 1 << 12, 1 << 20
NODES = {
    tar_headers.CHARACTER: stat.S_IFCHR,
    tar_headers.BLOCK_DEVICE: stat.S_IFBLK,
    tar_headers.FIFO: stat.S_IFIFO,
}


class Cursor(Protocol):
    """The directory that the resolution of a path in a layer has reached so far. It begins at the
    root."""

    def enter(self, name: bytes) -> tuple[int, bytes] | None:
        """Enter the directory `name` and return None. If `name` is a symbolic link, do not enter;
        return a pair: a number that identifies the link, and the link's target."""

    def leave(self) -> None:
        """Move to the parent directory; in the root, which has none, stay."""

    def restart(self) -> None:
        """Move to the layer's root."""


def checked_members(
    source: TarSource,
    limits: UnpackLimits,
    budget: WalkBudget,
    tick: Callable[[], None],
    tick_entries: int,
) -> Iterator[tuple[str, TarMember, list[bytes]]]:
    """Yield the layer's entries as (kind, entry, names).

    - `kind`: FILE, DIRECTORY … of `tar_headers`, ROOT for the layer's root directory, HIDDEN for a
      whiteout, or OPAQUE for an opaque whiteout.
    - `names`: the components of the entry's path; for a whiteout, of the path that it hides.
    - `tick`: called every `tick_entries` entries; it may raise.

    Raises ResourceExhausted, and BadLayer for entries that can be refused without looking at the
    files made so far.
    """
    for entry in members(source):
        budget.entries += 1
        check_count(budget.entries, limits)
        if budget.entries % tick_entries == 0:
            tick()
        names = components(entry.name)
        if WHITEOUT in entry.name and any(name.startswith(WHITEOUT) for name in names):
            if entry.kind == tar_headers.FILE:
                tar_headers.skip(source, entry.stored)
            if hidden := _hidden(entry, *names):
                yield hidden[0], entry, hidden[1]
        elif names:
            _check(entry, limits)
            yield entry.kind, entry, names
        elif entry.kind == tar_headers.DIRECTORY:
            yield ROOT, entry, names
        elif entry.kind != tar_headers.HARDLINK or components(
            entry.link
        ):  # kaniko links `/` to `.`
            raise BadLayer(f"{quoted(entry.name)}: the root must be a directory")


def check_count(count: int, limits: UnpackLimits) -> None:
    """Raise ResourceExhausted if `count`, a number of entries or files, is above
    `limits.entries`."""
    if count > limits.entries:
        raise ResourceExhausted(f"the layer has more than {limits.entries} entries")


def _check(entry: TarMember, limits: UnpackLimits) -> None:
    name = quoted(entry.name)
    if entry.kind == tar_headers.FILE and entry.size > limits.size_bytes:
        raise ResourceExhausted(
            f"{name}: a file of {entry.size} bytes is too large: {limits.reason}"
        )
    if entry.kind == tar_headers.SYMLINK and not entry.link:
        raise BadLayer(f"{name}: the symbolic link has no target")
    if entry.major >= MAJOR_LIMIT or entry.minor >= MINOR_LIMIT:
        raise BadLayer(f"{name}: device number {entry.major}:{entry.minor} is out of range")
    if entry.kind == tar_headers.HARDLINK:
        target = components(entry.link)
        if not target or any(part.startswith(WHITEOUT) for part in target):
            raise bad_link(entry, "")


def _hidden(entry: TarMember, *names: bytes) -> tuple[str, list[bytes]] | None:
    """Return the kind of the whiteout `entry` (HIDDEN or OPAQUE), and the components of the path
    that it hides. `names`: the components of the entry's own path. Raises BadLayer.

    - `.wh.NAME` hides NAME of the lower layers.
    - `.wh..wh..opq` hides all that the lower layers have in the directory of the whiteout.
    - Any other `.wh..wh.` name is metadata of aufs: return None.

    A whiteout hides files of lower layers only. It hides no file of the layer that contains it,
    not even one that is earlier in the tar.
    """
    *folder, last = names
    if any(name.startswith(AUFS) for name in folder):
        return None
    if any(name.startswith(WHITEOUT) for name in folder):
        raise BadLayer(f"{quoted(entry.name)}: a whiteout cannot be a directory")
    if last == OPAQUE_NAME:
        return OPAQUE, folder
    if last.startswith(AUFS):
        return None
    hidden = last.removeprefix(WHITEOUT)
    if hidden in (b"", b".", b".."):
        raise BadLayer(f"{quoted(entry.name)}: the whiteout names no file")
    return HIDDEN, [*folder, hidden]


def path_error(number: int) -> OSError:
    """Return an OSError with the errno `number`, as the kernel raises it for a path that it
    refuses."""
    return OSError(number, os.strerror(number))


def follow(names: list[bytes], cursor: Cursor, budget: WalkBudget) -> list[int]:
    """Move the cursor along the path `names`, also over symbolic links. Return the numbers by which
    `Cursor.enter` identifies these links. Raises BadLayer, OSError."""
    # One directory after the other: a path may have thousands of components.
    pending, links, steps = names[::-1], list[int](), 0
    while pending:
        name = pending.pop()
        if name in (b"", b"."):
            continue
        steps += 1
        if steps > STEPS_AT_MOST:
            raise path_error(errno.ELOOP)
        if name == b"..":  # only in links: `components` refuses it in names
            cursor.leave()
            continue
        link = cursor.enter(name)
        if link is None:
            continue
        identity, target = link
        links.append(identity)
        if len(links) > LINKS_AT_MOST:
            raise path_error(errno.ELOOP)
        if target.startswith(b"/"):
            cursor.restart()
        pending.extend(target.split(b"/")[::-1])
    budget.charge(steps)
    return links


def components(name: bytes) -> list[bytes]:
    """Split the name of a tar member at `/` into the components of its path. An absolute name is
    taken relative to the layer's root. Raises BadLayer for `..`."""
    names = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in names:
        raise BadLayer(f"{quoted(name)}: the name contains '..'")
    return names


def joined(folder: bytes, name: bytes) -> bytes:
    """Return the path of `name` in `folder`. Raises OSError if the path is too long for the
    kernel."""
    path = b"/".join((folder, name)) if folder else name
    if len(path) > PATH_LIMIT_BYTES:
        raise path_error(errno.ENAMETOOLONG)
    return path


def bad_link(entry: TarMember, why: str) -> BadLayer:
    """Return the error for a hard link that cannot be made. `why`: the end of the message (ABSENT:
    the layer does not have the target; NO_FILE: the target is not a file; "": no reason)."""
    return BadLayer(f"{quoted(entry.name)}: a hard link to {quoted(entry.link)}{why}")


def supported_attributes(entry: TarMember) -> dict[bytes, bytes]:
    """Return the entry's extended attributes that containers may have: file capabilities, POSIX
    ACLs, and `user.*` except `user.overlay.*`, which would control overlayfs. Any other attribute
    could affect the host. Raises BadLayer for a name with a NUL byte."""
    if any(b"\0" in name for name in entry.xattrs):
        raise BadLayer(
            f"{quoted(entry.name)}: the name of an extended attribute contains a NUL byte"
        )
    return {name: value for name, value in entry.xattrs.items() if _is_supported(name)}


def _is_supported(name: bytes) -> bool:
    if name in (b"security.capability", b"system.posix_acl_access", b"system.posix_acl_default"):
        return True
    return name.startswith(b"user.") and not name.startswith(b"user.overlay.")
