"""The gRPC codes of errors, and how failed calls are logged.

An exception that is not an `Error` is a bug: the client gets INTERNAL, the log a traceback.
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
NODE_FAULTS = {
    Code.INTERNAL,
    Code.UNKNOWN,
    Code.UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED,
    Code.DEADLINE_EXCEEDED,
    Code.UNIMPLEMENTED,
}
"""Codes of failures that the node or a peer has caused, not the request. They are logged as
warnings. UNIMPLEMENTED reports a feature that the node or kernel lacks."""
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class CallFailed(Exception):
    """A call that the transport refuses, with the code and message for the client."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message


class UnknownCall(CallFailed):
    """A call of CRI that this server lacks. It is logged at debug level only, because clients probe
    for such calls repeatedly."""

    def __init__(self, name: str) -> None:
        super().__init__(Code.UNIMPLEMENTED, f"{name} is not supported")


def code_of(error: BaseException) -> Code:
    """Return the gRPC code of `error`. A CallFailed has its own code. An errno for lack of space,
    memory or descriptors is RESOURCE_EXHAUSTED. Any other Error has the code of its kind, and any
    other exception is INTERNAL."""
    if isinstance(error, CallFailed):
        return error.code
    number = getattr(error, "errno", None)
    # The node lacks space, memory or descriptors at the moment; INTERNAL would read as a bug.
    if isinstance(error, KernelError | OSError) and number in EXHAUSTED:
        return Code.RESOURCE_EXHAUSTED
    if isinstance(error, Error):
        return BY_KIND.get(error.kind, Code.INTERNAL)
    return Code.INTERNAL


def message_of(error: BaseException) -> str:
    """Return the error's text for the client, followed by the error's notes about undos that
    failed."""
    if isinstance(error, CallFailed):
        return error.message
    text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    return "; ".join([text, *getattr(error, "__notes__", [])])


def report(call: str, error: BaseException) -> None:
    """Log that `call` failed with `error`.

    | error | level |
    |---|---|
    | a fault of the node or a peer that `verbs` has not logged yet | warning |
    | a call that the transport refused, except an unknown call | info |
    | an unknown call | debug |
    | any other Error, such as NotFound, because kubelet often names removed objects | debug |
    | any other exception | error, with the traceback |
    """
    import logging  # the command line imports this module for the codes alone

    log = logging.getLogger(__name__)
    if isinstance(error, UnknownCall):
        log.debug("%s: %s", call, error.message)
    elif isinstance(error, CallFailed):
        log.info("%s: %s: %s", call, error.code.name, error.message)
    elif isinstance(error, Error):
        has_line = getattr(error, "has_line", False)
        warns = code_of(error) in NODE_FAULTS and not has_line
        level = logging.WARNING if warns else logging.DEBUG
        log.log(level, "%s: %s: %s", call, error.kind, message_of(error))
    else:
        log.exception("%s: unexpected error", call, exc_info=error)
