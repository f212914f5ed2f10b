"""Starts a pod's pause process as a child of the test."""

from __future__ import annotations

import os

from pyrunc.compile.descriptors import NamedDescriptors
from pyrunc.compile.pause import compile_pause
from pyrunc.launch import run
from pyrunc.spec.value import Value
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.compile.requests import PauseRequest


class PauseProcess(Value):
    """A running pause process. The caller closes `pidfd`."""

    pid: int
    pidfd: int
    start_time: int
    cgroup: Cgroup | None
    warnings: tuple[str, ...]


def hold(
    identifier: str,
    request: PauseRequest,
    *,
    mounts: Mapping[str, int] | None = None,
    stdio: tuple[int, int, int] | None = None,
) -> PauseProcess:
    """Start the pause process that holds a pod's namespaces. Without `stdio` it gets a new null
    device."""
    with Undo() as undo, NamedDescriptors() as descriptors:
        compiled = compile_pause(identifier, request, descriptors, undo, mounts=mounts or {})
        if stdio is None:
            null = descriptors.take("stdio", os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
            stdio = (null, null, null)
        launch = compiled.launch.replace(stdio=stdio)
        child = run.drive(run.first_process_steps(launch, undo))
        undo.commit()
    return PauseProcess(child.pid, child.pidfd, child.start_time, launch.cgroup, compiled.warnings)
