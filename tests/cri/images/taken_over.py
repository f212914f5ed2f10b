"""A module for a zygote: its decoders act as if an attacker's blob had taken them over. The
environment variable LIE names what they do."""

from __future__ import annotations

import os
from collections.abc import Callable

from cri_server.images.layers import decode
from cri_server.images.layers.inflate import TarStream, UnpackLimits
from cri_server.images.layers.ring import Receiver, RingSender

LIE = "PYRUNC_TESTS_LIE"


def _blob(blob: int | Receiver) -> bytes:
    return b"".join(bytes(block) for block in TarStream(blob, hashed=False).blocks())


def _another(content: bytes, out: RingSender) -> None:
    out.write(content.replace(b"right", b"wrong"))
    out.finish()


def _more(content: bytes, out: RingSender) -> None:
    out.write(content + bytes(512))
    out.finish()


def _nothing(content: bytes, out: RingSender) -> None:
    out.finish()


def _shorter(content: bytes, out: RingSender) -> None:
    out.write(content[:-512])


def _torn(content: bytes, out: RingSender) -> None:
    out._full.write(b"???")


def _die(content: bytes, out: RingSender) -> None:
    out.write(content[:1000])
    os._exit(9)


def _stay(content: bytes, out: RingSender) -> None:
    out.write(content)
    out.finish()
    while True:  # it may not even sleep
        pass


LIES: dict[str, Callable[[bytes, RingSender], None]] = {
    "another content": _another,
    "more": _more,
    "nothing": _nothing,
    "less": _shorter,
    "a torn message": _torn,
    "death": _die,
}


def _decode(blob: int | Receiver, out: RingSender, limits: UnpackLimits) -> None:
    (LIES | {"stay": _stay})[os.environ[LIE]](_blob(blob), out)


def inherit(lowest: int) -> list[int]:
    """Replace the decoder of all jobs. The zygote calls this before its first fork."""
    decode.decode = _decode
    return []  # no descriptors for jobs to inherit
