"""The table of gRPC methods: path -> decoder, handler and encoder.

A handler is a method of the service's object with the call's name. It takes the request and returns
the reply (a message, or its wire form as bytes), a coroutine of it, or an async generator of
replies for a call that streams. A handler that need not wait returns the reply itself, because a
coroutine costs a task. A coroutine may return `StreamedReply` for a reply too large for memory.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.rpc.codes import UnknownCall


@dataclass(frozen=True, slots=True)
class Method:
    """A gRPC method. `decode` raises for bytes that are not a request."""

    name: str
    decode: Callable[[bytes], Any]
    answer: Callable[[Any], Any]
    encode: Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """A reply of `size` bytes in wire form, produced part by part as the client reads.

    `close` is called once, also when no part was read.
    """

    size: int
    content: AsyncGenerator[bytes, None]
    close: Callable[[], None]


Table = dict[bytes, Method]

_encode: Callable[[Any], bytes] = methodcaller("SerializeToString")


def table(**services: object) -> Table:
    """Return the methods of CRI's services. `services`: objects with handlers, by service name; a
    call without a handler answers UNIMPLEMENTED.

    Raises ValueError for a public method of an object that is not a call of its service.
    """
    calls_by_path: Table = {}
    for name, service in services.items():
        description = api.DESCRIPTOR.services_by_name[name]
        calls = {method.name for method in description.methods}
        # A misspelt handler would otherwise be answered with UNIMPLEMENTED in silence.
        wrong = {n for n in dir(type(service)) if not n.startswith("_")} - calls
        if wrong:
            raise ValueError(f"methods that are not calls of {name}: {', '.join(sorted(wrong))}")
        for method in description.methods:
            request = getattr(api, method.input_type.name)
            answer = getattr(service, method.name, None) or _refusal(method.name)
            path = f"/{description.full_name}/{method.name}".encode()
            calls_by_path[path] = Method(method.name, request.FromString, answer, _encode)
    return calls_by_path


def _refusal(name: str) -> Callable[[Any], Any]:
    def refuse(request: Any) -> Any:
        raise UnknownCall(name)

    return refuse
