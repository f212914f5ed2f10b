"""`pause` and `resume`: freeze and thaw all processes of a container with the cgroup freezer."""

from __future__ import annotations

from pyrunc.container import status
from pyrunc.errors import WrongState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.container.state import State


def pause(state: State) -> None:
    """Freeze a running or created container. Raises WrongState, DeadlineExceeded, KernelError."""
    status.require(
        state, (status.RUNNING, status.CREATED), "container not running or created: {status}"
    )
    group = state.group()
    if group is None:
        raise WrongState(f"container {state.id} has no cgroup: it cannot be paused")
    group.freeze()


def resume(state: State) -> None:
    """Thaw a paused container. Raises WrongState, KernelError."""
    status.require(state, (status.PAUSED,), "container not paused: {status}")
    group = state.group()
    if group is None:
        raise WrongState("container not paused")
    group.thaw()
