"""What a connection tells its owner."""

from __future__ import annotations

from dataclasses import dataclass

from cri_server.http2.hpack import Field


@dataclass(slots=True)
class Opened:
    """A request begins. `fields` is None when they were longer than the limit; with `ended` there
    is no body."""

    stream_id: int
    fields: list[Field] | None
    ended: bool


@dataclass(slots=True)
class Data:
    """A part of a request's body; with `ended` it is the last, and may be empty."""

    stream_id: int
    data: bytes
    ended: bool


@dataclass(slots=True)
class Reset:
    """The stream has ended in both directions because of the peer: it said so, or broke the
    protocol on it.

    It counts as open until the owner has ended its work for it, and takes one from
    `Connection.held_streams`.
    """

    stream_id: int
    code: int


@dataclass(slots=True)
class Drained:
    """All that was given to be sent on the stream has left."""

    stream_id: int


@dataclass(slots=True)
class Ready:
    """The peer's settings have come: it speaks HTTP/2."""


@dataclass(slots=True)
class Failed:
    """The connection is over because of what the peer sent; the GOAWAY that says so is the last
    thing to send."""

    code: int
    reason: str


Event = Opened | Data | Reset | Drained | Ready | Failed
