"""The HTTP/1.1 request that opens a session, and its response, without I/O; `h11` parses.

Each connection has one request. Its response is 101, followed by SPDY or WebSocket, or an error and
the end of the connection. A request is trusted for a valid ticket alone. Origin is not compared
with Host: the API server forwards its client's Origin, kubelet sends its own Host. A foreign
web page that reaches this server (DNS rebinding, cross-site WebSockets) lacks the ticket, which is
in the path and in no cookie.
"""

from __future__ import annotations

import base64
import binascii
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
    """The request is refused with an HTTP status, and the connection closed."""

    def __init__(self, status: int, message: str, fields: Fields = ()) -> None:
        super().__init__(message)
        self.status, self.message, self.fields = status, message, fields

    def response(self) -> bytes:
        """Return the HTTP response with the status, which closes the connection."""
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
    """A complete request without a body. Header names are in lower case; `ahead`: bytes received
    after it."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    ahead: bytes

    def values(self, name: str) -> list[str]:
        """Return all values of a header; comma-separated lists are split."""
        lists = (value for key, value in self.headers if key == name)
        return [part.strip() for value in lists for part in value.split(",") if part.strip()]

    @property
    def upgrade(self) -> str:
        """The protocol of the Upgrade header, in lower case; empty if this is not an upgrade."""
        connection = {value.lower() for value in self.values("connection")}
        protocols = self.values("upgrade")
        return protocols[0].lower() if "upgrade" in connection and protocols else ""


class RequestReader:
    """Parses a request with `h11`."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT_BYTES)
        self._request: h11.Request | None = None

    def receive(self, data: bytes) -> UpgradeRequest | None:
        """Add received bytes (empty: the client's end); return the request once complete. Raises
        `Refused`."""
        try:
            self._http.receive_data(data)
            if self._request is None:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    return None
                if not isinstance(event, h11.Request):
                    raise Refused(400, "the client sent no HTTP request")
                self._request = event
                _check_framing(event)
        except h11.RemoteProtocolError as error:
            raise Refused(431 if error.error_status_hint == 431 else 400, str(error)) from None
        # A client may send its first frames behind the request; h11 stops at an Upgrade.
        ahead, _ = self._http.trailing_data
        return _checked(self._request, bytes(ahead))


def _check_framing(event: h11.Request) -> None:
    """Refuse a body: the session's bytes must follow the headers."""
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
    """Require one Host, with any name: kubelet forwards the Host of its client."""
    hosts = [value for name, value in request.headers if name == "host"]
    if len(hosts) != 1 or not hosts[0] or any(mark in hosts[0] for mark in "/@?# "):
        raise Refused(400, "the request must have exactly one Host")


def switch(fields: Fields) -> bytes:
    """Return the response `101 Switching Protocols` with the header `Connection: Upgrade` and
    `fields`."""
    return _head(101, [("Connection", "Upgrade"), *fields])


def choose_stream_protocol(request: UpgradeRequest, supported: Sequence[str]) -> str:
    """Return the first SPDY stream protocol of the client that is supported. Raises `Refused`."""
    offered = request.values(PROTOCOL_HEADER.lower())
    if not offered:
        raise Refused(400, f"{PROTOCOL_HEADER} is missing")
    return _first_supported(offered, supported, [(ACCEPTED_HEADER, name) for name in supported])


def _first_supported(
    offered: Sequence[str], supported: Sequence[str], refusal_fields: Fields = ()
) -> str:
    # The client's order decides, as in Kubernetes' `httpstream.Handshake`; 403 is its answer, too.
    for name in offered:
        if name in supported:
            return name
    raise Refused(
        403, f"no offered protocol is supported: {', '.join(offered)[:200]}", refusal_fields
    )


def switch_to_spdy(protocol: str) -> bytes:
    """Return the response that switches the connection to SPDY/3.1 with a stream protocol."""
    return switch([("Upgrade", "SPDY/3.1"), (PROTOCOL_HEADER, protocol)])


def choose_subprotocol(request: UpgradeRequest, supported: Sequence[str]) -> str:
    """Return the first WebSocket subprotocol of the client that is supported; empty if it offers
    none. Raises `Refused`."""
    offered = request.values("sec-websocket-protocol")
    return _first_supported(offered, supported) if offered else ""


def switch_to_websocket(request: UpgradeRequest, subprotocol: str) -> bytes:
    """Return the response that switches the connection to WebSocket (RFC 6455, section 4.2.2).
    Raises `Refused`."""
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
    except (binascii.Error, ValueError):
        return False


def _head(status: int, fields: Fields) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        *(f"{name}: {value}" for name, value in fields),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
