"""What a container is doing, derived each time from facts: its process, its freezer, its start
socket.

A pid alone proves nothing, it may be somebody else's by now: the start time (field 22 of
/proc/PID/stat) tells. A zombie is stopped: it waits for its parent only.
"""

from __future__ import annotations

import os
import select

from pyrunc import debug
from pyrunc.container import state as states
from pyrunc.errors import WrongState
from pyrunc.kernel.process import alive_since, open_pidfd, send_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.container.state import State

CREATING, CREATED, RUNNING, PAUSED, STOPPED = "creating", "created", "running", "paused", "stopped"


def status(state: State, locked: bool = False) -> str:
    """One of creating, created, running, paused, stopped. `locked`: the caller holds the
    container's lock.

    A create that is on its way holds the lock; one that was killed does not, and its container
    counts as stopped.
    """
    if not state.complete:
        return CREATING if not locked and states.Lock.is_held(state) else STOPPED
    if not alive(state.pid, state.start_time):
        return STOPPED
    group = state.cgroup()
    if group is not None and group.frozen():
        return PAUSED
    return CREATED if os.path.exists(state.start_socket) else RUNNING


def alive(pid: int, started: int) -> bool:
    """Whether the process `pid` is the one that started then, and lives."""
    return pid > 0 and alive_since(pid) == started


def open_process(state: State) -> int | None:
    """A pidfd of the container's init; None when it is dead. The caller closes it."""
    return open_pidfd(state.pid, state.start_time) if state.pid > 0 else None


def signal(state: State, number: int) -> bool:
    """Send a signal to init; False when it is dead. Raises KernelError."""
    descriptor = open_process(state)
    if descriptor is None:
        return False
    debug.say("signal %d to process %d", number, state.pid)
    try:
        return send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def wait_dead(state: State, timeout_s: float) -> bool:
    """Wait until init has ended (it may be a zombie then); False when the time is up first."""
    descriptor = open_process(state)
    if descriptor is None:
        return True
    try:
        waiter = select.poll()
        waiter.register(descriptor, select.POLLIN)
        return bool(waiter.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


def require(state: State, allowed: tuple[str, ...], refusal: str) -> str:
    """The status, when it is one of `allowed`; the caller holds the lock.

    Raises WrongState with `refusal`, where {status} stands for what it is.
    """
    found = status(state, locked=True)
    if found not in allowed:
        raise WrongState(refusal.replace("{status}", found))
    return found


def oci_state(state: State, status: str, pid: int | None = None) -> dict[str, Any]:
    """The state object of runtime-spec runtime.md: what hooks read on stdin. `pid` as the reader
    sees it."""
    found: dict[str, Any] = {"ociVersion": state.oci_version, "id": state.id, "status": status}
    number = state.pid if pid is None else pid
    if number and status != STOPPED:
        found["pid"] = number
    found["bundle"] = state.bundle
    if state.annotations:
        found["annotations"] = state.annotations
    return found


def report(state: State) -> dict[str, Any]:
    """What `pyrunc state` prints."""
    found = status(state)
    return {
        "ociVersion": state.oci_version,
        "id": state.id,
        "pid": 0 if found in (STOPPED, CREATING) else state.pid,
        "status": found,
        "bundle": state.bundle,
        "rootfs": state.rootfs,
        "created": state.created,
        "owner": states.owner_name(state.owner_uid),
        **({"annotations": state.annotations} if state.annotations else {}),
    }
