"""Stores unpacked layers by chain id, in `layers/<hex>/tree`. A layer's folder is complete once it
is renamed to that path, and is removed by renaming it into the trash.

A chain id stands for a layer and all layers below it (image specification, "Layer ChainID"), so two
images share their common lower layers. A tree depends on the layers below only for a parent
directory that the tar does not describe (the tar has `a/b` but not `a`). Such a directory gets its
attributes from the layers below, because overlayfs shows the attributes of the topmost directory.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from cri_server.images.formats.digests import digest_from_hex, digest_of, hex_of
from cri_server.images.layers.inherit import inherit_attributes
from cri_server.images.layers.trees import open_folder
from cri_server.images.layers.unpack import RECORD, TREE, Layer
from cri_server.images.store.blobs import FOLDER_MODE
from cri_server.images.waiting import in_thread
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import KernelError, NotFound
from pyrunc.kernel.call import syscall
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.full import disk_error
from pyrunc.kernel.tree import remove_path

RECORD_LIMIT_BYTES = 256 << 20  # a layer may have a million folders


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """Return the chain ids of layers, bottom first. The chain id of the bottom layer is its diff
    id. The chain id of each other layer is the digest of `BELOW DIFF_ID`, where BELOW is the chain
    id of the layer below."""
    chain = list(diff_ids[:1])
    for diff_id in diff_ids[1:]:
        chain.append(digest_of(f"{chain[-1]} {diff_id}".encode()))
    return chain


class Layers:
    """Stores the unpacked layers below `root`. Two callers must not commit the same chain id at
    once."""

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
        """Create the folders, and load the records of all layers. Layers without a readable record,
        and what an earlier run left in `ingest/`, are moved to the trash."""
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
                self._list(digest_from_hex(name), Layer.read(str(self._folder / name)))
            except (NotFound, DamagedRecord, OSError):
                self._throw_away(self._folder / name)

    def get(self, chain_id: str) -> Layer | None:
        """Return the record of an unpacked layer, without `implicit` and `devices`; None if the
        layer is not unpacked."""
        return self._layers.get(chain_id)

    def totals(self) -> tuple[int, int]:
        """Return the bytes and the inodes of all layers."""
        layers = list(self._layers.values())
        return sum(layer.size_bytes for layer in layers), sum(layer.inodes for layer in layers)

    @asynccontextmanager
    async def folder(self) -> AsyncIterator[str]:
        """Provide a new folder in `ingest/` for the `with` block. At the end the folder is removed,
        unless it was renamed into the store."""
        folder = self.new_folder()
        try:
            yield folder
        finally:
            await in_thread(lambda: remove_path(folder))

    def new_folder(self) -> str:
        """Create a folder in `ingest/` for unpacking a layer; return its path. The caller calls
        `commit`, or deletes the folder."""
        path = str(self._ingest / f"layer-{uuid.uuid4().hex}")
        os.mkdir(path, 0o700)
        return path

    def commit(self, folder: str, chain: Sequence[str]) -> None:
        """Rename `folder`, an unpacked layer, into the store. Its chain id is the last one in
        `chain` (bottom first). The layers below must be committed before: parent directories that
        this layer does not describe get their attributes from those layers. Also makes the layer's
        device nodes.

        Call `sync` before the catalog names the layer.
        """
        refuse_links(folder)
        layer = Layer.read(folder)
        if layer.devices:
            make_devices(os.path.join(folder, TREE), layer)
        if not layer.opaque:
            inherit_attributes(Path(folder, TREE), layer.implicit, self._visible(chain[:-1]))
        self._unsynced.add(chain[-1])
        os.rename(folder, self._path(chain[-1]))
        self._list(chain[-1], layer)

    def _list(self, chain_id: str, layer: Layer) -> None:
        """Add a layer's record to the records in memory, without the paths in it. There may be a
        million paths, and only `commit` needs them."""
        self._layers[chain_id] = replace(layer, implicit=[], devices=[])

    def sync(self, chain: Sequence[str]) -> None:
        """Sync the layers of the chain that are not on the disk yet, with one syncfs(2) of their
        file system."""
        pending = self._unsynced.intersection(chain)
        if not pending:
            return
        tree = self.tree(chain[-1])
        with closing_fd(os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            try:
                # One call for tens of thousands of files. It reports errors of writing since Linux
                # 5.8 (syncfs(2)).
                syscall("syncfs", "the image store", fd)
            except KernelError as error:
                raise disk_error(OSError(error.errno, ""), "syncfs", str(self._folder)) from None
        self._unsynced -= pending

    def tree(self, chain_id: str) -> Path:
        """Return the path of the layer's files."""
        return self._path(chain_id) / TREE

    def lower_dirs(self, chain: Sequence[str]) -> list[Path]:
        """Return the unpacked layers' directories as overlayfs' lower directories, top layer first.
        `chain`: the layers' chain ids, bottom layer first.

        Layers below a layer with an opaque root are left out. For an empty chain the list has one
        empty directory. Raises NotFound for a layer that is not unpacked.
        """
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

    def collect(self, used: set[str]) -> None:
        """Move every layer except the `used` ones to the trash, which `empty_trash` deletes."""
        for chain_id in set(self._layers) - used:
            self.drop(chain_id)

    def drop(self, chain_id: str) -> None:
        """Move a layer's folder to the trash. The layer may be damaged or absent."""
        self._layers.pop(chain_id, None)
        self._throw_away(self._path(chain_id))

    def empty_trash(self) -> None:
        """Delete all folders in the trash. Slow: run it in a thread."""
        for name in os.listdir(self._trash):
            remove_path(self._trash / name)

    def _path(self, chain_id: str) -> Path:
        return self._folder / hex_of(chain_id)

    def _throw_away(self, path: Path) -> None:
        # Deleting files one by one could be interrupted, and leave a layer that looks complete.
        with suppress(FileNotFoundError):
            os.rename(path, self._trash / f"{path.name}-{uuid.uuid4().hex}")


