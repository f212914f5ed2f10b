"""An object on disk that the garbage collector has examined, as `rpc.private` sends it to the
command line."""

from __future__ import annotations

from pyrunc.records import Record


class GarbageItem(Record):
    """An object on disk that the garbage collector has examined, and its action.

    `action`: `keep`; in a dry run also `remove` or `convert`; otherwise also `removed`, `converted`
    or `failed`. `why`: the reason.
    """

    kind: str
    name: str
    action: str
    why: str
    size_bytes: int = 0
