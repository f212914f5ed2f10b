"""Forks children of the zygote. A child arranges descriptors, session and signals, runs its
function and exits. `fork_detached` and `fork_job` return in the zygote only."""

from __future__ import annotations

import fcntl
import gc
import os
import sys

# not from `signal`, which imports enum
from _signal import (  # type: ignore[import-not-found]
    SIG_DFL,
    SIGCHLD,
    SIGKILL,
    set_wakeup_fd,
    signal,
)
from _socket import socket

from pyrunc import ipc
from pyrunc.errors import Error
from pyrunc.kernel import reaper
from pyrunc.zygote import preload
from pyrunc.zygote.messages import STDIO_OF_JOB, Outcome

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from pyrunc.ipc import Message
    from pyrunc.zygote.messages import RunJob

    Function = Callable[[Message, list[int]], Any]
    """A function that gets a request's arguments and descriptors."""

TEXT_LIMIT = 1000  # characters of each of an error's texts; JSON makes up to 6 bytes of one
_FIRST_FD = 3
_LAST_FD = 0x7FFF_FFFF


def fork_detached(function: Function, arguments: Message, fds: Sequence[int]) -> int:
    """Fork a child with a new session and /dev/null as stdio; return its pid."""
    pid = os.fork()
    if pid == 0:
        _in_child(lambda: _detached(function, arguments, list(fds)))
    return pid


def fork_job(request: RunJob, fds: Sequence[int]) -> int:
    """Fork a job with a new process group; return its pid. The first four of `fds` are stdio and
    the result socket. Raises PeerError, before the fork, if there is no function
    `request.function`.

    The kernel kills the job when the zygote dies in any way (PR_SET_PDEATHSIG). Processes that the
    job has started are killed only when the zygote exits normally.
    """
    function, zygote = preload.resolve(request.function), os.getpid()
    pid = os.fork()
    if pid == 0:
        _in_child(lambda: _job(zygote, function, request, list(fds)))
    # Parent and child both make the group, as shells do (setpgid(2)): it exists before the job runs
    # and before a deadline may kill the job, whichever process is scheduled first.
    _own_group(pid)
    return pid


def _in_child(body: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        _forget_the_zygote()
        code = body()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # sys.exit would run the zygote's own `finally` blocks and exit handlers, whose frames
            # and objects the child has copied.
            os._exit(code)


def _detached(function: Function, arguments: Message, fds: list[int]) -> int:
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    mine = _take_descriptors([null, null, null, *fds], preload.inherited)
    return _code(function(arguments, mine))


def _job(zygote: int, function: Function, request: RunJob, fds: list[int]) -> int:
    reaper.set_parent_death_signal(SIGKILL, zygote)
    reaper.set_child_subreaper()
    _own_group(0)
    result, *mine = _take_descriptors(fds, [])
    os.environ.update(request.environment)
    answers = socket(fileno=result)
    try:
        outcome = function(request.arguments, mine)
    except Error as error:
        ipc.send(answers, Outcome(error=_brief(error.to_fields())).to_fields())
        return 1
    if isinstance(outcome, list):
        ipc.send(answers, Outcome(ok=True).to_fields(), outcome)
        return 0
    return _code(outcome)


def _brief(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an error's fields with texts cut to `TEXT_LIMIT` characters, so that the message fits
    into one packet."""
    # Texts contain names of files, which the author of an image's layer chooses. A longer message
    # would be sent as a memfd, which the server refuses from a job.
    return {k: v[:TEXT_LIMIT] if isinstance(v, str) else v for k, v in fields.items()}


def _code(outcome: object) -> int:
    return outcome if isinstance(outcome, int) else 0


def _forget_the_zygote() -> None:
    set_wakeup_fd(-1)
    signal(SIGCHLD, SIG_DFL)
    gc.enable()  # the collector skips the frozen heap


def _take_descriptors(fds: list[int], inherited: list[int]) -> list[int]:
    """Renumber `fds` from 0 on: the first three become stdio, the others become close-on-exec.
    Close all other descriptors except `inherited`, which is in ascending order. Return the new
    numbers from 3 on."""
    # The copies lie above all sources and all targets: a dup2 to a target would close a source that
    # has its number.
    above = max(_FIRST_FD + len(fds), max(fds) + 1)
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for place, copy in enumerate(copies):
        os.dup2(copy, place, inheritable=place < _FIRST_FD)
    lowest = len(fds)
    for number in inherited:
        os.closerange(lowest, number)
        lowest = number + 1
    os.closerange(lowest, _LAST_FD)  # one close_range(2) call, whatever the range
    return list(range(_FIRST_FD, len(fds)))


def _own_group(pid: int) -> None:
    try:
        os.setpgid(pid, 0 if pid == 0 else pid)
    except (ProcessLookupError, PermissionError):
        # The child has ended, or has made its group itself and called execve(2) (EACCES).
        pass


assert STDIO_OF_JOB == _FIRST_FD + 1
