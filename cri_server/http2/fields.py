"""Whether a request's header fields are such as HTTP/2 permits (RFC 9113, sections 8.2 and 8.3)."""

from __future__ import annotations

import re

from cri_server.http2.hpack import Field

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\0\r\n]")
_PSEUDO = {b":method", b":scheme", b":path", b":authority"}
_REQUIRED = {b":method", b":scheme", b":path"}
_OF_A_CONNECTION = {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
# Fields of each gRPC request, which need no looking at.
_USUAL = {
    b"content-type",
    b"user-agent",
    b"grpc-timeout",
    b"grpc-accept-encoding",
    b"grpc-encoding",
    b"accept-encoding",
}


def malformed(fields: list[Field]) -> bool:
    """Whether the request must be treated as a stream error."""
    pseudo: set[bytes] = set()
    regular = False
    for name, value in fields:
        if name in _PSEUDO:
            if regular or name in pseudo or _BAD_VALUE.search(value):
                return True
            pseudo.add(name)
            continue
        regular = True
        if name not in _USUAL and (
            not _NAME.fullmatch(name) or name in _OF_A_CONNECTION or (name == b"te" and value != b"trailers")
        ):
            return True
        if _BAD_VALUE.search(value):
            return True
    return not pseudo >= _REQUIRED
