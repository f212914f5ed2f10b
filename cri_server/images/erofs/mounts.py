"""The mounts of images: one for each, made when it is first used and held by descriptor, so that containers share its page cache.

Nothing is mounted anywhere. What is in use outlives us: an overlay has its own hold on the layers below it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from cri_server.images.erofs import format as erofs
from cri_server.images.erofs.files import LayerFiles
from pyrunc.atomic_file import DamagedRecord
from pyrunc.compile.image_mount import Image
from pyrunc.kernel.erofs import check_digests, open_erofs


class ImageMount:
    """A detached mount of an image, as long as somebody has this object."""

    def __init__(self, fd: int, image: Image) -> None:
        self.fd, self.image = fd, image

    def __del__(self) -> None:
        os.close(self.fd)

    @property
    def path(self) -> Path:
        """Its root, for this process."""
        return Path(f"/proc/self/fd/{self.fd}")

    @property
    def index(self) -> str:
        """The path of its index, which names it."""
        return self.image.index


class Mounts:
    """The mounts of a store's images. Thread-safe."""

    def __init__(self, files: LayerFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._mounts: dict[str, ImageMount] = {}
        self._dropped: list[ImageMount] = []

    def at_hand(self, chain: Sequence[str]) -> ImageMount | None:
        """The mount of the image of these layers, if it is there. Does not block."""
        return self._mounts.get(chain[-1])

    def get(self, diff_ids: Sequence[str], chain: Sequence[str]) -> ImageMount:
        """The mount of the image of these layers. Blocking. Raises KernelError, OSError, DamagedRecord."""
        with self._lock:
            found = self._mounts.get(chain[-1])
            if found is None:
                image = self._files.image(diff_ids, chain)
                found = self._mounts[chain[-1]] = ImageMount(open_image(image), image)
            return found

    def drop_tar_pages(self) -> None:
        """What is read of a mounted image is in memory twice: as pages of EROFS, which its containers share, and as those of the tar
        they were copied from. The latter are dropped (posix_fadvise(2), POSIX_FADV_DONTNEED; a tmpfs keeps its files). Mounting
        with `directio` would have no second copy, but a first start then reads from the disk what the pull has just written.
        Blocking."""
        with self._lock:
            devices = {device for mount in self._mounts.values() for device in mount.image.devices}
        for device in devices:
            try:
                fd = os.open(device, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:  # the image was removed
                continue
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def keep(self, chain_ids: set[str]) -> None:
        """Let go of the others, of which `release` frees the pages."""
        with self._lock:
            for chain_id in [c for c in self._mounts if c not in chain_ids]:
                self._dropped.append(self._mounts.pop(chain_id))

    def release(self) -> None:
        """Close what was let go. Blocking; may run beside the other methods."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        dropped.clear()  # without the lock: it may take a tenth of a second


def open_image(image: Image) -> int:
    """A detached mount of the whole image. Raises KernelError, OSError, DamagedRecord."""
    with ExitStack() as stack:
        fds = []
        for path in (image.index, *image.devices):
            fds.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
            stack.callback(os.close, fds[-1])
        check(fds[0], fds[1:], image)
        check_digests(fds, image.digests)
        return open_erofs(fds[0], fds[1:])


def check(index_fd: int, device_fds: Sequence[int], image: Image) -> None:
    """Whether the index was made for these devices: the kernel would serve other data. Raises DamagedRecord."""
    superblock = os.pread(index_fd, erofs.SUPERBLOCK.size, erofs.SUPERBLOCK_OFFSET)
    if len(superblock) < erofs.SUPERBLOCK.size:
        raise DamagedRecord(f"{image.index} is cut short")
    fields = erofs.SUPERBLOCK.unpack(superblock)
    count, first = fields[16], fields[17]
    slots = os.pread(index_fd, count * erofs.DEVICE_SLOT.size, first * erofs.DEVICE_SLOT.size)
    wanted = [
        (Path(path).name.encode(), -(-os.fstat(fd).st_size // erofs.BLOCK))
        for path, fd in zip(image.devices, device_fds, strict=True)
    ]
    if [slot[:2] for slot in erofs.DEVICE_SLOT.iter_unpack(slots)] != wanted:
        raise DamagedRecord(f"{image.index} does not fit the layers' tars")
