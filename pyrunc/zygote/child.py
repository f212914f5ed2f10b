"""From a fork of the zygote to a child of its own: descriptors, session, signals, then the function. Nothing returns here."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from _signal import SIG_DFL, SIGCHLD, SIGKILL, set_wakeup_fd, signal  # type: ignore[import-not-found]  # (signal brings enum)
from _socket import socket

from pyrunc import ipc
from pyrunc.errors import Error
from pyrunc.kernel import reaper
from pyrunc.zygote import messages, preload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

_FIRST_FD = 3
_LAST_FD = 0x7FFF_FFFF


def fork_detached(
    request: dict[str, Any], fds: Sequence[int], function: Callable[..., Any] | None = None
) -> int:
    """A child with a session of its own and /dev/null as stdio. Raises Error before the fork if there is no such function."""
    function = function or preload.resolve(request["function"])
    pid = os.fork()
    if pid == 0:
        _in_child(_detached, function, request, list(fds))
    return pid


def fork_errand(request: dict[str, Any], fds: Sequence[int]) -> int:
    """A child in a process group of its own; the first descriptors are stdio and the result socket.

    It dies with the zygote, however that dies (PR_SET_PDEATHSIG); processes that it started only if the zygote ends orderly.
    """
    function, zygote = preload.resolve(request["function"]), os.getpid()
    pid = os.fork()
    if pid == 0:
        _in_child(lambda *asked: _errand(zygote, *asked), function, request, list(fds))
    _own_group(pid)
    return pid


def _in_child(
    body: Callable[[Callable[..., Any], dict[str, Any], list[int]], int],
    function: Callable[..., Any],
    request: dict[str, Any],
    fds: list[int],
) -> NoReturn:
    code = 1
    try:
        _forget_the_zygote()
        code = body(function, request, fds)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _detached(function: Callable[..., Any], request: dict[str, Any], fds: list[int]) -> int:
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    mine = _take_descriptors([null, null, null, *fds])
    return _code(function(request.get("arguments", {}), mine))


def _errand(zygote: int, function: Callable[..., Any], request: dict[str, Any], fds: list[int]) -> int:
    reaper.set_parent_death_signal(SIGKILL, zygote)
    reaper.set_child_subreaper()
    _own_group(0)
    result, *mine = _take_descriptors(fds)
    os.environ.update(request["environment"])
    answers = socket(fileno=result)
    try:
        outcome = function(request["arguments"], mine)
    except Error as error:
        ipc.send(answers, {"error": error.to_wire()})
        return 1
    if isinstance(outcome, list):
        ipc.send(answers, {"ok": True}, outcome)
        return 0
    return _code(outcome)


def _code(outcome: object) -> int:
    return outcome if isinstance(outcome, int) else 0


def _forget_the_zygote() -> None:
    set_wakeup_fd(-1)
    signal(SIGCHLD, SIG_DFL)
    gc.enable()  # the frozen heap stays out of its sight


def _take_descriptors(fds: list[int]) -> list[int]:
    """Make `fds` the only descriptors beside those that all keep: the first three as stdio, the others from 3 on, close-on-exec;
    returns the latter."""
    above = max(_FIRST_FD + len(fds), max(fds) + 1)
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for place, copy in enumerate(copies):
        os.dup2(copy, place, inheritable=place < _FIRST_FD)
    lowest = len(fds)
    for kept in preload.kept:
        os.closerange(lowest, kept)
        lowest = kept + 1
    os.closerange(lowest, _LAST_FD)  # one close_range(2) call, whatever the range
    return list(range(_FIRST_FD, len(fds)))


def _own_group(pid: int) -> None:
    try:
        os.setpgid(pid, 0 if pid == 0 else pid)
    except (ProcessLookupError, PermissionError):  # done by the other side already, and exec'd since
        pass


assert messages.STDIO_OF_ERRAND == _FIRST_FD + 1
