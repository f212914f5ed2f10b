"""Which gRPC code an error becomes: the one table, and what is logged about it.

Errors of ours are answers; any other exception is a bug: INTERNAL, with its traceback in the log.
"""

from __future__ import annotations

import errno
from enum import IntEnum

from pyrunc.errors import Error, KernelError


class Code(IntEnum):
    """gRPC's status codes (grpc/doc/statuscodes.md)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


BY_KIND = {
    "invalid_argument": Code.INVALID_ARGUMENT,
    "invalid_spec": Code.INVALID_ARGUMENT,
    "not_found": Code.NOT_FOUND,
    "already_exists": Code.ALREADY_EXISTS,
    "wrong_state": Code.FAILED_PRECONDITION,
    "kernel": Code.INTERNAL,
    "resource_exhausted": Code.RESOURCE_EXHAUSTED,
    "unsupported": Code.UNIMPLEMENTED,
    # The CRI client shows the bare message of UNKNOWN, so that prefixes such as
    # `RegistryUnavailable` stay first.
    "peer": Code.UNKNOWN,
    "unavailable": Code.UNAVAILABLE,
    "deadline": Code.DEADLINE_EXCEEDED,
    "internal": Code.INTERNAL,
}
NODE_IS_TO_BLAME = {
    Code.INTERNAL,
    Code.UNKNOWN,
    Code.UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED,
    Code.UNIMPLEMENTED,
}
"""What its owner, or a peer's, must hear of: the request may be right. UNIMPLEMENTED is said of
what this node or kernel lacks."""
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class CallFailed(Exception):
    """A call that the transport itself refuses: the code and the message that the client reads."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message


class UnknownCall(CallFailed):
    """A call of CRI that this server has not. Clients try such calls to find out, again and again."""

    def __init__(self, name: str) -> None:
        super().__init__(Code.UNIMPLEMENTED, f"{name} is not supported")


def code_of(error: BaseException) -> Code:
    """The code for `error`, by its kind and, for failed system calls, by what ran out."""
    if isinstance(error, CallFailed):
        return error.code
    number = getattr(error, "errno", None)
    if isinstance(error, KernelError | OSError) and number in EXHAUSTED:
        return Code.RESOURCE_EXHAUSTED
    if isinstance(error, Error):
        return BY_KIND.get(error.kind, Code.INTERNAL)
    return Code.INTERNAL


def message_of(error: BaseException) -> str:
    """What the caller reads: the error and the notes about what could not be undone."""
    if isinstance(error, CallFailed):
        return error.message
    text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    return "; ".join([text, *getattr(error, "__notes__", [])])


def report(call: str, error: BaseException) -> None:
    """Log that `call` failed, unless it has a line already (`has_line`). What the caller did wrong
    in a call that only reads goes to debug, for kubelet asks for things that are gone all the time.
    """
    import logging  # not for our own client, which takes the codes from here

    log = logging.getLogger(__name__)
    if isinstance(error, UnknownCall):
        log.debug("%s: %s", call, error.message)
    elif isinstance(error, CallFailed):
        log.info("%s: %s: %s", call, error.code.name, error.message)
    elif isinstance(error, Error):
        told = getattr(error, "has_line", False)
        level = (
            logging.WARNING if code_of(error) in NODE_IS_TO_BLAME and not told else logging.DEBUG
        )
        log.log(level, "%s: %s: %s", call, error.kind, message_of(error))
    else:
        log.exception("%s: not expected", call, exc_info=error)
