"""What can go wrong, sorted by who must act.

The caller acts on a bad request (`InvalidSpec`, `InvalidArgument`, `NotFound`, `AlreadyExists`,
`WrongState`), the node's owner on `KernelError` and `ResourceExhausted`, a peer's owner on
`PeerError` (its kind `Unavailable` is about our own processes); `Unsupported` says that this build
or this kernel cannot do it, `DeadlineExceeded` that the time was up. Every error knows its `kind`,
which travels between our processes and is turned into an exit code or a gRPC code in one table at
the edge.
"""

from __future__ import annotations

import errno as _errno
import os

Wire = dict[str, str | int]

# Names in a message may be an image's or a pod's: they move no cursor, rename no window and begin
# no line of their own.
VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


class Error(Exception):
    """The base of all errors that are meant to be read by a person. `message` is one line without a
    full stop."""

    kind = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def to_wire(self) -> Wire:
        """The error as a JSON object: `{"kind": …, "message": …}` and what the class adds."""
        return {"kind": self.kind, "message": self.message}

    def add_detail(self, text: str) -> None:
        """Say more, in brackets at the end of the message."""
        self._say(f"{self.message} ({text})")

    def _say(self, message: str) -> None:
        self.message, self.args = message, (message,)


class InvalidArgument(Error):
    """The caller's request cannot be right, whatever the node's state."""

    kind = "invalid_argument"


class InvalidSpec(InvalidArgument):
    """A value of a configuration file is wrong; `path` is its JSON path, such as
    `process.rlimits[0].type`."""

    kind = "invalid_spec"

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.detail = message

    def add_detail(self, text: str) -> None:
        super().add_detail(text)
        self.detail = f"{self.detail} ({text})"

    def to_wire(self) -> Wire:
        return {
            "kind": self.kind,
            "message": self.message,
            "path": self.path,
            "detail": self.detail,
        }


class NotFound(Error):
    """The thing that the caller names does not exist."""

    kind = "not_found"


class AlreadyExists(Error):
    """The name is taken by something else."""

    kind = "already_exists"


class WrongState(Error):
    """The thing exists, but not in the state that the operation needs."""

    kind = "wrong_state"


class KernelError(Error):
    """A system call failed: `mount 'proc' on '/proc': EPERM`.

    `call` is the manual page's name, `subject` the object it was about, `errno` the number; `note`
    an optional explanation.
    """

    kind = "kernel"

    def __init__(self, call: str, subject: str, errno: int, note: str = "") -> None:
        self.call = call
        self.subject = subject
        self.errno = errno
        self.note = note
        super().__init__(self._words())

    @classmethod
    def of(cls, error: OSError, call: str, subject: str, note: str = "") -> KernelError:
        """An OSError of the standard library, which knows neither call nor subject."""
        return cls(call, subject, error.errno or 0, note)

    def _words(self) -> str:
        where = f"{self.call} {self.subject}" if self.subject else self.call
        return f"{where}: {self.symbol}" + (f" ({self.note})" if self.note else "")

    def add_detail(self, text: str) -> None:
        self.note = f"{self.note}, {text}" if self.note else text
        self._say(self._words())

    @property
    def symbol(self) -> str:
        """The errno's name, such as `EPERM`, or its number where it has none."""
        return _errno.errorcode.get(self.errno, str(self.errno))

    @property
    def text(self) -> str:
        """The message with the errno in strerror's words, in lower case, which callers of a runtime
        look for."""
        where = f"{self.call} {self.subject}" if self.subject else self.call
        return f"{where}: {os.strerror(self.errno).lower()}" + (
            f" ({self.note})" if self.note else ""
        )

    def to_wire(self) -> Wire:
        return {
            "kind": self.kind,
            "message": self.message,
            "call": self.call,
            "subject": self.subject,
            "errno": self.errno,
            "note": self.note,
        }


class kernel_errors:
    """A block whose OSError is raised as a KernelError of `call` on `subject`."""

    __slots__ = ("_call", "_subject")

    def __init__(self, call: str, subject: str) -> None:
        self._call, self._subject = call, subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise KernelError.of(error, self._call, self._subject) from None


class ResourceExhausted(Error):
    """Out of disk, addresses, tokens or another bounded thing; `message` says which."""

    kind = "resource_exhausted"


class Unsupported(Error):
    """Neither this build nor this kernel can do it."""

    kind = "unsupported"


class PeerError(Error):
    """A registry, a CNI plugin or another program broke its contract."""

    kind = "peer"


class Unavailable(PeerError):
    """A process of ours that the request went through is gone: a shim, a zygote, a worker. Another
    try may find a new one."""

    kind = "unavailable"


class DeadlineExceeded(Error):
    """The time that the caller gave was up."""

    kind = "deadline"


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


def from_wire(wire: Wire) -> Error:
    """The error that `to_wire` described; an unknown kind becomes a plain `Error`."""
    kind, message = str(wire.get("kind", "")), str(wire.get("message", ""))
    if kind == InvalidSpec.kind:
        return InvalidSpec(str(wire.get("path", "")), str(wire.get("detail", message)))
    if kind == KernelError.kind:
        number = wire.get("errno", 0)
        return KernelError(
            str(wire.get("call", "")),
            str(wire.get("subject", "")),
            number if isinstance(number, int) else 0,
            str(wire.get("note", "")),
        )
    return _BY_KIND.get(kind, Error)(message)
