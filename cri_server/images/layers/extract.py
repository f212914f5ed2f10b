"""Makes the files of a layer's tar: resolves every name beneath the layer's root, and converts
whiteouts to overlayfs' form.

The tar is hostile. Names with `..` are refused. Parents are opened beneath the root by openat2(2);
a link on the way is followed inside the root only, and the last name is never followed. Nothing
else has access to the folder meanwhile (it is new and its parent is 0700), so there are no races.
`trusted.overlay.*` attributes are written by this module only, never taken from the layer.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from cri_server.images.layers import reader, tar_headers
from cri_server.images.layers.inflate import BadLayer, TarStream, UnpackLimits
from cri_server.images.layers.reader import bad_link, checked_members, components, joined
from cri_server.images.layers.tar_headers import TarMember, quoted
from cri_server.images.layers.trees import (
    OPAQUE_XATTR,
    DirectoryWalker,
    depth_first_key,
    open_folder,
)
from cri_server.images.layers.walk_budget import DIRECTORY_STEPS, WalkBudget
from cri_server.images.layers.zeros import is_hole
from cri_server.images.reserve import BLOCK_BYTES, Reserve
from pyrunc.errors import KernelError, ResourceExhausted
from pyrunc.kernel.fd import closing_fd, pwrite_all
from pyrunc.kernel.full import FULL, reason
from pyrunc.kernel.path import open_beneath
from pyrunc.kernel.tree import FOLDER, remove_tree

_PARENTS_OPEN = 48
NAMES_LIMIT_BYTES = 256 << 20  # of all paths that stay in memory until the layer is extracted
_TICK_BYTES = 4 << 20
_TICK_ENTRIES = 500
# EMLINK: a file has too many hard links (65,000 on ext4). E2BIG and ERANGE: an attribute is too
# large for setxattr(2).
_FAULTS_OF_THE_LAYER = {
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EXDEV, errno.ENOENT,
    errno.EEXIST, errno.EMLINK, errno.E2BIG, errno.ERANGE,
}  # fmt: skip
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Created = TypeVar("Created")
Path = bytes  # relative to the layer's root, without links, `.` and `..`; empty: the root


@dataclass(slots=True)
class Extracted:
    """The result of `extract`. `implicit`: parent directories that the tar does not describe (`a`
    for `a/b`). `opaque`: the layer hides all layers below it. `devices`: device nodes that this
    process may not make, as tuples (is_block, major, minor); an empty file stands for each."""

    size_bytes: int = 0
    inodes: int = 0
    implicit: set[Path] = field(default_factory=set)
    opaque: bool = False
    devices: dict[Path, tuple[bool, int, int]] = field(default_factory=dict)


def extract(
    stream: TarStream, root_fd: int, limits: UnpackLimits, tick: Callable[[], None] = lambda: None
) -> Extracted:
    """Make the files of the tar beneath `root_fd`, an empty directory. Return their size, their
    number, and what the server must know to finish the layer. `tick` is called regularly, and may
    raise.

    Raises BadLayer, ResourceExhausted (disk, limits), KernelError.
    """
    extractor = _Extractor(stream, root_fd, limits, tick)
    try:
        return extractor.run()
    except OSError as error:
        raise to_error(error, extractor.entry_name, limits.folder) from None
    except KernelError as error:
        raise to_error(
            OSError(error.errno, error.call), extractor.entry_name, limits.folder
        ) from None
    finally:
        extractor.close()


def to_error(error: OSError, name: bytes, folder: str) -> Exception:
    """Convert an OSError that was raised while the file `name` was made.

    - ResourceExhausted: for a full disk. `folder` is the path by which it names the file system.
    - BadLayer: for a name or attribute that no file system accepts.
    - KernelError: for any other error.
    """
    number = error.errno or 0
    if number in FULL:
        return ResourceExhausted(f"unpacking {quoted(name)}: {reason(number, folder)}")
    if number in _FAULTS_OF_THE_LAYER:
        return BadLayer(f"{quoted(name)}: {os.strerror(number)}")
    return KernelError("unpack", quoted(name), number)


class _FolderCursor:
    """The directory that the resolution of a path has reached. `folder`: an O_PATH descriptor,
    which the caller closes; `names`: the directory's path from the root."""

    def __init__(self, extractor: _Extractor, make: bool) -> None:
        self._extractor, self._make = extractor, make
        self.folder, self.names = os.open(b".", _PLACE, dir_fd=extractor.root), list[bytes]()

    def enter(self, name: bytes) -> tuple[int, bytes] | None:
        link = self._extractor.step(self.folder, self.names, name, self._make)
        if link is None:
            self._move(name)
            self.names.append(name)
        return link

    def leave(self) -> None:
        if self.names:
            self._move(b"..")
            self.names.pop()

    def restart(self) -> None:
        self._move(b".", self._extractor.root)
        self.names.clear()

    def _move(self, name: bytes, start: int | None = None) -> None:
        directory = os.open(name, _PLACE, dir_fd=self.folder if start is None else start)
        os.close(self.folder)
        self.folder = directory


