"""Images that are mounted and not unpacked: an EROFS index whose data is in its layers' tars.

All containers of an image share one mount, and with it the page cache, where the kernel clones
mounts that are attached nowhere (Linux 6.15): the caller holds it and hands it in. Before, each
container gets a mount of its own.
"""

from __future__ import annotations

from pyrunc.abi.mount import MS_PRIVATE
from pyrunc.compile import host as facts
from pyrunc.kernel import erofs
from pyrunc.kernel import mount as kernel_mount
from pyrunc.records import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Image(Record):
    """The paths of an image's index and of its devices in their order; `place`: an empty directory
    to put its mount on for a moment, in a mount namespace of our own; `folder`: which directory of
    it, over no link; `digests`: of fs-verity, of the index and of each device, where the files are
    sealed."""

    index: str
    devices: Sequence[str]
    place: str
    folder: str = ""
    digests: Sequence[str] = ()


def open_image(image: Image, held: Mapping[str, int]) -> int:
    """A detached mount of the image for one container; `held`: mounts of images by the paths of
    their indexes. Raises KernelError, OSError."""
    shared = held.get(image.index)
    if shared is not None and facts.host().clones_detached:
        return kernel_mount.open_read_only_clone(image.folder, shared, propagation=MS_PRIVATE)
    own = erofs.open_paths(image.index, image.devices, image.digests)
    if not image.folder:
        return own
    from os import close

    from pyrunc.kernel import detached

    try:
        return detached.open_folder(own, image.place, image.folder)
    finally:
        close(own)


def open_overlay_of(
    mount: int, place: str, upper: str, work: str, options: kernel_mount.Options
) -> int:
    """A detached overlay over a detached mount. Raises KernelError."""
    if facts.host().clones_detached:
        return kernel_mount.open_overlay([mount], upper, work, options=options)
    from pyrunc.kernel import detached

    return detached.open_overlay([place], upper, work, options, mapped=[mount])
