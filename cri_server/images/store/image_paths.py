"""The paths of an image's files, which the server reports to `pyrunc-cri image mount` on the same
machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyrunc.compile.image_mount import MountedImage
from pyrunc.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence


class ImagePaths(Record):
    """The paths of an image's files.

    - `image`: the paths of a mounted image's EROFS index and tars; None for an unpacked image.
    - `lower`: the folders of an unpacked image's layers, top first; None for a mounted image.
    - `place`: an empty folder on which an unpacked image's layers are mounted as an overlay.
    """

    image: MountedImage | None = None
    lower: Sequence[str] | None = None
    place: str | None = None
