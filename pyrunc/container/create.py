"""`create`: makes a container. Its process then waits for `start`. With `start_immediately` the
process executes the container's command instead.

The process is a child of the caller, which reaps it: the launcher clones it with CLONE_PARENT. If
`create` fails, nothing of the container is left.
"""

from __future__ import annotations

import time

from pyrunc.compile.container import compile_container
from pyrunc.compile.descriptors import NamedDescriptors
from pyrunc.container.process import ContainerProcess
from pyrunc.launch import run
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.compile.container import CompiledLaunch, CreateRequest


def create(request: CreateRequest) -> ContainerProcess:
    """Make the container. Raises InvalidSpec, KernelError (with the plan's line), NotFound for a
    missing command.

    On failure the start socket and the cgroup are removed again, and the process is killed and
    reaped.
    """
    with Undo() as undo, NamedDescriptors() as descriptors:
        compiled = compile_container(request, descriptors, undo)
        child = _launch(request, compiled, undo)
        undo.commit()
    return ContainerProcess.of(child, compiled.warnings, compiled.launch.cgroup)


def _launch(request: CreateRequest, compiled: CompiledLaunch, undo: Undo) -> run.ChildProcess:
    times: list[tuple[str, int]] | None = None if request.trace is None else []
    started_ns = time.time_ns()
    steps = run.first_process_steps(compiled.launch, undo, record=request.record, times=times)
    try:
        return run.drive(steps)
    finally:
        # In `finally`, because the times of a create that failed are needed most.
        if request.trace is not None and times is not None:
            request.trace(compiled.plan, started_ns, times)
