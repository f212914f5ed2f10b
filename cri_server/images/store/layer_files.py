"""Stores the files of mounted images: uncompressed tars by diff id, and EROFS indexes by the chain
id of the image's top layer.

A file is complete or absent: it is written in `ingest/` and renamed. An unlinked file exists as
long as a mount uses it. On a file system with fs-verity each file is sealed before it is renamed,
so the kernel refuses to read a changed block. The file's fs-verity digest is stored in `verity/`
and compared at each mount, so a replaced file is not mounted.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cri_server.images.erofs import build, layer_tar
from cri_server.images.formats.digests import digest_from_hex, hex_of, is_digest
from cri_server.images.layers.incoming import DigestMismatch
from cri_server.images.store.blobs import FOLDER_MODE
from pyrunc import atomic_file
from pyrunc.compile.image_mount import MountedImage
from pyrunc.errors import NotFound
from pyrunc.kernel import verity
from pyrunc.kernel.fd import closing_fd

log = logging.getLogger(__name__)

DROPPED_LIMIT = 100  # descriptors of dropped files; beyond it files are freed at once


class LayerFiles:
    """Stores layers' tars and images' EROFS indexes below `root`. Two callers must not commit the
    same digest at once."""

    def __init__(self, root: Path) -> None:
        self._tars, self._indexes, self.place = root / "tars", root / "indexes", root / "empty"
        self._verity = root / "verity"
        self._sizes: dict[Path, int] = {}
        self._digests: dict[Path, str] = {}
        self._unsynced: set[Path] = set()  # files whose names a crash may lose
        self._dropped: list[int] = []

    def prepare(self) -> None:
        """Create the folders, and load the names and sizes of the files in them. A file whose
        fs-verity digest cannot be read is removed."""
        self.place.mkdir(exist_ok=True)
        for folder in (self._tars, self._indexes):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(FOLDER_MODE)
            for entry in os.scandir(folder):
                if is_digest(digest_from_hex(entry.name)) and entry.is_file(follow_symlinks=False):
                    self._sizes[folder / entry.name] = (
                        entry.stat(follow_symlinks=False).st_blocks * 512
                    )
        self._read_digests()

    def _read_digests(self) -> None:
        if not self._verity.is_dir():
            return
        atomic_file.remove_leftovers(str(self._verity))
        names = {self._name(path): path for path in self._sizes}
        for record in list(self._verity.iterdir()):
            path = names.get(record.name)
            if path is None:
                record.unlink()
                continue
            try:
                self._digests[path] = record.read_text()
            except (OSError, UnicodeDecodeError) as error:
                log.warning("%s is removed from the store: %s", path, error)
                record.unlink()
                self.drop(path)

    @staticmethod
    def _name(path: Path) -> str:
        return f"{path.parent.name}-{path.name}"

    @property
    def empty(self) -> bool:
        """Return whether no EROFS index is stored. Then no image has the mounted form. (Unpacked
        images are stored elsewhere.)"""
        return not any(path.parent == self._indexes for path in list(self._sizes))

    def tar(self, diff_id: str) -> Path:
        """Return the path of the layer's tar, which need not exist."""
        return self._tars / hex_of(diff_id)

    def index(self, chain_id: str) -> Path:
        """Return the path of the EROFS index of the image whose top layer has this chain id. The
        file need not exist."""
        return self._indexes / hex_of(chain_id)

    def has_tar(self, diff_id: str) -> bool:
        return self.tar(diff_id) in self._sizes

    def has_index(self, chain_id: str) -> bool:
        return self.index(chain_id) in self._sizes

    def has_image(self, diff_ids: Sequence[str], chain: Sequence[str]) -> bool:
        """Return whether the EROFS index and all tars of the image with these layers are stored.
        False for an image without layers."""
        return bool(chain) and self.has_index(chain[-1]) and all(self.has_tar(d) for d in diff_ids)

    def image(self, diff_ids: Sequence[str], chain: Sequence[str]) -> MountedImage:
        """Return the paths of the EROFS index and the tars of the image with these layers, with
        their fs-verity digests."""
        devices = [self.tar(diff_id) for diff_id in dict.fromkeys(diff_ids)]
        index = self.index(chain[-1])
        digests = [self._digests.get(path, "") for path in (index, *devices)]
        return MountedImage(
            index=str(index),
            devices=[str(path) for path in devices],
            place=str(self.place),
            digests=digests if any(digests) else (),
        )

    def size(self, diff_ids: Sequence[str], chain: Sequence[str]) -> int:
        """Return the bytes on disk of the EROFS index and tars of the image with these layers."""
        paths = {self.index(chain[-1]), *(self.tar(diff_id) for diff_id in diff_ids)}
        return sum(self._sizes.get(path, 0) for path in paths)

    def totals(self) -> tuple[int, int]:
        """Return the bytes on disk of all stored files, and the number of these files."""
        sizes = list(self._sizes.values())
        return sum(sizes), len(sizes)

    def commit_tar(self, folder: str, diff_id: str) -> None:
        """Sync the tar that `layer_tar` has written in `folder`, and move it into the store. Raises
        OSError; DigestMismatch when it is not a regular file with a single link."""
        self._commit(os.path.join(folder, layer_tar.FILE), self.tar(diff_id))

    def commit_index(self, folder: str, chain_id: str) -> None:
        """Sync the EROFS index that `build` has written in `folder`, and move it into the store.
        Raises OSError; DigestMismatch when it is not a regular file with a single link."""
        self._commit(os.path.join(folder, build.FILE), self.index(chain_id))

    def _commit(self, source: str, path: Path) -> None:
        status = os.lstat(source)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise DigestMismatch(
                f"{source} is not a regular file with one hard link, as a layer job writes it"
            )
        with closing_fd(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
            self._seal(fd, path)
            # Now and not in `sync`, so that the disk writes while other layers are made.
            os.fsync(fd)
        os.rename(source, path)
        self._unsynced.add(path)
        self._sizes[path] = os.lstat(path).st_blocks * 512

    def _seal(self, fd: int, path: Path) -> None:
        """Enable fs-verity on the file, if the file system has it, and store the file's fs-verity
        digest durably. `path`: the name to which the caller renames the file afterwards."""
        if not verity.enable(fd):
            return
        digest = verity.measure(fd)
        self._verity.mkdir(mode=FOLDER_MODE, exist_ok=True)
        atomic_file.write_bytes(str(self._verity / self._name(path)), digest.encode(), durable=True)
        self._digests[path] = digest

    def sync(self, diff_ids: Sequence[str], chain: Sequence[str]) -> None:
        """Make the names of the image's files durable. Must be called before the catalog names the
        image. Raises OSError."""
        paths = {self.index(chain_id) for chain_id in chain[-1:]} | {self.tar(d) for d in diff_ids}
        pending = paths & self._unsynced
        for folder in {path.parent for path in pending}:
            atomic_file.sync_folder(str(folder))
        self._unsynced.difference_update(pending)

    def collect(self, diff_ids: set[str], chain_ids: set[str]) -> None:
        """Unlink all tars but those of `diff_ids`, and all EROFS indexes but those of `chain_ids`.
        Raises OSError."""
        keep = {self.tar(diff_id) for diff_id in diff_ids} | {
            self.index(chain_id) for chain_id in chain_ids
        }
        # Copies, here and in `empty`: another thread may commit a file meanwhile.
        for path in list(self._sizes):
            if path not in keep:
                self.drop(path)

    def drop(self, path: Path) -> None:
        """Unlink the tar or EROFS index at `path`, if it exists. `release` frees its blocks later,
        because this takes long for a large tar."""
        # The descriptor keeps the blocks: unlink(2) and close of a tar of 150 MB free 76,000 pages,
        # which takes 120 ms.
        if len(self._dropped) < DROPPED_LIMIT:
            with suppress(FileNotFoundError):
                self._dropped.append(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
        path.unlink(missing_ok=True)
        if self._digests.pop(path, ""):
            (self._verity / self._name(path)).unlink(missing_ok=True)
        self._unsynced.discard(path)
        self._sizes.pop(path, None)

    def release(self) -> None:
        """Close the files that `drop` has unlinked, which frees their blocks. Blocking; another
        thread may call `drop` meanwhile."""
        with suppress(IndexError):  # another thread may release the last one
            while True:
                os.close(self._dropped.pop())

    def open_tar(self, diff_id: str) -> int:
        """Open a layer's tar for reading; the caller closes it. Raises NotFound."""
        try:
            return os.open(self.tar(diff_id), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"no tar of layer {diff_id}") from None
