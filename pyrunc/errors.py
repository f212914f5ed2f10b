"""All errors of the project, sorted by who must act.

The caller acts on a bad request: `InvalidSpec`, `InvalidArgument`, `NotFound`, `AlreadyExists`,
`WrongState`. The node's owner acts on `KernelError` and `ResourceExhausted`. The owner of the other
process acts on `PeerError`; if that process is one of pyrunc's, the error is `Unavailable`.
`Unsupported` means that this build or this kernel lacks a feature, `DeadlineExceeded` that the time
was up. Every error has a `kind`, which is sent between processes of pyrunc; one table converts it
to an exit code or a gRPC code.
"""

from __future__ import annotations

import errno as _errno
import os
import sys

ErrorFields = dict[str, str | int]

# Replaces control characters, because names in a message may come from an image or a pod: they must
# not move the cursor, rename the window or begin their own line.
VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


class Error(Exception):
    """The base class of all errors that are shown to a person. `message` is one line without a full
    stop."""

    kind = "internal"
    own_fields: tuple[str, ...] = ()

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def to_fields(self) -> ErrorFields:
        """Return the error as a JSON object: kind, message and the fields of its class."""
        own = {name: getattr(self, name) for name in self.own_fields}
        return {"kind": self.kind, "message": self.message, **own}

    def add_detail(self, text: str) -> None:
        """Append `text` to the error message, in brackets."""
        self._set_message(f"{self.message} ({text})")

    def _set_message(self, message: str) -> None:
        self.message, self.args = message, (message,)


class InvalidArgument(Error):
    """The request is invalid, whatever the state of the node is."""

    kind = "invalid_argument"


class InvalidSpec(InvalidArgument):
    """A value of a configuration file is wrong; `path` is its JSON path, such as
    `process.rlimits[0].type`."""

    kind = "invalid_spec"
    own_fields = ("path", "detail")

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.detail = message

    def add_detail(self, text: str) -> None:
        super().add_detail(text)
        self.detail = f"{self.detail} ({text})"


class NotFound(Error):
    """The object that the caller names does not exist."""

    kind = "not_found"


class AlreadyExists(Error):
    """The name is in use already."""

    kind = "already_exists"


class WrongState(Error):
    """The object exists, but not in the state that the operation needs."""

    kind = "wrong_state"


class KernelError(Error):
    """A system call failed: `mount 'proc' on '/proc': EPERM`.

    `call`: the call's name in its manual page; `subject`: the object of the call; `errno`: the
    error's number; `note`: an explanation, or empty.
    """

    kind = "kernel"
    own_fields = ("call", "subject", "errno", "note")

    def __init__(self, call: str, subject: str, errno: int, note: str = "") -> None:
        self.call = call
        self.subject = subject
        self.errno = errno
        self.note = note
        super().__init__(self._text(self.symbol))

    @classmethod
    def of(cls, error: OSError, call: str, subject: str, note: str = "") -> KernelError:
        """Convert an OSError of the standard library. The caller passes `call` and `subject`,
        because the OSError has neither."""
        return cls(call, subject, error.errno or 0, note)

    def _text(self, reason: str) -> str:
        where = f"{self.call} {self.subject}" if self.subject else self.call
        return f"{where}: {reason}" + (f" ({self.note})" if self.note else "")

    def add_detail(self, text: str) -> None:
        self.note = f"{self.note}, {text}" if self.note else text
        self._set_message(self._text(self.symbol))

    @property
    def symbol(self) -> str:
        """Return the errno's name, such as `EPERM`, or its number if it has no name."""
        return _errno.errorcode.get(self.errno, str(self.errno))

    @property
    def text(self) -> str:
        """Return the error message with strerror's text, in lower case, instead of the errno's
        name. podman and docker search for strerror's text."""
        return self._text(os.strerror(self.errno).lower())


class kernel_errors:
    """A context manager that turns an OSError of its `with` block into a KernelError with `call`
    and `subject`."""

    __slots__ = ("_call", "_subject")

    def __init__(self, call: str, subject: str) -> None:
        self._call, self._subject = call, subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise KernelError.of(error, self._call, self._subject) from None


class ResourceExhausted(Error):
    """The disk, a range of addresses or another bounded resource is used up; `message` names it."""

    kind = "resource_exhausted"


class Unsupported(Error):
    """This build or this kernel cannot do what was requested."""

    kind = "unsupported"


class PeerError(Error):
    """A registry, a CNI plugin, a command or another process has failed or given a wrong answer."""

    kind = "peer"


class Unavailable(PeerError):
    """The shim, zygote or worker that serves the request has ended. If the caller repeats the
    request, a new process may serve it."""

    kind = "unavailable"


class DeadlineExceeded(Error):
    """The caller's time limit has passed."""

    kind = "deadline"


def to_error(error: Exception, call: str) -> Error:
    """Convert an exception to an Error for the caller. An Error is returned unchanged. An OSError
    becomes a KernelError of `call`. Any other exception becomes an internal Error, and its
    traceback is written to stderr."""
    if isinstance(error, Error):
        return error
    if isinstance(error, OSError):
        return KernelError.of(error, call, str(error.filename or ""), error.strerror or "")
    sys.excepthook(type(error), error, error.__traceback__)
    return Error(f"{type(error).__name__}: {error}")


_BY_KIND: dict[str, type[Error]] = {
    c.kind: c
    for c in (
        Error,
        InvalidArgument,
        NotFound,
        AlreadyExists,
        WrongState,
        ResourceExhausted,
        Unsupported,
        PeerError,
        Unavailable,
        DeadlineExceeded,
    )
}


def error_of(fields: ErrorFields) -> Error:
    """Convert the result of `to_fields` back to an error. An unknown kind becomes a plain
    `Error`."""
    kind, message = str(fields.get("kind", "")), str(fields.get("message", ""))
    if kind == InvalidSpec.kind:
        return InvalidSpec(str(fields.get("path", "")), str(fields.get("detail", message)))
    if kind == KernelError.kind:
        number = fields.get("errno", 0)
        return KernelError(
            str(fields.get("call", "")),
            str(fields.get("subject", "")),
            number if isinstance(number, int) else 0,
            str(fields.get("note", "")),
        )
    return _BY_KIND.get(kind, Error)(message)
