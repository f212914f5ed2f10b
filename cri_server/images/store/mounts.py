"""Mounts images: each image once, at its first use, so that its containers share the mount's page
cache.

Mounts are detached, and exist as long as their descriptors. A container's overlay holds its own
reference to the mount below it, so containers survive the server. A copy of each mount's descriptor
is in the keeper, a process that outlives the server, so that containers of the next server share
the mount with earlier ones.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from cri_server.images.erofs import format as erofs
from cri_server.images.store.layer_files import LayerFiles
from cri_server.images.store.mount_store import PREFIX, MountStore
from pyrunc.abi.mount import EROFS_SUPER_MAGIC_V1
from pyrunc.atomic_file import DamagedRecord
from pyrunc.compile.image_mount import MountedImage
from pyrunc.errors import Error
from pyrunc.kernel.erofs import check_digests, open_erofs
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.mount import fstatfs_type

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cri_server.images.store.catalog import Content

log = logging.getLogger(__name__)


class ImageMount:
    """A detached mount of an image. It is closed when this object is deleted."""

    def __init__(self, fd: int, image: MountedImage, stored_as: str) -> None:
        """`stored_as`: the name of the mount's entry in the keeper."""
        self.fd, self.image, self.stored_as = fd, image, stored_as

    def __del__(self) -> None:
        os.close(self.fd)

    @property
    def path(self) -> Path:
        """The path of the mount's root, valid in this process."""
        return Path(f"/proc/self/fd/{self.fd}")

    @property
    def index(self) -> str:
        """The path of the image's index, the EROFS file with its metadata. The path identifies the
        mount."""
        return self.image.index


