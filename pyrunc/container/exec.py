"""`exec`: starts another process in a running container. The process is a child of the caller and
lives in the container's cgroup."""

from __future__ import annotations

from pyrunc.compile.descriptors import NamedDescriptors
from pyrunc.compile.exec import compile_exec
from pyrunc.container.process import ContainerProcess
from pyrunc.launch import run
from pyrunc.launch.enter import enter_steps
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pyrunc.compile.exec import ExecRequest
    from pyrunc.program.model import LoweredProgram


def execute(
    request: ExecRequest, store: Callable[[LoweredProgram, tuple[str, ...]], object] | None = None
) -> ContainerProcess:
    """Start the process in the running container; returns when the process has executed its
    command. Raises InvalidSpec, KernelError (with the plan's line), WrongState when the container
    has ended, and NotFound or InvalidArgument for a missing command.

    If a later exec can run the compiled program again, `store` is called with this program and the
    plan's warnings. It is not called if the exec has a terminal, if its plan contains steps for the
    parent process, or if the process had to be moved to another cgroup.
    """
    with Undo() as undo, NamedDescriptors() as descriptors:
        compiled = compile_exec(request, descriptors)
        launch = compiled.launch
        child, moved = run.drive(enter_steps(launch, undo))
        undo.commit()
    alone = not launch.lowered.steps and not request.process.terminal and not moved
    if store is not None and alone:
        store(launch.lowered, compiled.warnings)
    return ContainerProcess.of(child, compiled.warnings)
