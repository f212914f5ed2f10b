"""The table of calls: gRPC's path -> what decodes the request and answers it.

A handler is a method of the service's object with the call's name. It takes the request and returns
the reply (a message, or its wire form as bytes), a coroutine of it, or, for a call that streams, an
async generator of replies. What can be answered at once should be: a coroutine costs a task. A
coroutine may also return `Parts`, for a reply that is too large to hold.
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
    """A call. `decode` raises for bytes that are not a request."""

    name: str
    decode: Callable[[bytes], Any]
    answer: Callable[[Any], Any]
    encode: Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class Parts:
    """A reply in its wire form, `size` bytes in all, that is read part by part as the client takes
    it.

    `close` is called once, also when no part was asked for.
    """

    size: int
    content: AsyncGenerator[bytes, None]
    close: Callable[[], None]


Table = dict[bytes, Method]

_encode: Callable[[Any], bytes] = methodcaller("SerializeToString")


def table(**services: object) -> Table:
    """The calls of CRI's services by name: `RuntimeService=…`. What an object lacks answers
    UNIMPLEMENTED.

    Raises ValueError for a public method that is no call of the service.
    """
    found: Table = {}
    for name, service in services.items():
        description = api.DESCRIPTOR.services_by_name[name]
        calls = {method.name for method in description.methods}
        wrong = {n for n in dir(type(service)) if not n.startswith("_")} - calls
        if wrong:
            raise ValueError(f"not calls of {name}: {', '.join(sorted(wrong))}")
        for method in description.methods:
            request = getattr(api, method.input_type.name)
            answer = getattr(service, method.name, None) or _refusal(method.name)
            path = f"/{description.full_name}/{method.name}".encode()
            found[path] = Method(method.name, request.FromString, answer, _encode)
    return found


def _refusal(name: str) -> Callable[[Any], Any]:
    def refuse(request: Any) -> Any:
        raise UnknownCall(name)

    return refuse
