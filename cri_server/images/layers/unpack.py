"""Unpacks a layer's content into its own folder, in a job: a process without network or secrets.
Another process has decoded the content.

The folder gets `tree/` (the files) and `layer.json` (a `Layer`). It becomes part of the store when
it is renamed to its chain id. A separate process keeps hostile names away from the server's
secrets, can be killed when the disk hangs, and does not hold the interpreter lock of the event loop
while it makes ten thousand files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cri_server.images.layers import jail, layer_job
from cri_server.images.layers.extract import extract
from cri_server.images.layers.inflate import TarStream, UnpackLimits
from pyrunc import atomic_file
from pyrunc.kernel.fd import closing_fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message

TREE = "tree"
RECORD = "layer.json"


@dataclass(frozen=True, slots=True)
class Layer:
    """The record of an unpacked layer.

    - `size_bytes`, `inodes`: the size and the number of the layer's files.
    - `implicit`: parent directories that the tar does not describe (relative paths, "" for the
      root). They get their attributes from the layers below.
    - `opaque`: the layer hides all layers below.
    - `devices`: device nodes to make in place of empty files, as [path, is_block, major, minor].
    """

    diff_id: str
    size_bytes: int
    inodes: int
    implicit: list[str]
    opaque: bool = False
    devices: list[list[Any]] = field(default_factory=list)

    def save(self, folder: str) -> None:
        """Write the record into the layer's folder."""
        values = {name: getattr(self, name) for name in self.__slots__}
        atomic_file.write_json(os.path.join(folder, RECORD), values)

    @classmethod
    def read(cls, folder: str) -> Layer:
        """Read the record in `folder`. It is validated, because the process that wrote it has read
        hostile bytes. Raises NotFound, DamagedRecord."""
        # Not at the top, because msgspec takes 1.3 MiB of the zygote, whose jobs read no record.
        import msgspec

        from cri_server import typed

        values = atomic_file.read_json(os.path.join(folder, RECORD))
        try:
            return typed.convert(values, cls)
        except msgspec.ValidationError as error:
            raise atomic_file.DamagedRecord(f"{folder}/{RECORD}: {error}") from None


def unpack(
    stream: TarStream,
    folder: str,
    diff_id: str | None,
    limits: UnpackLimits,
    tick: Callable[[], None] = lambda: None,
) -> Layer:
    """Unpack a tar stream into `folder`, an empty directory; return the layer's record.

    `diff_id`: the digest that the content must have; None accepts any. `tick` is called regularly,
    and may raise. Raises BadLayer, ResourceExhausted, KernelError; the caller then removes the
    folder.
    """
    os.mkdir(os.path.join(folder, TREE), 0o755)
    with closing_fd(
        os.open(os.path.join(folder, TREE), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    ) as root_fd:
        os.chmod(".", 0o755, dir_fd=root_fd)  # independent of the umask
        extracted = extract(stream, root_fd, limits, tick)
    layer = Layer(
        # The stream is read to its end for the digest: a tar may have anything after its end
        # marker.
        diff_id=stream.expect(diff_id),
        size_bytes=extracted.size_bytes,
        inodes=extracted.inodes,
        implicit=sorted(os.fsdecode(path) for path in extracted.implicit),
        opaque=extracted.opaque,
        devices=[[os.fsdecode(path), *what] for path, what in extracted.devices.items()],
    )
    layer.save(folder)
    return layer


def job(arguments: Message, fds: list[int]) -> int:
    """Unpack a layer, as a job of the zygote; return the exit code 0. `arguments`: a `LayerWork`.
    `fds`: the descriptors of a `Receiver` of the decoded content, then the progress pipe."""
    work, stream, tick = layer_job.receive(arguments, fds)
    with layer_job.writing(work.folder, "unpacking a layer"):
        unpack(stream, jail.enter(work.folder), work.diff_id, work.limits, tick)
    return 0
