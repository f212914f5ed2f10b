"""An object on disk that the garbage collector has examined, as `rpc.private` sends it to the
command line."""

from __future__ import annotations

from pyrunc.records import Record


class GarbageItem(Record):
    """An object on disk that the garbage collector has examined.

    `action`: what the collector did: `keep`, `removed`, `converted` or `failed`; in a dry run what
    it would do: `keep`, `remove` or `convert`. `why`: the reason.
    """

    kind: str
    name: str
    action: str
    why: str
    size_bytes: int = 0
