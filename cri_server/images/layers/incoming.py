"""The base class of blobs that arrive in pieces and are hashed on their way to a file
(`store.blobs`), to a ring (`streamed`) or to memory."""

from __future__ import annotations

from abc import ABC, abstractmethod

from cri_server.images.formats.digests import SHA256, hasher
from pyrunc.errors import PeerError


class DigestMismatch(PeerError):
    """Content does not have its promised digest or size."""


class IncomingBlob(ABC):
    """Receives content in pieces, and hashes it. Use from one thread at a time."""

    def __init__(self, algorithm: str = SHA256) -> None:
        """`algorithm`: the hash algorithm of the digest."""
        self._algorithm = algorithm
        self._hash = hasher(algorithm)
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append data and hash it.

        - A blob in a file: raises ResourceExhausted, KernelError.
        - A blob that goes to a decoder: raises Interrupted when the transfer ends early. The caller
          must then fetch the blob to a file.
        """
        self._hash.update(data)
        self.size += len(data)
        self._put(data)

    @abstractmethod
    def _put(self, data: bytes) -> None: ...

    def restart(self) -> None:
        """Discard the bytes written so far; the next `write` begins the content anew."""
        self._hash, self.size = hasher(self._algorithm), 0

    @property
    def digest(self) -> str:
        """The digest of the written bytes."""
        return f"{self._algorithm}:{self._hash.hexdigest()}"

    def check(self, digest: str, size: int | None = None) -> None:
        """Check that the content has this digest and size. Raises DigestMismatch."""
        if size is not None and self.size != size:
            raise DigestMismatch(f"blob {digest} has {self.size} bytes, not {size}")
        if self.digest != digest:
            raise DigestMismatch(f"blob {digest}: the content has the digest {self.digest}")


class InMemory(IncomingBlob):
    """Receives content in memory. The caller limits its size."""

    def __init__(self, algorithm: str) -> None:
        super().__init__(algorithm)
        self._data = bytearray()

    def _put(self, data: bytes) -> None:
        self._data += data

    def restart(self) -> None:
        self._data.clear()
        super().restart()

    @property
    def data(self) -> bytes:
        """The written bytes."""
        return bytes(self._data)
