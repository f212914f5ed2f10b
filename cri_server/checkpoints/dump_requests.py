"""The names and arguments of the jobs in `dump`. The server imports this module without the jobs'
code."""

from __future__ import annotations

from pyrunc.records import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.records import AbsolutePath

DUMP = "cri_server.checkpoints.dump:dump"
WRITE_TREE = "cri_server.checkpoints.dump:write_tree"
PACK = "cri_server.checkpoints.dump:pack"


class TakeDump(Record):
    """The arguments of `dump`.

    - `directory`: the folder with the container's state.
    - `upper`: the container's writable layer.
    - `work`: an existing folder for the result.
    - `volumes`: the VOLUMEs of the image, as {path in the container: folder on the host}.
    - `images`: the EROFS index files of the container's mounted images."""

    directory: AbsolutePath
    upper: AbsolutePath
    work: AbsolutePath
    volumes: dict[str, str]
    images: Sequence[str]


class Pack(Record):
    """The arguments of `pack`. `work`: the folder to pack; `target`: the path of the new
    archive."""

    work: AbsolutePath
    target: AbsolutePath


class WriteTree(Record):
    """The arguments of `write_tree`. `target`: the path of the new tar file."""

    target: AbsolutePath
