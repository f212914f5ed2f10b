"""Saves a container's writable layer: a tar of its files, and a list of removed paths.

A path of the image is in the list if the layer has a whiteout for it. It is also in the list if an
opaque directory of the layer hides it, and the layer has no file at the path. checkpointctl, podman
and CRI-O use the same format. The caller freezes the container, so the layer does not change.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping

from cri_server.images.layers.trees import DirectoryWalker, depth_first_key, is_opaque
from pyrunc.errors import KernelError, Unsupported
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.path import open_beneath, open_regular_at
from pyrunc.kernel.tree import FOLDER

OVERLAY = "trusted.overlay."
# With its options redirect_dir and metacopy overlayfs marks renamed folders and files without data
# by these attributes; their content is in a lower layer.
POINTERS = (f"{OVERLAY}redirect", f"{OVERLAY}metacopy")
_NONE: Mapping[str, str] = {}
_XATTR = "SCHILY.xattr."
_KINDS = {
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFREG: tarfile.REGTYPE,
}


def write(
    upper: str,
    target: str,
    open_lower: Callable[[], int],
    without: Collection[str] = frozenset(),
    volumes: Mapping[str, str] = _NONE,
) -> list[str]:
    """Write the files of the layer `upper` to the new tar file `target`. Returns the sorted
    absolute paths that the container has removed from its image.

    - `open_lower`: opens the image's tree. It is called only if the layer has opaque directories.
    - `without`: absolute paths to leave out, with everything below them. They are mount points.
    - `volumes`: the container's own volumes, as {absolute path in the container: folder}. Their
      files are written as if they were in the layer.

    Raises Unsupported, KernelError, OSError.
    """
    with closing_fd(os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        with DirectoryWalker(root) as folders, open(target, "xb") as file:
            os.chmod(target, 0o600)
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                left_out = {os.fsencode(path).strip(b"/") for path in without}
                writer = _TarWriter(folders, tar, left_out)
                writer.run()
                for place, source in volumes.items():
                    _write_volume(source, os.fsencode(place).strip(b"/"), tar)
            file.flush()
            os.fsync(file.fileno())
        removed = [*writer.removed, *_hidden(writer.opaque, open_lower, writer.seen)]
    return sorted("/" + os.fsdecode(path) for path in removed)


def _write_volume(source: str, place: bytes, tar: tarfile.TarFile) -> None:
    with (
        closing_fd(os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root,
        DirectoryWalker(root) as folders,
    ):
        _TarWriter(folders, tar, set(), place + b"/").run()


class _TarWriter:
    """Writes a directory tree into a tar, with `prefix` before each path. Collects whiteouts in
    `removed` and opaque directories in `opaque`."""

    def __init__(
        self,
        folders: DirectoryWalker,
        tar: tarfile.TarFile,
        without: set[bytes],
        prefix: bytes = b"",
    ) -> None:
        self._folders = folders
        self._tar = tar
        self._without = without
        self._prefix = prefix
        self._links: dict[tuple[int, int], str] = {}
        self.removed: list[bytes] = []
        self.opaque: list[bytes] = []
        self.seen: dict[bytes, list[bytes]] = {}  # folder -> its names

    def run(self) -> None:
        pending = [b""]
        own = self._folders.open(b"")
        self._entry(own, b".", b"" if self._prefix else b".", os.fstat(own))
        while pending:
            path = pending.pop()
            below = sorted(self._folder(path), key=depth_first_key, reverse=True)
            pending += below

    def _folder(self, path: bytes) -> list[bytes]:
        """Write the files and subfolders of the folder `path`, without the content of the
        subfolders. Returns the subfolders' paths."""
        place = self._folders.open(path)
        if is_opaque(place):
            self.opaque.append(path)
        names = self.seen[path] = sorted(map(os.fsencode, os.listdir(f"/proc/self/fd/{place}")))
        below = []
        for name in names:
            child = path + b"/" + name if path else name
            if child in self._without:
                continue
            status = os.stat(name, dir_fd=place, follow_symlinks=False)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                self.removed.append(child)
                continue
            self._entry(place, name, child, status)
            if stat.S_ISDIR(status.st_mode):
                below.append(child)
        return below

    def _entry(self, place: int, name: bytes, path: bytes, status: os.stat_result) -> None:
        kind = _KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is None:  # a socket: tars cannot hold sockets, and CRIU creates bound sockets again
            return
        member = tarfile.TarInfo(os.fsdecode(self._prefix + path))
        member.type, member.mode = kind, stat.S_IMODE(status.st_mode)
        member.uid, member.gid, member.mtime = status.st_uid, status.st_gid, status.st_mtime
        if kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
            member.devmajor, member.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
        if kind == tarfile.SYMTYPE:
            member.linkname = os.fsdecode(os.readlink(name, dir_fd=place))
        if kind != tarfile.DIRTYPE and status.st_nlink > 1:
            # Two copies in place of a hard link would no longer change together after a restore.
            first = self._links.setdefault((status.st_dev, status.st_ino), member.name)
            if first != member.name:
                member.type, member.linkname = tarfile.LNKTYPE, first
                self._tar.addfile(member)
                return
        # Opening a device or FIFO has effects, and user.* attributes exist on files and directories
        # only (xattr(7)).
        if kind not in (tarfile.REGTYPE, tarfile.DIRTYPE):
            self._tar.addfile(member)
            return
        if kind == tarfile.DIRTYPE:
            number = os.open(name, FOLDER, dir_fd=place)
        else:  # /dev/shm may change: not all of its writers are frozen
            number = open_regular_at(place, name)
        with closing_fd(number):
            member.pax_headers = dict(_attributes(number, member.name))
            if kind == tarfile.DIRTYPE:
                self._tar.addfile(member)
            else:
                member.size = status.st_size
                with open(number, "rb", closefd=False) as content:
                    self._tar.addfile(member, content)


