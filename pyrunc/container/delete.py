"""`delete`: kills a container's processes, removes its cgroup, resctrl groups and files, and runs
the poststop hooks. Only what `create` made is removed.

The files are removed last, so that a killed `delete` can be repeated. A container whose create was
killed is deleted in the same way.
"""

from __future__ import annotations

from pyrunc import debug
from pyrunc.container import state as states
from pyrunc.container import status
from pyrunc.errors import DeadlineExceeded, Error, WrongState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from pyrunc.container.state import State
    from pyrunc.spec.model import Hook

SIGKILL = 9
KILL_TIMEOUT_S = 10.0


def delete(state: State, force: bool = False) -> list[str]:
    """Delete a stopped or created container; with `force` also a running or paused one. Returns
    warnings.

    Raises NotFound (another command has deleted it), WrongState (the container runs),
    DeadlineExceeded (a process cannot be killed), KernelError.
    """
    with states.Lock(state) as current:
        _refuse_if_alive(current, force)
        return destroy(current)


def _refuse_if_alive(state: State, force: bool) -> None:
    current = status.status(state, locked=True)
    # A created container may be deleted, as with runc, although its process lives.
    if current in (status.RUNNING, status.PAUSED) and not force:
        raise WrongState(f"cannot delete container {state.id} that is not stopped: {current}")


def destroy(state: State) -> list[str]:
    """Kill the container's processes, remove its cgroup and files, and run the poststop hooks.
    Returns a warning for each hook that fails."""
    config = _config(state)
    hooks = _poststop_hooks(config)
    # Kill init first, because there may be no group, and wait for its end: the group's directory
    # cannot be removed while a process is in it.
    _kill(state)
    group = state.group()
    if group is not None:
        group.kill()
        group.remove()
        debug.say("removed cgroup %s", group.path)
    _leave_rdt(state.id, config)
    # The files come last, so that a delete that is killed can be repeated.
    states.remove(state.folder)
    debug.say("removed %s", state.folder)
    if not hooks:
        return []
    from pyrunc.launch import hooks as programs

    # config.md, "Poststop": after the container is deleted, before the command returns; a failure
    # is only a warning.
    return programs.run_all(hooks, "poststop", status.oci_state(state, status.STOPPED))


def leave_rdt(state: State) -> None:
    """Remove the resctrl groups that only this container uses. Raises KernelError."""
    _leave_rdt(state.id, _config(state))


def _leave_rdt(container_id: str, config: dict[str, Any]) -> None:
    settings = (config.get("linux") or {}).get("intelRdt")
    if settings:
        from pyrunc.launch import rdt

        rdt.leave_mounted(settings, container_id)


def _config(state: State) -> dict[str, Any]:
    """Return the container's stored configuration; empty when a killed create has not written it,
    or when it cannot be read."""
    try:
        # `delete` must work without the configuration: it also removes what a killed create or a
        # full disk has left.
        return state.config()
    except (Error, ValueError):
        return {}


def _kill(state: State) -> None:
    if status.signal(state, SIGKILL) and not status.wait_dead(state, KILL_TIMEOUT_S):
        raise DeadlineExceeded(
            f"container init {state.pid} did not die within {KILL_TIMEOUT_S:g} s of SIGKILL"
        )


def _poststop_hooks(config: dict[str, Any]) -> Sequence[Hook]:
    if not (config.get("hooks") or {}).get("poststop"):
        return ()
    from pyrunc.spec.parse import parse

    return parse(config).hooks.poststop
