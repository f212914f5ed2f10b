"""Paths of an image's files, for `pyrunc-cri image mount` on the same machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyrunc.compile.image_mount import Image
from pyrunc.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence


class ImagePaths(Record):
    """`image`: of a mounted image. `lower`: the layers of an unpacked one, topmost first, and
    `place`, an empty folder."""

    image: Image | None = None
    lower: Sequence[str] | None = None
    place: str | None = None
