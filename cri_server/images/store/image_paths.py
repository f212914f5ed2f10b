"""The paths of an image's files, which the server reports to `pyrunc-cri image mount` on the same
machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyrunc.compile.image_mount import MountedImage
from pyrunc.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence


class ImagePaths(Record):
    """The paths of an image's files. For a mounted image, `image` has its index and tars. For an
    unpacked image, `lower` has its layers, top first, and `place` is an empty folder, the mount
    point for their overlay."""

    image: MountedImage | None = None
    lower: Sequence[str] | None = None
    place: str | None = None
