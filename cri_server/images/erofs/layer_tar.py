"""One layer's blob made into its uncompressed tar, in an errand: the only process in which a decoder meets hostile bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from cri_server.images import jail
from cri_server.images.erofs.build import to_error
from cri_server.images.inflate import BadLayer, Limits, Stream
from pyrunc.errors import Error

FILE = "tar"
_TICK_BYTES = 4 << 20


def write_tar(
    blob_fd: int, folder: str, diff_id: str, limits: Limits, tick: Callable[[], None] = lambda: None
) -> None:
    """Write the content of the blob (from the descriptor's position on) to FILE in `folder`. `tick` is called now and then, and
    may raise.

    Raises BadLayer when it is not `diff_id`, ResourceExhausted, OSError.
    """
    stream = Stream(blob_fd, limits)
    out_fd = os.open(
        os.path.join(folder, FILE), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    ticked = 0
    try:
        for piece in stream.pieces(limits.size_bytes + 1):
            while piece:
                piece = piece[os.write(out_fd, piece) :]
            if stream.size_bytes - ticked >= _TICK_BYTES:
                ticked = stream.size_bytes
                tick()
    finally:
        os.close(out_fd)
    found = stream.drain()
    if found != diff_id:
        raise BadLayer(f"the layer's content is {found}, not {diff_id} as the image's configuration says")


def errand(arguments: dict[str, Any], fds: list[int]) -> int:
    """What the zygote forks: `fds` are the blob and a pipe that gets a byte now and then; the arguments are `write_tar`'s."""
    blob_fd, progress_fd = fds
    os.set_blocking(progress_fd, False)

    def tick() -> None:
        try:
            os.write(progress_fd, b".")
        except BlockingIOError:  # nobody has read the last ones yet
            pass

    folder = arguments["folder"]
    try:
        jail.enter(folder)
        write_tar(blob_fd, folder, arguments["diff_id"], Limits(**arguments["limits"]), tick)
    except Error:
        raise
    except OSError as error:
        raise to_error(error, folder, "decompressing a layer") from None
    return 0