class Mounts:
    """Makes and caches the mounts of a store's images. Thread-safe."""

    def __init__(self, files: LayerFiles, store: MountStore) -> None:
        self._files, self._store = files, store
        self._lock = threading.Lock()
        self._mounts: dict[str, ImageMount] = {}
        self._seen: set[str] = set()  # chain ids of mounts at the last `drop_tar_pages`
        self._dropped: list[ImageMount] = []

    def adopt(self, contents: Iterable[Content]) -> None:
        """Take over the stored mounts of these images from an earlier server. Close and remove all
        other stored mounts. Call before any other method. Blocking."""
        stored = self._store.take()
        for content in contents if stored else ():
            image = self._files.image(content.diff_ids, content.chain)
            try:
                with _opened(image) as fds:
                    name = name_of(image, fds)
            except (Error, OSError):  # reported when the image is used
                continue
            fd = stored.get(name, -1)
            if fd >= 0 and is_mount_of(fd, content.chain[-1]):
                self._mounts[content.chain[-1]] = ImageMount(stored.pop(name), image, name)
        for name, fd in stored.items():
            log.info("closed the stored mount %s: it belongs to no image", name)
            os.close(fd)
            self._store.remove(name)

    def cached(self, chain: Sequence[str]) -> ImageMount | None:
        """Return the open mount of the image whose layers have these chain ids; None if there is
        none. Does not block."""
        return self._mounts.get(chain[-1])

    def get(self, diff_ids: Sequence[str], chain: Sequence[str]) -> ImageMount:
        """Return the mount of the image with these layers; make and store it if there is none.
        Blocking. Raises KernelError, OSError, and DamagedRecord when the EROFS index was not made
        for the layers' tars or a file was changed."""
        with self._lock:
            mount = self._mounts.get(chain[-1])
            if mount is None:
                image = self._files.image(diff_ids, chain)
                with _opened(image) as fds:
                    name = name_of(image, fds)
                    mount = self._mounts[chain[-1]] = ImageMount(
                        open_erofs(fds[0], fds[1:]), image, name
                    )
                # Without the stored mount the containers of the next server would use a second
                # superblock with a second page cache: 156 MiB for an image of 150 MB.
                self._store.put(name, mount.fd)
            return mount

    def drop_tar_pages(self) -> None:
        """Drop the page cache of the tars of mounted images (posix_fadvise(2),
        POSIX_FADV_DONTNEED). Leaves out images that were mounted since the last call. Blocking. A
        tmpfs keeps its pages.

        The page cache has the files of a mounted image twice: as pages of EROFS, which its
        containers share, and as pages of the tar that EROFS copied them from. The mount option
        `directio` would avoid the second copy, but a first start would then read from the disk what
        the pull has just written.
        """
        with self._lock:
            older = [mount for chain_id, mount in self._mounts.items() if chain_id in self._seen]
            self._seen = set(self._mounts)
            devices = {device for mount in older for device in mount.image.devices}
        for device in devices:
            with (
                suppress(FileNotFoundError),  # the image was removed
                closing_fd(os.open(device, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd,
            ):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def keep(self, chain_ids: set[str]) -> None:
        """Keep the mounts of images whose top chain id is in `chain_ids`, and drop all others.
        `release` closes the dropped mounts."""
        with self._lock:
            for chain_id in [c for c in self._mounts if c not in chain_ids]:
                self._dropped.append(self._mounts.pop(chain_id))

    def release(self) -> None:
        """Close the mounts that `keep` has dropped; remove them from the keeper. Blocking; other
        methods may be called meanwhile."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        for mount in dropped:
            self._store.remove(mount.stored_as)
        dropped.clear()  # closes them, which may take a tenth of a second: not under the lock

    def store_all(self) -> None:
        """Store all open mounts in a new keeper, which has none yet. Blocking."""
        with self._lock:
            for mount in self._mounts.values():
                self._store.put(mount.stored_as, mount.fd)

    def close(self, chain_ids: set[str]) -> None:
        """Close all mounts. If containers use an image (its top chain id is in `chain_ids`), its
        mount stays in the keeper for the next server. Blocking."""
        # The keeper runs as long as it stores anything, so mounts without containers are removed
        # first.
        self.keep(chain_ids)
        self.release()
        self._mounts.clear()


def name_of(image: MountedImage, fds: Sequence[int]) -> str:
    """Return the name under which the image's mount is stored in the keeper: a digest over the
    inode numbers, sizes, times and fs-verity digests of its EROFS index and tars. `fds`: the
    descriptors of the index, then of the tars."""
    statuses = [os.fstat(fd) for fd in fds]
    files = repr(
        ([(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in statuses], list(image.digests))
    )
    return PREFIX + hashlib.sha256(files.encode()).hexdigest()


def is_mount_of(fd: int, chain_id: str) -> bool:
    """Return whether `fd` is the root of a read-only EROFS with the UUID of this chain id. Raises
    OSError."""
    uuid, half = erofs.uuid_of(chain_id), erofs.UUID_BYTES // 2
    # uuid_to_fsid() in Linux' statfs.h
    fsid = int.from_bytes(uuid[:half], "little") ^ int.from_bytes(uuid[half:], "little")
    # A mount that is attached nowhere has the path "/" in /proc.
    if os.readlink(f"/proc/self/fd/{fd}") != "/" or fstatfs_type(fd) != EROFS_SUPER_MAGIC_V1:
        return False
    status = os.fstatvfs(fd)
    return status.f_fsid == fsid and bool(status.f_flag & os.ST_RDONLY)


def open_image(image: MountedImage) -> int:
    """Make a detached mount of the whole image; return its descriptor. Raises KernelError, OSError,
    and DamagedRecord when the EROFS index was not made for the layers' tars or a file was changed.
    """
    with _opened(image) as fds:
        return open_erofs(fds[0], fds[1:])


@contextmanager
def _opened(image: MountedImage) -> Iterator[list[int]]:
    """Open the image's EROFS index and then its tars for the `with` block. Check that the index was
    made for these tars, and that none has changed (fs-verity). Raises KernelError, OSError,
    DamagedRecord."""
    with ExitStack() as stack:
        fds: list[int] = []
        for path in (image.index, *image.devices):
            fds.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
            stack.callback(os.close, fds[-1])
        check(fds[0], fds[1:], image)
        check_digests(fds, image.digests)
        yield fds


def check(index_fd: int, device_fds: Sequence[int], image: MountedImage) -> None:
    """Check that the EROFS index was made for these tars: compare the tars' names and sizes with
    those in the index. The kernel does not check this, and would serve wrong data. Raises
    DamagedRecord."""
    superblock = os.pread(index_fd, erofs.SUPERBLOCK.size, erofs.SUPERBLOCK_OFFSET)
    if len(superblock) < erofs.SUPERBLOCK.size:
        raise DamagedRecord(f"{image.index} is cut short")
    fields = erofs.SUPERBLOCK.unpack(superblock)
    count, first = fields[16], fields[17]
    slots = os.pread(index_fd, count * erofs.DEVICE_SLOT.size, first * erofs.DEVICE_SLOT.size)
    expected = [
        (Path(path).name[: erofs.TAG_BYTES].encode(), -(-os.fstat(fd).st_size // erofs.BLOCK))
        for path, fd in zip(image.devices, device_fds, strict=True)
    ]
    if [slot[:2] for slot in erofs.DEVICE_SLOT.iter_unpack(slots)] != expected:
        raise DamagedRecord(f"{image.index} does not fit the layers' tars")
