"""Which gRPC code an error becomes: the one table, and the wrapper that applies it to every call.

Errors of ours are answers and are logged in one line; any other exception is a bug: INTERNAL, with its traceback in the log.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

from pyrunc.errors import Error, KernelError, Unsupported

log = logging.getLogger(__name__)

BY_KIND = {
    "invalid_argument": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_spec": grpc.StatusCode.INVALID_ARGUMENT,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "already_exists": grpc.StatusCode.ALREADY_EXISTS,
    "wrong_state": grpc.StatusCode.FAILED_PRECONDITION,
    "kernel": grpc.StatusCode.INTERNAL,
    "resource_exhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unsupported": grpc.StatusCode.UNIMPLEMENTED,
    # The CRI client shows the bare message of UNKNOWN, so that prefixes such as `RegistryUnavailable` stay first.
    "peer": grpc.StatusCode.UNKNOWN,
    "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
    "internal": grpc.StatusCode.INTERNAL,
}
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Unary = Callable[[Any, Request, Any], Awaitable[Reply]]
Streaming = Callable[[Any, Request, Any], AsyncIterator[Reply]]


def code_of(error: BaseException) -> grpc.StatusCode:
    """The code for `error`, by its kind and, for failed system calls, by what ran out."""
    number = getattr(error, "errno", None)
    if isinstance(error, KernelError | OSError) and number in EXHAUSTED:
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, Error):
        return BY_KIND.get(error.kind, grpc.StatusCode.INTERNAL)
    return grpc.StatusCode.INTERNAL


def message_of(error: BaseException) -> str:
    """What the caller reads: the error and the notes about what could not be undone."""
    text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    return "; ".join([text, *getattr(error, "__notes__", [])])


def _report(call: str, error: BaseException) -> None:
    if isinstance(error, Unsupported):
        log.debug("%s: %s", call, error)
    elif isinstance(error, Error):
        log.info("%s: %s: %s", call, error.kind, message_of(error))
    else:
        log.exception("%s: not expected", call, exc_info=error)


def answers(method: Unary[Request, Reply]) -> Unary[Request, Reply]:
    """Wrap a unary call: its errors become status codes."""

    @functools.wraps(method)
    async def call(self: Any, request: Request, context: Any) -> Reply:
        try:
            return await method(self, request, context)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            _report(method.__name__, error)
            await context.abort(code_of(error), message_of(error))
            raise AssertionError("abort raises") from error

    return call


def streams(method: Streaming[Request, Reply]) -> Streaming[Request, Reply]:
    """Wrap a server-streaming call likewise."""

    @functools.wraps(method)
    async def call(self: Any, request: Request, context: Any) -> AsyncIterator[Reply]:
        try:
            async for reply in method(self, request, context):
                yield reply
        except asyncio.CancelledError:
            raise  # swallowing it leaks the stream (grpc issue 43360)
        except Exception as error:
            _report(method.__name__, error)
            await context.abort(code_of(error), message_of(error))

    return call
