"""Mounts images without unpacking them: EROFS reads the metadata from an index file, and the data
from the layers' tars.

From Linux 6.15 on, all containers of an image share one mount and its page cache. The caller mounts
the image and passes the mount's descriptor; each container gets a clone. Older kernels cannot clone
a detached mount, so each container gets its own mount.
"""

from __future__ import annotations

from errno import E2BIG, EINVAL, ENAMETOOLONG

from pyrunc.abi.mount import MS_PRIVATE
from pyrunc.compile import host
from pyrunc.errors import KernelError
from pyrunc.kernel import erofs
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.path import open_beneath
from pyrunc.records import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class MountedImage(Record):
    """The files from which EROFS mounts an image.

    - `index`: the file with the EROFS metadata
    - `devices`: the files with the data, in the order of the index's device table
    - `place`: an empty directory. The image is attached there, in a private mount namespace, when a
      kernel operation needs an attached mount.
    - `folder`: mount only this directory of the image (a path without symbolic links); empty for
      the whole image
    - `digests`: the fs-verity digests of `index` and of each device; empty if the files are not
      sealed
    """

    index: str
    devices: Sequence[str]
    place: str
    folder: str = ""
    digests: Sequence[str] = ()


def open_image(image: MountedImage, shared_mounts: Mapping[str, int]) -> int:
    """Return a detached mount of the image for one container. `shared_mounts`: descriptors of
    images that the caller has mounted, by the path of the image's EROFS index. Raises KernelError,
    OSError."""
    mount = shared_mounts.get(image.index)
    if mount is not None and host.constant_facts().clones_detached:
        return kernel_mount.open_read_only_clone(image.folder, mount, propagation=MS_PRIVATE)
    # Each mount of a file has its own superblock and page cache: two containers
    # read the same blocks twice.
    own_mount = erofs.open_paths(image.index, image.devices, image.digests)
    if not image.folder:
        return own_mount
    from pyrunc.kernel import detached

    with closing_fd(own_mount):
        return detached.open_folder(own_mount, image.place, image.folder)


def open_layer(image: MountedImage, shared_mounts: Mapping[str, int]) -> int:
    """Return a descriptor of the image's files, for use as the lowest layer of one overlay. Shared
    mounts are not cloned, because overlayfs makes a private clone itself. Arguments and errors are
    those of `open_image`."""
    mount = shared_mounts.get(image.index)
    if mount is None or not host.constant_facts().clones_detached:
        return open_image(image, shared_mounts)
    # No clone of ours: its close would wait for an RCU grace period, which takes 40 µs, and much
    # longer on a busy machine.
    return open_beneath(mount, image.folder or ".")


def open_overlay_of(
    mounts: Sequence[int],
    places: Sequence[str],
    upper: str,
    work: str,
    options: kernel_mount.Options,
) -> int:
    """Mount an overlay detached, with the detached mounts `mounts` as its lower layers, top first.
    Raises KernelError.

    `places`: an empty directory for each lower layer. Kernels before 6.15 need attached layers, so
    there each layer is attached to its directory, in a private mount namespace.
    """
    if host.constant_facts().clones_detached:
        return kernel_mount.open_overlay(mounts, upper or None, work or None, options=options)
    from pyrunc.kernel import detached

    return detached.open_overlay(places, upper, work, options, mapped=mounts)


def open_layers(
    lower: Sequence[str], upper: str = "", work: str = "", options: kernel_mount.Options = ()
) -> int:
    """Mount an overlay of folders that are not idmapped; return the detached mount. `lower`: the
    layers' paths, top first. Raises KernelError."""
    try:
        return kernel_mount.open_overlay(lower, upper or None, work or None, options=options)
    except KernelError as error:
        # Older kernels answer these errnos for long paths or many layers; mount(2) takes such
        # layers.
        if (
            error.errno not in (EINVAL, E2BIG, ENAMETOOLONG)
            or host.constant_facts().clones_detached
        ):
            raise
    from pyrunc.kernel import detached  # brings contextlib, 3 ms

    return detached.open_overlay(lower, upper, work, options)
