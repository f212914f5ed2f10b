"""`exec`: another process enters a container that runs. It is a child of the caller and lives in
the container's cgroup."""

from __future__ import annotations

from pyrunc.compile.descriptors import Descriptors
from pyrunc.compile.exec import compile_exec
from pyrunc.launch import run
from pyrunc.launch.enter import entering
from pyrunc.spec.value import Value
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pyrunc.compile.exec import ExecRequest
    from pyrunc.launch.model import Lowered


class Executed(Value):
    """The process. The descriptors are the caller's now."""

    pid: int
    pidfd: int
    start_time: int
    console_fd: int | None
    warnings: tuple[str, ...] = ()


def execute(
    request: ExecRequest, keep: Callable[[Lowered, tuple[str, ...]], object] | None = None
) -> Executed:
    """Run the process; returns when its program was executed. Raises like `create`, WrongState for
    a dead container.

    `keep` gets the program and its warnings when it did its work alone, without a step of its
    parent.
    """
    with Undo() as undo, Descriptors() as descriptors:
        compiled = compile_exec(request, descriptors)
        launch = compiled.launch
        child, moved = run.drive(entering(launch, undo))
        undo.commit()
    alone = not launch.lowered.steps and not request.process.terminal and not moved
    if keep is not None and alone:
        keep(launch.lowered, compiled.warnings)
    return Executed(child.pid, child.pidfd, child.start_time, child.console_fd, compiled.warnings)
