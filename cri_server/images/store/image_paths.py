"""The paths of an image's files, which the server reports to `pyrunc-cri image mount` on the same
machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyrunc.compile.image_mount import MountedImage
from pyrunc.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence


class ImagePaths(Record):
    """The paths of an image's files. `image`: the index and tars of a mounted image. `lower`: the
    layers of an unpacked image, top first; `place`: an empty folder on which their overlay is
    mounted."""

    image: MountedImage | None = None
    lower: Sequence[str] | None = None
    place: str | None = None
