"""Unpacked layers by chain id: `layers/<hex>/tree`, complete when renamed into place, removed by
renaming away.

A chain id stands for a layer and all below it (image specification, "Layer ChainID"), so two images
share what they have in common. A layer's tree depends on the layers below in one thing: a directory
that the tar needed but did not describe (`a/b` without `a`) takes their attributes, because
overlayfs shows the topmost one's.
"""

from __future__ import annotations

import hashlib
import os
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path

from cri_server.images.formats.digests import digest_from_hex, hex_of
from cri_server.images.layers.inherit import inherit_attributes
from cri_server.images.layers.trees import open_folder
from cri_server.images.layers.unpack import RECORD, TREE, Layer
from cri_server.images.store.blobs import FOLDER_MODE, node_error
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import KernelError, NotFound
from pyrunc.kernel.call import syscall
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.tree import remove_tree

RECORD_LIMIT_BYTES = 256 << 20  # a layer may have a million folders


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """The chain id of each layer, bottom first."""
    chain: list[str] = []
    for diff_id in diff_ids:
        below = chain[-1] if chain else None
        chain.append(
            diff_id
            if below is None
            else f"sha256:{hashlib.sha256(f'{below} {diff_id}'.encode()).hexdigest()}"
        )
    return chain


class Layers:
    """The layers below `root`. The caller ensures that one task at a time commits a chain id."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "layers"
        self._ingest = root / "ingest"
        self._trash = root / "trash"
        self._empty = root / "empty"
        # Also empty: the second lower layer that overlayfs needs below a single one.
        self.lowest = root / "lowest"
        self._layers: dict[str, Layer] = {}
        self._unsynced: set[str] = set()  # chain ids of layers that a crash may lose

    def prepare(self) -> None:
        """Create the folders and read the records. Layers without a readable record, and unfinished
        ones of an earlier run, are thrown away."""
        for folder in (self._folder, self._ingest, self._trash):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(FOLDER_MODE)
        for folder in (self._empty, self.lowest):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
        for name in os.listdir(self._ingest):
            self._throw_away(self._ingest / name)
        for name in os.listdir(self._folder):
            try:
                self._layers[digest_from_hex(name)] = Layer.read(str(self._folder / name))
            except (NotFound, DamagedRecord, NotADirectoryError):
                self._throw_away(self._folder / name)

    def get(self, chain_id: str) -> Layer | None:
        """The layer's record; None if it is not unpacked."""
        return self._layers.get(chain_id)

    def totals(self) -> tuple[int, int]:
        """Bytes and inodes of all layers."""
        layers = list(self._layers.values())
        return sum(layer.size_bytes for layer in layers), sum(layer.inodes for layer in layers)

    def new_folder(self) -> str:
        """Create a folder to unpack into; ends with `commit` or `discard`."""
        path = str(self._ingest / f"layer-{uuid.uuid4().hex}")
        os.mkdir(path, 0o700)
        return path

    def discard(self, folder: str) -> None:
        """Remove a folder of `new_folder`, if it is there."""
        self._delete(Path(folder).parent, Path(folder).name)

    def commit(self, folder: str, chain: Sequence[str]) -> None:
        """Rename the unpacked `folder` to the last chain id of `chain` (bottom first); the others
        are committed.

        Directories take their attributes from below here. Call `sync` before anything that refers
        to the layer is visible.
        """
        refuse_links(folder)
        layer = Layer.read(folder)
        if layer.devices:
            make_devices(os.path.join(folder, TREE), layer)
        if not layer.opaque:
            inherit_attributes(Path(folder, TREE), layer.implicit, self._visible(chain[:-1]))
        self._unsynced.add(chain[-1])
        os.rename(folder, self._path(chain[-1]))
        self._layers[chain[-1]] = layer

    def sync(self, chain: Sequence[str]) -> None:
        """Write unsynced layers of the chain to the disk, with syncfs(2) of their file system."""
        pending = self._unsynced.intersection(chain)
        if not pending:
            return
        fd = os.open(self.tree(chain[-1]), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # One call for tens of thousands of files. It reports errors of writing since Linux 5.8
            # (syncfs(2)).
            syscall("syncfs", "the image store", fd)
        except KernelError as error:
            raise node_error(OSError(error.errno, ""), "layers", self._folder) from None
        finally:
            os.close(fd)
        self._unsynced -= pending

    def tree(self, chain_id: str) -> Path:
        """The path of the layer's files."""
        return self._path(chain_id) / TREE

    def lower_dirs(self, chain: Sequence[str]) -> list[Path]:
        """The trees of a chain for overlayfs, top first, without those below an opaque root. Never
        empty."""
        return self._visible(chain) or [self._empty]

    def _visible(self, chain: Sequence[str]) -> list[Path]:
        trees = []
        for chain_id in reversed(chain):
            layer = self._layers.get(chain_id)
            if layer is None:
                raise NotFound(f"layer {chain_id} is not unpacked")
            trees.append(self.tree(chain_id))
            if layer.opaque:
                break
        return trees

    def collect(self, keep: set[str]) -> int:
        """Throw away every layer except `keep`; return how many. `empty_trash` deletes them."""
        unwanted = [chain_id for chain_id in list(self._layers) if chain_id not in keep]
        for chain_id in unwanted:
            self._layers.pop(chain_id)
            self._throw_away(self._path(chain_id))
        return len(unwanted)

    def drop(self, chain_id: str) -> None:
        """Throw away one layer's folder, also a damaged one, if it is there."""
        self._layers.pop(chain_id, None)
        self._throw_away(self._path(chain_id))

    def empty_trash(self) -> None:
        """Delete all folders in the trash. Slow: run it in a thread."""
        for name in os.listdir(self._trash):
            self._delete(self._trash, name)

    def _path(self, chain_id: str) -> Path:
        return self._folder / hex_of(chain_id)

    def _throw_away(self, path: Path) -> None:
        try:
            # Deleting files one by one could be interrupted, and leave a layer that looks complete.
            os.rename(path, self._trash / f"{path.name}-{uuid.uuid4().hex}")
        except FileNotFoundError:
            pass

    def _delete(self, folder: Path, name: str) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_tree(fd, name)
        except FileNotFoundError:  # another thread empties the trash, too
            pass
        finally:
            os.close(fd)


def refuse_links(folder: str) -> None:
    """Check a folder before its files are opened by name: a process that read hostile bytes made
    it, and might have put a link to the host's files in place of the tree, or a pipe in place of
    the record, which would block. Raises NotFound, DamagedRecord."""
    for name, is_kind in ((TREE, stat.S_ISDIR), (RECORD, stat.S_ISREG)):
        try:
            status = os.stat(os.path.join(folder, name), follow_symlinks=False)
        except FileNotFoundError:
            raise NotFound(f"{folder} has no {name}") from None
        if not is_kind(status.st_mode) or status.st_size > RECORD_LIMIT_BYTES:
            raise DamagedRecord(f"{folder}/{name} was not made by the unpacker")


def make_devices(tree: str, layer: Layer) -> None:
    """Make device nodes in place of the empty files that the unpacker, which may not make nodes,
    has left with their attributes."""
    root = os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name, is_block, major, minor in layer.devices:
            folder, _, last = os.fsencode(name).rpartition(b"/")
            with closing_fd(open_folder(root, folder)) as parent:
                before = os.fstat(parent)
                _make_device(
                    parent,
                    last,
                    stat.S_IFBLK if is_block else stat.S_IFCHR,
                    os.makedev(major, minor),
                )
                # The directory's time is the layer's, and making a name in it has changed it.
                os.utime(parent, ns=(before.st_mtime_ns, before.st_mtime_ns))
    except (ValueError, TypeError, OverflowError):
        raise DamagedRecord(f"{tree}: the record of a device is malformed") from None
    finally:
        os.close(root)


def _make_device(parent_fd: int, name: bytes, kind: int, device: int) -> None:
    placeholder = os.lstat(name, dir_fd=parent_fd)
    if not stat.S_ISREG(placeholder.st_mode):
        return
    os.unlink(name, dir_fd=parent_fd)
    os.mknod(name, kind | 0o600, device, dir_fd=parent_fd)
    os.chown(name, placeholder.st_uid, placeholder.st_gid, dir_fd=parent_fd, follow_symlinks=False)
    os.chmod(name, stat.S_IMODE(placeholder.st_mode), dir_fd=parent_fd)
    os.utime(
        name,
        ns=(placeholder.st_mtime_ns, placeholder.st_mtime_ns),
        dir_fd=parent_fd,
        follow_symlinks=False,
    )