def _attributes(descriptor: int, path: str) -> Iterator[tuple[str, str]]:
    """Yield the extended attributes of an open file, except those of overlayfs, as keys and values
    of a PAX header. Raises Unsupported for an attribute that cannot be saved; `path` names the file
    in the error."""
    for name in os.listxattr(descriptor):
        if name in POINTERS:
            raise Unsupported(
                f"cannot save {path!r}: the content to which its attribute {name} points is"
                " outside the writable layer"
            )
        if not name.startswith(OVERLAY):
            if "=" in name or not _is_utf8(name):  # "=" ends a PAX key, which is UTF-8
                raise Unsupported(
                    f"{path!r} has the extended attribute {name!r}, whose name a tar cannot store"
                )
            yield _XATTR + name, os.getxattr(descriptor, name).decode("utf-8", "surrogateescape")


def _is_utf8(name: str) -> bool:
    """Return whether a name that `os` returned is valid UTF-8. `os` decodes other bytes as
    surrogate escapes."""
    return all(not "\udc80" <= character <= "\udcff" for character in name)


def _hidden(
    opaque: list[bytes], open_lower: Callable[[], int], seen: dict[bytes, list[bytes]]
) -> Iterator[bytes]:
    """Yield each path of the image that a directory in `opaque` hides and that does not exist in
    the layer. `seen`: the names in each folder of the layer."""
    if not opaque:
        return
    with closing_fd(open_lower()) as lower:
        pending = list(opaque)
        while pending:
            path = pending.pop()
            try:
                folder = open_beneath(lower, path or b".", os.O_RDONLY | os.O_DIRECTORY)
            except KernelError:  # the image has no folder there
                continue
            with closing_fd(folder):
                names = [os.fsencode(name) for name in os.listdir(folder)]
            for name in names:
                child = path + b"/" + name if path else name
                if name not in seen[path]:
                    yield child
                elif child in seen:
                    pending.append(child)
