"""Parses the HTTP/1.1 request that opens a session, with `h11`, and makes the response. No I/O.

Each connection has one request. After the response 101 the connection carries SPDY or WebSocket.
Any other response is an error and ends the connection.

Only a valid ticket in the path authorizes a request. Origin is not compared with Host, because the
API server forwards its client's Origin, which does not name this server. A foreign web page that
reaches this server (DNS rebinding, cross-site WebSockets) cannot know the ticket, because the
ticket is in no cookie.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

import h11
from websockets.utils import accept_key

HEAD_LIMIT_BYTES = 16 * 1024
PROTOCOL_HEADER = "X-Stream-Protocol-Version"
ACCEPTED_HEADER = "X-Accepted-Stream-Protocol-Versions"

Fields = Sequence[tuple[str, str]]


class Refused(Exception):
    """The server refuses the request with an HTTP status, and closes the connection."""

    def __init__(self, status: int, message: str, fields: Fields = ()) -> None:
        super().__init__(message)
        self.status, self.message, self.fields = status, message, fields

    def response(self) -> bytes:
        """Return the HTTP response for the client, with `Connection: close`."""
        body = (self.message + "\n").encode()
        fields = [
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
            *self.fields,
        ]
        return _head(self.status, fields) + body


@dataclass(frozen=True, slots=True)
class UpgradeRequest:
    """A complete HTTP request without a body. Header names are in lower case. `ahead`: the bytes
    that were received after the request."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    ahead: bytes

    def values(self, name: str) -> list[str]:
        """Return all values of the header `name`. Comma-separated lists are split."""
        lists = (value for key, value in self.headers if key == name)
        return [part.strip() for value in lists for part in value.split(",") if part.strip()]

    @property
    def upgrade(self) -> str:
        """Return the protocol in the Upgrade header, in lower case; empty if the request is not an
        upgrade."""
        connection = {value.lower() for value in self.values("connection")}
        protocols = self.values("upgrade")
        return protocols[0].lower() if "upgrade" in connection and protocols else ""


class RequestReader:
    """Parses one HTTP request with `h11`."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT_BYTES)

    def receive(self, data: bytes) -> UpgradeRequest | None:
        """Add received bytes; empty bytes mean that the client has closed its side. Return the
        request when it is complete, else None. Raises `Refused`."""
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise Refused(431 if error.error_status_hint == 431 else 400, str(error)) from None
        if event is h11.NEED_DATA:
            return None
        if not isinstance(event, h11.Request):
            raise Refused(400, "the client sent no HTTP request")
        _check_framing(event)
        # A client may send its first frames behind the request; h11 stops at an Upgrade.
        ahead, _ = self._http.trailing_data
        return _checked(event, bytes(ahead))


def _check_framing(event: h11.Request) -> None:
    """Raise `Refused` unless the request is HTTP/1.1 and has no body."""
    if event.http_version != b"1.1":
        raise Refused(400, "the request must be HTTP/1.1")
    for name, value in event.headers:
        # Go's client sends `Content-Length: 0` with a POST that has no body.
        if name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
            raise Refused(400, "the request must not have a body")


def _checked(event: h11.Request, ahead: bytes) -> UpgradeRequest:
    headers = tuple(
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers
    )
    target = event.target.decode("latin-1")
    # A server must accept the absolute form, too, which proxies send (RFC 9112, section 3.2.2).
    try:
        path = urlsplit(target).path if target.startswith("http://") else target.split("?", 1)[0]
    except ValueError as error:
        raise Refused(400, f"the request's target: {error}") from None
    request = UpgradeRequest(event.method.decode("latin-1"), path, headers, ahead)
    _check_host(request)
    return request


def _check_host(request: UpgradeRequest) -> None:
    """Raise `Refused` unless the request has exactly one header Host. The host's name is not
    checked, because kubelet forwards the header Host that its client has sent."""
    hosts = [value for name, value in request.headers if name == "host"]
    if len(hosts) != 1 or not hosts[0] or any(mark in hosts[0] for mark in "/@?# "):
        raise Refused(400, "the request must have exactly one Host")


def switch(fields: Fields) -> bytes:
    """Return the response `101 Switching Protocols` with the headers `Connection: Upgrade` and
    `fields`."""
    return _head(101, [("Connection", "Upgrade"), *fields])


def choose_stream_protocol(request: UpgradeRequest, supported: Sequence[str]) -> str:
    """Return the first stream protocol in a SPDY client's offer that is in `supported`. Raises
    `Refused` if the client offers none of these."""
    offered = request.values(PROTOCOL_HEADER.lower())
    if not offered:
        raise Refused(400, f"{PROTOCOL_HEADER} is missing")
    return _first_supported(offered, supported, [(ACCEPTED_HEADER, name) for name in supported])


def _first_supported(
    offered: Sequence[str], supported: Sequence[str], refusal_fields: Fields = ()
) -> str:
    # The client's order decides. Kubernetes' `httpstream.Handshake` does the same, and answers 403.
    for name in offered:
        if name in supported:
            return name
    raise Refused(
        403, f"no offered protocol is supported: {', '.join(offered)[:200]}", refusal_fields
    )


def switch_to_spdy(protocol: str) -> bytes:
    """Return the response that switches the connection to SPDY/3.1 with the stream protocol
    `protocol`."""
    return switch([("Upgrade", "SPDY/3.1"), (PROTOCOL_HEADER, protocol)])


def choose_subprotocol(request: UpgradeRequest, supported: Sequence[str]) -> str:
    """Return the first subprotocol in a WebSocket client's offer that is in `supported`; empty if
    the client offers nothing. Raises `Refused` if it offers only unsupported subprotocols."""
    offered = request.values("sec-websocket-protocol")
    return _first_supported(offered, supported) if offered else ""


def switch_to_websocket(request: UpgradeRequest, subprotocol: str) -> bytes:
    """Return the response that switches the connection to WebSocket (RFC 6455, section 4.2.2).
    Raises `Refused` if the request is not a WebSocket handshake of version 13."""
    keys = [value for name, value in request.headers if name == "sec-websocket-key"]
    if request.method != "GET" or len(keys) != 1 or not _is_key(keys[0]):
        raise Refused(400, "not a WebSocket handshake")
    if request.values("sec-websocket-version") != ["13"]:
        raise Refused(400, "the WebSocket version must be 13", [("Sec-WebSocket-Version", "13")])
    fields = [("Upgrade", "websocket"), ("Sec-WebSocket-Accept", accept_key(keys[0]))]
    if subprotocol:
        fields.append(("Sec-WebSocket-Protocol", subprotocol))
    return switch(fields)


def _is_key(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == 16
    except ValueError:
        return False


def _head(status: int, fields: Fields) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        *(f"{name}: {value}" for name, value in fields),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
