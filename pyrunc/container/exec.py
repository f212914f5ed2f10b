"""`exec`: starts another process in a running container. It is a child of the caller and lives in
the container's cgroup."""

from __future__ import annotations

from pyrunc.compile.descriptors import NamedDescriptors
from pyrunc.compile.exec import compile_exec
from pyrunc.launch import run
from pyrunc.launch.enter import entering
from pyrunc.spec.value import Value
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pyrunc.compile.exec import ExecRequest
    from pyrunc.program.model import LoweredProgram


class Executed(Value):
    """An exec's process. The caller closes the descriptors."""

    pid: int
    pidfd: int
    start_time: int
    console_fd: int | None
    warnings: tuple[str, ...] = ()


def execute(
    request: ExecRequest, store: Callable[[LoweredProgram, tuple[str, ...]], object] | None = None
) -> Executed:
    """Run the process; returns when its program was executed. Raises like `create`, WrongState for
    a dead container.

    `store` gets the program and its warnings if it ran without a step of its parent, so that it can
    be used again.
    """
    with Undo() as undo, NamedDescriptors() as descriptors:
        compiled = compile_exec(request, descriptors)
        launch = compiled.launch
        child, moved = run.drive(entering(launch, undo))
        undo.commit()
    alone = not launch.lowered.steps and not request.process.terminal and not moved
    if store is not None and alone:
        store(launch.lowered, compiled.warnings)
    return Executed(child.pid, child.pidfd, child.start_time, child.console_fd, compiled.warnings)
