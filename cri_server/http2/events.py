"""The events that a connection reports to its owner."""

from __future__ import annotations

from dataclasses import dataclass

from cri_server.http2.hpack import Field


@dataclass(slots=True)
class Opened:
    """A request begins. `fields`: None when they exceed the limit; `ended`: no body follows."""

    stream_id: int
    fields: list[Field] | None
    ended: bool


@dataclass(slots=True)
class Data:
    """A part of a request's body. `ended`: the last part, which may be empty."""

    stream_id: int
    data: bytes
    ended: bool


@dataclass(slots=True)
class Reset:
    """The stream was reset: by the peer, or by this side because the peer broke the protocol.

    The stream counts as open until the connection's owner has ended its work for the stream and
    has subtracted one from `Http2Connection.unfinished_streams`.
    """

    stream_id: int
    code: int


@dataclass(slots=True)
class Drained:
    """All queued data of the stream has been sent."""

    stream_id: int


@dataclass(slots=True)
class PeerReady:
    """The peer's preface and SETTINGS have arrived."""


@dataclass(slots=True)
class Failed:
    """The connection has failed. The GOAWAY in `data_to_send` is the last frame to send."""

    code: int
    reason: str


Event = Opened | Data | Reset | Drained | PeerReady | Failed
