"""The blobs of an OCI image layout: `blobs/sha256/<hex>` or `blobs/sha512/<hex>`. A blob is either
absent, or complete with its content synced; `sync_folder` makes the names durable.

A blob is written in `ingest/` under a unique name, hashed meanwhile, synced, and renamed. A blob
that is decoded while it is downloaded (`cri_server.images.layers.streamed`) is never written to a
file. When the server starts, it removes the files that an earlier run left in `ingest/`.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from cri_server.images.formats.digests import (
    ALGORITHMS,
    SHA256,
    algorithm_of,
    digest_of,
    hex_of,
    is_content,
)
from cri_server.images.layers.incoming import DigestMismatch, IncomingBlob
from cri_server.images.reserve import Reserve
from pyrunc import atomic_file
from pyrunc.atomic_file import write_all
from pyrunc.errors import NotFound
from pyrunc.kernel.full import disk_errors

FOLDER_MODE = 0o700
LAYOUT = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()


class Ingest(IncomingBlob):
    """Writes one blob. `commit` adds it to the OCI layout; `abandon`, or the end of a `with` block
    without `commit`, removes it. `write` raises ResourceExhausted, KernelError."""

    def __init__(self, blobs: Blobs, algorithm: str = SHA256) -> None:
        super().__init__(algorithm)
        self._blobs = blobs
        self._path = blobs.new_temporary("blob")
        with disk_errors("write a blob", self._path):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._reserve = Reserve(self._fd, str(blobs.root))

    def __enter__(self) -> Ingest:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _put(self, data: bytes) -> None:
        with disk_errors("write a blob", self._path):
            self._reserve.charge(len(data))
            write_all(self._fd, data)

    def restart(self) -> None:
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        super().restart()

    def commit(self) -> str:
        """Add the content to the OCI layout as a blob; return its digest. Raises ResourceExhausted,
        KernelError."""
        with disk_errors("write a blob", self._path):
            # The blob's name is made durable later, with those of all blobs at once
            # (`Store.publish`).
            os.fsync(self._fd)
            self._blobs.make_folder(self.digest)
            os.rename(self._path, self._blobs.path(self.digest))
        os.close(self._fd)
        self._fd = -1
        return self.digest

    def abandon(self) -> None:
        """Close and remove the blob's file; does nothing after `commit`."""
        if self._fd < 0:
            return
        # Another thread may still be writing to the file.
        Path(self._path).unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


class Blobs:
    """Reads, writes and lists the blobs below `root`, an OCI image layout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folders = {algorithm: root / "blobs" / algorithm for algorithm in ALGORITHMS}
        self._ingest = root / "ingest"

    def prepare(self) -> None:
        """Create the OCI layout's folders and files, durably."""
        for folder in (self.root, self.root / "blobs", self._folders[SHA256], self._ingest):
            _make_folder(folder)
            folder.chmod(FOLDER_MODE)
        atomic_file.remove_leftovers(str(self.root))
        layout = self.root / "oci-layout"
        # A power cut may have left the file empty.
        if not layout.exists() or layout.read_bytes() != LAYOUT:
            atomic_file.write_bytes(str(layout), LAYOUT, durable=True)

    def new_temporary(self, kind: str) -> str:
        """Return an unused path in `ingest/`; the file name begins with `kind`, such as `blob`."""
        return str(self._ingest / f"{kind}-{uuid.uuid4().hex}")

    def path(self, digest: str) -> str:
        """Return the blob's path. The blob need not exist."""
        return str(self._folders[algorithm_of(digest)] / hex_of(digest))

    def make_folder(self, digest: str) -> None:
        """Create the folder for blobs of this digest's algorithm, if it is missing. Raises
        OSError."""
        _make_folder(self._folders[algorithm_of(digest)])

    def size(self, digest: str) -> int | None:
        """Return the blob's size; None if it is absent."""
        try:
            return os.stat(self.path(digest)).st_size
        except FileNotFoundError:
            return None

    def read(self, digest: str, limit_bytes: int) -> bytes:
        """Read and verify a blob. Raises NotFound, DigestMismatch (damaged, or longer than the
        limit)."""
        try:
            with open(self.path(digest), "rb") as file:
                data = file.read(limit_bytes + 1)
        except FileNotFoundError:
            raise NotFound(f"no blob {digest}") from None
        if len(data) > limit_bytes or not is_content(data, digest):
            raise DigestMismatch(f"blob {digest} is damaged on disk")
        return data

    def open_blob(self, digest: str) -> int:
        """Open a blob for reading; the caller closes it. Raises NotFound."""
        try:
            return os.open(self.path(digest), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"no blob {digest}") from None

    def put(self, data: bytes, algorithm: str = SHA256) -> str:
        """Store `data` as a blob, unless it is stored already; return its digest."""
        digest = digest_of(data, algorithm)
        if self.size(digest) == len(data):
            return digest
        with Ingest(self, algorithm) as ingest:
            ingest.write(data)
            return ingest.commit()

    def remove(self, digest: str) -> None:
        """Remove a blob; does nothing if it is absent."""
        Path(self.path(digest)).unlink(missing_ok=True)

    def digests(self) -> list[str]:
        """Return the digests of all blobs."""
        return [
            f"{algorithm}:{name}"
            for algorithm, folder in self._folders.items()
            if folder.is_dir()
            for name in os.listdir(folder)
        ]

    def sync_folder(self) -> None:
        """Sync the folders of blobs, which makes the names of committed blobs durable."""
        for folder in self._folders.values():
            if folder.is_dir():
                atomic_file.sync_folder(str(folder))


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        atomic_file.sync_folder(str(folder.parent))
