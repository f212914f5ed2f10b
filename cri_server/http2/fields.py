"""Validation of a request's header fields (RFC 9113, sections 8.1.1, 8.2 and 8.3)."""

from __future__ import annotations

import re

from cri_server.http2.hpack import Field

# Capital letters make a request malformed, they are not folded (section 8.2.1).
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\0\r\n]")
_PSEUDO = {b":method", b":scheme", b":path", b":authority"}
_REQUIRED = {b":method", b":scheme", b":path"}
# HTTP/2 has frames for what these fields say; a gateway to HTTP/1.1 that passes them on is open to
# request smuggling (section 8.2.2).
_CONNECTION_SPECIFIC = {
    b"connection",
    b"proxy-connection",
    b"keep-alive",
    b"transfer-encoding",
    b"upgrade",
}
# Fields that each gRPC request has; they need no further check.
_USUAL = {
    b"content-type",
    b"user-agent",
    b"grpc-timeout",
    b"grpc-accept-encoding",
    b"grpc-encoding",
    b"accept-encoding",
}


class Malformed(Exception):
    """The request is malformed, so its stream must be reset (a stream error)."""


def check(fields: list[Field]) -> int | None:
    """Check a request's header fields. Return the value of content-length, or None if this field is
    missing. Raises Malformed."""
    pseudo: set[bytes] = set()
    regular, length = False, None
    for name, value in fields:
        if _BAD_VALUE.search(value):
            raise Malformed
        if name in _PSEUDO:
            if regular or name in pseudo:
                raise Malformed
            pseudo.add(name)
            if name == b":path" and not value:
                raise Malformed
            continue
        regular = True
        if name not in _USUAL:
            _check_unusual(name, value)
            if name == b"content-length":
                length = _length(value, length)
    if not pseudo >= _REQUIRED:
        raise Malformed
    return length


def _check_unusual(name: bytes, value: bytes) -> None:
    # gRPC clients send `te: trailers` to find proxies that drop trailers (PROTOCOL-HTTP2.md).
    if (
        not _NAME.fullmatch(name)
        or name in _CONNECTION_SPECIFIC
        or (name == b"te" and value != b"trailers")
    ):
        raise Malformed


def _length(value: bytes, before: int | None) -> int:
    # Two lengths, even equal ones, are refused: peers that choose different ones disagree on the
    # end.
    if before is not None or not re.fullmatch(rb"\d{1,18}", value):
        raise Malformed
    return int(value)
