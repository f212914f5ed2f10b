"""Derives a container's status from its process, its freezer and its start socket.

The process is identified by its pid and its start time (field 22 of /proc/PID/stat), because the
kernel reuses pids. A zombie counts as stopped.
"""

from __future__ import annotations

import os

from pyrunc import debug
from pyrunc.container import state as states
from pyrunc.errors import WrongState
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.process import alive_since, open_pidfd, send_signal, wait_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.container.state import State

CREATING, CREATED, RUNNING, PAUSED, STOPPED = "creating", "created", "running", "paused", "stopped"


def status(state: State, locked: bool = False) -> str:
    """Return creating, created, running, paused or stopped. `locked`: the caller holds the
    container's lock.

    A running create holds the lock. A killed create does not, so its container counts as stopped.
    """
    # Init may live while create still waits for a hook, so a living init does not mean that the
    # container is created.
    if not state.complete:
        return CREATING if not locked and states.Lock.is_held(state) else STOPPED
    if not alive(state.pid, state.start_time):
        return STOPPED
    group = state.group()
    # Before the socket: a container can be paused before it is started.
    if group is not None and group.frozen():
        return PAUSED
    # `start` removes the socket before it releases the process.
    return CREATED if os.path.exists(f"{state.folder}/{states.START_SOCKET}") else RUNNING


def alive(pid: int, started: int) -> bool:
    """Return whether the process `pid` runs and has the start time `started` (clock ticks since
    boot). False for a zombie."""
    return pid > 0 and alive_since(pid) == started


def open_process(state: State) -> int | None:
    """Open a pidfd of the container's init; None when init is dead. The caller closes the pidfd."""
    return open_pidfd(state.pid, state.start_time) if state.pid > 0 else None


def signal(state: State, number: int) -> bool:
    """Send a signal to init; False when it is dead. Raises KernelError."""
    descriptor = open_process(state)
    if descriptor is None:
        return False
    debug.say("signal %d to process %d", number, state.pid)
    with closing_fd(descriptor):
        return send_signal(descriptor, number)


def wait_dead(state: State, timeout_s: float) -> bool:
    """Wait until init has ended (it may be a zombie then); False after `timeout_s` seconds."""
    descriptor = open_process(state)
    if descriptor is None:
        return True
    with closing_fd(descriptor):
        return wait_end(descriptor, timeout_s)


def require(state: State, allowed: tuple[str, ...], refusal: str) -> str:
    """Return the status if it is one of `allowed`. Otherwise raise WrongState with the text
    `refusal`, in which {status} is replaced by the present status. The caller must hold the
    container's lock."""
    current = status(state, locked=True)
    if current not in allowed:
        raise WrongState(refusal.replace("{status}", current))
    return current


def oci_state(state: State, status: str, pid: int | None = None) -> dict[str, Any]:
    """Build the state object of runtime-spec runtime.md, which hooks read on stdin. `pid`: init's
    pid as the hook sees it, by default `state.pid`. The object has no pid when `status` is stopped
    or the pid is 0."""
    document: dict[str, Any] = {"ociVersion": state.oci_version, "id": state.id, "status": status}
    number = state.pid if pid is None else pid
    if number and status != STOPPED:
        document["pid"] = number
    document["bundle"] = state.bundle
    if state.annotations:
        document["annotations"] = state.annotations
    return document


def report(state: State) -> dict[str, Any]:
    """Build the object that `pyrunc state` prints."""
    current = status(state)
    return {
        "ociVersion": state.oci_version,
        "id": state.id,
        "pid": 0 if current in (STOPPED, CREATING) else state.pid,
        "status": current,
        "bundle": state.bundle,
        "rootfs": state.rootfs,
        "created": state.created,
        "owner": states.owner_name(state.owner_uid),
        **({"annotations": state.annotations} if state.annotations else {}),
    }
