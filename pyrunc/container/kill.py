"""`kill`: sends a signal to a container's init, or to all processes in its cgroup.

If the container has no private pid namespace, SIGKILL goes to all its processes, because the end of
init would not end the others.
"""

from __future__ import annotations

from pyrunc.container import status
from pyrunc.errors import InvalidArgument, WrongState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.container.state import State

SIGKILL = 9
SIGRTMIN, SIGRTMAX = 34, 64
# signal(7), in the order of the numbers, which are the same on x86 and arm
_IN_ORDER = """
    0 HUP INT QUIT ILL TRAP ABRT,IOT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD,CLD
    CONT STOP TSTP TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO,POLL PWR SYS,UNUSED
"""
NAMES = {
    name: number for number, names in enumerate(_IN_ORDER.split()) for name in names.split(",")
}
# int() raises ValueError for more than 4300 digits.
NAME_LIMIT = 16
NOT_RUNNING = "container not running"


def parse_signal(text: str) -> int:
    """Convert `9`, `KILL`, `sigkill`, `RTMIN+1` to a number. Raises InvalidArgument."""
    name = text.upper().removeprefix("SIG")
    # isdigit() is true of digits that int() refuses
    if not name.isascii() or len(name) > NAME_LIMIT:
        number = -1
    elif name.isdigit():
        number = int(name)
    elif name.startswith("RTMIN") and (not name[5:] or (name[5] == "+" and name[6:].isdigit())):
        number = SIGRTMIN + int(name[6:] or 0)
    elif name.startswith("RTMAX") and (not name[5:] or (name[5] == "-" and name[6:].isdigit())):
        number = SIGRTMAX - int(name[6:] or 0)
    else:
        number = NAMES.get(name, -1)
    if not 0 <= number <= SIGRTMAX:
        raise InvalidArgument(f'unknown signal "{text}"')
    return number


def kill(state: State, signal: int, everything: bool = False) -> None:
    """Send `signal` to the container's init. With `everything`, send it to all processes in the
    container's cgroup. If the container has no private pid namespace, SIGKILL also goes to all
    these processes.

    Raises KernelError, and WrongState when no process is left that gets the signal (never with
    `everything`).
    """
    # In its own pid namespace the kernel kills the others with init (pid_namespaces(7)).
    if everything or (signal == SIGKILL and not state.private_pids):
        any_process = _signal_all(state, signal)
        if not any_process and not everything:
            raise WrongState(NOT_RUNNING)
        return
    if status.status(state) == status.STOPPED or not status.signal(state, signal):
        raise WrongState(NOT_RUNNING)


def _signal_all(state: State, signal: int) -> bool:
    group = state.group()
    pids = group.processes() if group is not None else []
    if signal == SIGKILL and group is not None:
        # cgroup.kill also reaches processes that are forked meanwhile. A list of pids would miss
        # them.
        group.kill()
    else:
        for pid in pids:
            assert group is not None
            group.send_signal(pid, signal)
    # Without a cgroup only init can be reached.
    return bool(pids) or status.signal(state, signal)
