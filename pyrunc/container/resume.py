"""`resume`: lets a paused container run on."""

from __future__ import annotations

from pyrunc.container import status
from pyrunc.errors import WrongState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.container.state import State


def resume(state: State) -> None:
    """Thaw a paused container. Raises WrongState, KernelError."""
    status.require(state, (status.PAUSED,), "container not paused: {status}")
    group = state.group()
    if group is None:
        raise WrongState("container not paused")
    group.thaw()