def refuse_links(folder: str) -> None:
    """Check that the tree in `folder` is a directory and the record a regular file, before they are
    opened by name. A malicious layer that took over its unpacking process could have left a
    symbolic link or a pipe there. Raises NotFound when either is missing. Raises DamagedRecord when
    either has another type or is too large."""
    for name, is_kind in ((TREE, stat.S_ISDIR), (RECORD, stat.S_ISREG)):
        try:
            status = os.stat(os.path.join(folder, name), follow_symlinks=False)
        except FileNotFoundError:
            raise NotFound(f"{folder} has no {name}") from None
        if not is_kind(status.st_mode) or status.st_size > RECORD_LIMIT_BYTES:
            raise DamagedRecord(f"{folder}/{name} has the wrong file type or is too large")


def make_devices(tree: str, layer: Layer) -> None:
    """Replace the empty files at the layer's `devices` by device nodes with the same attributes.
    (The unpacker may not make device nodes.) Raises KernelError, OSError, and DamagedRecord for a
    malformed element of `devices`."""
    with closing_fd(os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        try:
            for name, is_block, major, minor in layer.devices:
                folder, _, last = os.fsencode(name).rpartition(b"/")
                kind, device = stat.S_IFBLK if is_block else stat.S_IFCHR, os.makedev(major, minor)
                with closing_fd(open_folder(root, folder)) as parent:
                    before = os.fstat(parent)
                    _make_device(parent, last, kind, device)
                    # Restore the directory's time, which the layer has set: making the new name has
                    # changed it.
                    os.utime(parent, ns=(before.st_mtime_ns, before.st_mtime_ns))
        except (ValueError, TypeError, OverflowError):
            raise DamagedRecord(f"{tree}: the record of a device is malformed") from None


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
