"""The tables of gRPC methods: for each path a decoder, a handler and an encoder.

The handler of a CRI call is the method with the call's name in the service's object. It takes the
request and returns one of:

- the reply: a message, an encoded message as bytes, or None for an empty message;
- a coroutine; its result is the reply, or a `StreamedReply` that need not fit in memory. Only a
  handler that must wait returns a coroutine, because each coroutine costs a task;
- an async generator of replies, for a streaming call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cri_server.api import api_pb2 as api
from cri_server.rpc import private
from cri_server.rpc.codes import UnknownCall
from pyrunc.records import Request

if TYPE_CHECKING:
    from google.protobuf.message import Message


@dataclass(frozen=True, slots=True)
class Method:
    """A gRPC method. `decode` raises an exception of any class for bytes that are not a valid
    request; `answer` is the handler."""

    name: str
    decode: Callable[[bytes], Any]
    answer: Callable[[Any], Any]
    encode: Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """An encoded reply of `size` bytes, which is produced piece by piece while the client reads it.

    `close` is called exactly once, even if nothing was read.
    """

    size: int
    content: AsyncGenerator[bytes, None]
    close: Callable[[], None]


Table = dict[bytes, Method]


def _encode(reply: Message | None) -> bytes:
    return b"" if reply is None else reply.SerializeToString()


def table(**services: object) -> Table:
    """Return the methods of CRI's services. `services`: objects with handlers, by service name. A
    call without a handler is answered with UNIMPLEMENTED.

    Raises ValueError when a public method of an object is not a call of its service.
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


def private_table(handlers: Mapping[type[Request], Callable[[Any], Any]]) -> Table:
    """Return the methods of `pyrunc.v1.Admin`.

    `handlers`: a function for each class of request. It returns the reply: a `Record` object, a
    JSON object, bytes or None. It may also return a coroutine with the reply as result, or an async
    generator of replies.
    """
    return {
        private.path(kind.call).encode(): Method(
            kind.call, private.decoder(kind), answer, private.encode
        )
        for kind, answer in handlers.items()
    }


def _refusal(name: str) -> Callable[[Any], Any]:
    def refuse(request: Any) -> Any:
        raise UnknownCall(name)

    return refuse