class _Extractor:
    def __init__(
        self, stream: TarStream, root_fd: int, limits: UnpackLimits, tick: Callable[[], None]
    ) -> None:
        self._stream = stream
        self.root = root_fd
        self._limits = limits
        self._tick = tick
        self._budget = WalkBudget()
        self._hidden: set[Path] = set()  # paths that `.wh.` entries hide
        self.entry_name = b""
        self._parents: dict[bytes, tuple[Path, int]] = {}  # as written -> (resolved, descriptor)
        # a link's inode -> keys of `_parents` whose paths lead over it
        self._through: dict[int, list[bytes]] = {}
        self._stale: list[int] = []  # descriptors that the current entry may still use
        self._times: dict[Path, int] = {}
        self._result = Extracted(implicit={b""}, inodes=1)
        self._reserve = Reserve(root_fd, limits.folder)
        self._ticked_bytes = 0
        self._names_bytes = 0

    def run(self) -> Extracted:
        make = {
            tar_headers.FILE: self._file,
            tar_headers.DIRECTORY: self._directory,
            tar_headers.SYMLINK: self._symlink,
            tar_headers.HARDLINK: self._hardlink,
            tar_headers.CHARACTER: self._node,
            tar_headers.BLOCK_DEVICE: self._node,
            tar_headers.FIFO: self._node,
            reader.ROOT: self._describe_root,
            reader.HIDDEN: self._hide,
            reader.OPAQUE: self._make_opaque,
        }
        self._times[b""] = 0
        for what, entry, names in checked_members(
            self._stream, self._limits, self._budget, self._tick, _TICK_ENTRIES
        ):
            self.entry_name = entry.name
            self._close_stale()
            self._reserve.charge(BLOCK_BYTES)
            make[what](entry, names)
        self._set_directory_times()
        self._forget_lost_devices()
        return self._result

    def close(self) -> None:
        self._forget_parents()
        self._close_stale()

    # ---- one method per kind

    def _file(self, entry: TarMember, names: list[bytes]) -> None:
        parent, path = self._parent(names)
        with closing_fd(
            self._create(path, parent, lambda name: os.open(name, _NEW, 0o600, dir_fd=parent))
        ) as fd:
            self._content(entry, fd)
            os.fchown(fd, entry.uid, entry.gid)  # clears setuid and capabilities, so it comes first
            os.fchmod(fd, entry.mode)
            _set_xattrs(fd, entry)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        self._result.size_bytes += entry.stored

    def _content(self, entry: TarMember, fd: int) -> None:
        holes = entry.sparse is not None
        for offset, length in [(0, entry.stored)] if entry.sparse is None else entry.sparse:
            left = length
            for piece in self._stream.pieces(length):
                left -= len(piece)
                if is_hole(piece):
                    holes = True
                else:
                    self._reserve.charge(len(piece))
                    pwrite_all(fd, piece, offset)
                offset += len(piece)
                self._tick_regularly()
            if left:
                raise BadLayer(f"{quoted(entry.name)}: the tar ends within the file's data")
        # A hole at the end leaves the file shorter than the entry says.
        if holes:
            os.ftruncate(fd, entry.size)

    def _tick_regularly(self) -> None:
        if self._stream.size_bytes - self._ticked_bytes >= _TICK_BYTES:
            self._ticked_bytes = self._stream.size_bytes
            self._tick()

    def _directory(self, entry: TarMember, names: list[bytes]) -> None:
        parent, path = self._parent(names)
        try:
            os.mkdir(names[-1], 0o755, dir_fd=parent)
            self._result.inodes += 1
        except FileExistsError:
            status = os.lstat(names[-1], dir_fd=parent)
            if not stat.S_ISDIR(status.st_mode):
                self._create(path, parent, lambda name: os.mkdir(name, 0o755, dir_fd=parent))
        self._describe_directory(entry, path, os.open(names[-1], FOLDER, dir_fd=parent))

    def _describe_directory(self, entry: TarMember, path: Path, fd: int) -> None:
        with closing_fd(fd):
            os.fchown(fd, entry.uid, entry.gid)
            os.fchmod(fd, entry.mode)
            _set_xattrs(fd, entry)
        self._set_time(path, entry.mtime_ns)
        self._result.implicit.discard(path)

    def _describe_root(self, entry: TarMember, _: list[bytes]) -> None:
        self._describe_directory(entry, b"", open_folder(self.root, b""))

    def _symlink(self, entry: TarMember, names: list[bytes]) -> None:
        parent, path = self._parent(names)
        self._create(path, parent, lambda name: os.symlink(entry.link, name, dir_fd=parent))
        self._describe_node(entry, parent, names[-1])

    def _node(self, entry: TarMember, names: list[bytes]) -> None:
        mode, device = reader.NODES[entry.kind] | 0o600, os.makedev(entry.major, entry.minor)
        parent, path = self._parent(names)
        try:
            self._create(path, parent, lambda name: os.mknod(name, mode, device, dir_fd=parent))
        except PermissionError:  # a device, in the jail; whiteouts and fifos need no privilege
            self._create(path, parent, lambda name: os.mknod(name, 0o600, dir_fd=parent))
            self._charge(path)
            self._result.devices[path] = (
                entry.kind == tar_headers.BLOCK_DEVICE,
                entry.major,
                entry.minor,
            )
        self._describe_node(entry, parent, names[-1])

    def _describe_node(self, entry: TarMember, parent: int, name: bytes) -> None:
        os.chown(name, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
        if entry.kind != tar_headers.SYMLINK:
            os.chmod(name, entry.mode, dir_fd=parent)  # cannot be a link: it was just made
        if entry.xattrs:
            # setxattr(2) has no variant with a directory descriptor, and the jail has no /proc.
            with _working_directory(parent):
                _set_xattrs(name, entry)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)

    def _hardlink(self, entry: TarMember, names: list[bytes]) -> None:
        source = components(entry.link)
        folder, source_path = self._parent(source, make=False)
        parent, path = self._parent(names)
        if source_path == path:
            return
        try:
            status = os.lstat(source[-1], dir_fd=folder)
        except FileNotFoundError:
            raise bad_link(entry, reader.ABSENT) from None
        if stat.S_ISDIR(status.st_mode) or _is_whiteout(status):
            raise bad_link(entry, reader.NO_FILE)
        self._create(
            path,
            parent,
            lambda name: os.link(
                source[-1], name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False
            ),
        )
        self._result.inodes -= 1
        if source_path in self._result.devices:
            self._result.devices[path] = self._result.devices[source_path]

    def _make_opaque(self, _: TarMember, folder: list[bytes]) -> None:
        path, fd = self._enter(folder)
        if not path:
            # overlayfs ignores the attribute on a layer's root, so the store leaves out the lower
            # layers instead.
            self._result.opaque = True
            return
        _make_opaque_at(fd, b".")

    def _hide(self, _: TarMember, names: list[bytes]) -> None:
        parent, path = self._parent(names)
        self._charge(path)
        self._hidden.add(path)
        try:
            status = os.lstat(names[-1], dir_fd=parent)
        except FileNotFoundError:
            os.mknod(names[-1], stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)
            self._result.inodes += 1
            return
        if stat.S_ISDIR(status.st_mode):
            _make_opaque_at(parent, names[-1])

    # ---- names

    def _create(self, path: Path, parent: int, make: Callable[[bytes], Created]) -> Created:
        """Call `make` with the last name of `path`, and return its result. An existing file of that
        name is replaced. A directory that replaces a whiteout becomes opaque, so that the content
        of lower layers stays hidden."""
        name = path.rpartition(b"/")[2]
        self._result.devices.pop(path, None)
        try:
            created = make(name)
        except FileExistsError:
            self._remove(path, parent, name)
            created = make(name)
            if path in self._hidden and stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                _make_opaque_at(parent, name)
        self._result.inodes += 1
        return created

    def _remove(self, path: Path, parent: int, name: bytes) -> None:
        status = os.lstat(name, dir_fd=parent)
        # The recorded times and devices below a removed directory are dropped once at the end: a
        # search for each removed directory took 15 s for a layer of 0.16 MB.
        remove_tree(parent, name)
        self._result.inodes -= 1
        if stat.S_ISDIR(status.st_mode):
            self._forget_parents()
        elif stat.S_ISLNK(status.st_mode):
            self._forget_link(status.st_ino)

    def _parent(self, names: list[bytes], *, make: bool = True) -> tuple[int, Path]:
        """Return a descriptor of the parent directory of the path `names`, and the path with all
        links resolved. `make`: create missing parent directories."""
        folder, fd = self._enter(names[:-1], make=make)
        return fd, joined(folder, names[-1])

    def _enter(self, names: list[bytes], *, make: bool = True) -> tuple[Path, int]:
        written = b"/".join(names)
        parent = self._parents.get(written)
        if parent is None:
            parent = self._open_parent(names, written, make)
            if len(self._parents) >= _PARENTS_OPEN:
                self._stale.append(self._parents.pop(next(iter(self._parents)))[1])
            self._parents[written] = parent
        return parent

    def _open_parent(self, names: list[bytes], written: bytes, make: bool) -> tuple[Path, int]:
        try:
            return written, open_beneath(self.root, written or b".", os.O_PATH | os.O_DIRECTORY)
        except KernelError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                raise
        cursor = _FolderCursor(self, make)
        try:
            for inode in reader.follow(names, cursor, self._budget):
                self._through.setdefault(inode, []).append(written)
        finally:
            os.close(cursor.folder)
        path = b"/".join(cursor.names)
        return path, open_beneath(self.root, path or b".", os.O_PATH | os.O_DIRECTORY)

    def step(
        self, folder: int, done: list[bytes], name: bytes, make: bool
    ) -> tuple[int, bytes] | None:
        """Prepare to enter `name` in the directory `folder`, whose path has the components `done`.

        - A directory: return None. With `make`, a missing directory is made first.
        - A symbolic link: return (inode, target).
        - Missing, without `make`: raises BadLayer.
        - Another kind of file: raises OSError (ENOTDIR).
        """
        path = b"/".join([*done, name])
        try:
            status = os.lstat(name, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                text = f"{quoted(self.entry_name)}: the layer has no {quoted(path)}"
                raise BadLayer(text) from None
            self._make_implicit(path, folder, name)
            return None
        if stat.S_ISLNK(status.st_mode):
            return status.st_ino, os.readlink(name, dir_fd=folder)
        if make and _is_whiteout(status) and path in self._hidden:
            self._remove(path, folder, name)
            self._make_implicit(path, folder, name)
            _make_opaque_at(folder, name)
        elif not stat.S_ISDIR(status.st_mode):
            raise reader.path_error(errno.ENOTDIR)
        return None

    def _make_implicit(self, path: Path, parent: int, name: bytes) -> None:
        self._budget.charge(DIRECTORY_STEPS)
        self._reserve.charge(BLOCK_BYTES)
        os.mkdir(name, 0o755, dir_fd=parent)
        os.chmod(name, 0o755, dir_fd=parent)  # independent of the umask
        self._result.inodes += 1
        reader.check_count(self._result.inodes, self._limits)
        self._result.implicit.add(path)
        self._set_time(path, 0)  # constant, so that equal layers give equal trees

    def _set_time(self, path: Path, time_ns: int) -> None:
        """Record the modification time of a directory, which `_set_directory_times` sets at the
        end."""
        if path not in self._times:
            self._charge(path)
        self._times[path] = time_ns

    def _charge(self, path: Path) -> None:
        """Add the length of `path` to the total for the paths that stay in memory until the layer
        is extracted. Raises ResourceExhausted when the total exceeds NAMES_LIMIT_BYTES."""
        self._names_bytes += len(path)
        if self._names_bytes > NAMES_LIMIT_BYTES:
            raise ResourceExhausted(
                f"the paths of the layer's folders, devices and whiteouts have more than"
                f" {NAMES_LIMIT_BYTES} bytes in all"
            )

    def _forget_parents(self) -> None:
        self._stale += [fd for _, fd in self._parents.values()]
        self._parents.clear()
        self._through.clear()

    def _forget_link(self, inode: int) -> None:
        """Drop the cached parent directories whose paths lead through the symbolic link with the
        inode number `inode`."""
        for written in self._through.pop(inode, ()):
            if written in self._parents:
                self._stale.append(self._parents.pop(written)[1])

    def _close_stale(self) -> None:
        while self._stale:
            os.close(self._stale.pop())

    def _set_directory_times(self) -> None:
        """Set the directories' modification times. Call this after all files are made, because each
        new name in a directory changes its time. Directories that a later tar entry has removed or
        replaced are skipped, and dropped from `Extracted.implicit` (directories that no entry
        describes)."""
        with DirectoryWalker(self.root) as folders:
            for path in sorted(self._times, key=depth_first_key):
                self.entry_name = path
                try:
                    fd = folders.open(path)
                except KernelError as error:
                    if error.errno not in _GONE:
                        raise
                    self._result.implicit.discard(path)
                else:
                    time_ns = self._times[path]
                    os.utime(b".", ns=(time_ns, time_ns), dir_fd=fd)

    def _forget_lost_devices(self) -> None:
        """Drop from the result's `devices` those that a later tar entry has removed or replaced."""
        with DirectoryWalker(self.root) as folders:
            for path in sorted(self._result.devices, key=depth_first_key):
                folder, _, name = path.rpartition(b"/")
                try:
                    status = os.lstat(name, dir_fd=folders.open(folder))
                except (KernelError, FileNotFoundError):
                    del self._result.devices[path]
                    continue
                if not stat.S_ISREG(status.st_mode):
                    del self._result.devices[path]


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


@contextmanager
def _working_directory(folder_fd: int) -> Iterator[None]:
    """Change the process's working directory for the `with` block."""
    with closing_fd(os.open(b".", _PLACE)) as before:
        os.fchdir(folder_fd)
        try:
            yield
        finally:
            os.fchdir(before)


def _make_opaque_at(parent_fd: int, name: bytes) -> None:
    with closing_fd(os.open(name, FOLDER, dir_fd=parent_fd)) as fd:
        os.setxattr(fd, OPAQUE_XATTR, b"y")


def _set_xattrs(target: int | bytes, entry: TarMember) -> None:
    """Set the entry's extended attributes, except those that the file system refuses for this kind
    of file."""
    for name, value in reader.supported_attributes(entry).items():
        try:
            os.setxattr(target, name, value, follow_symlinks=isinstance(target, int))
        except OSError as error:
            # EPERM: user.* on a link or device (xattr(7)). EINVAL: an ACL or capability that the
            # kernel cannot parse.
            if error.errno not in (errno.ENOTSUP, errno.EPERM, errno.EINVAL):
                raise
