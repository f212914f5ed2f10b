"""StartContainer: has the shim carry out the container's launch, and returns when the container's
command has been executed (execve)."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
from dataclasses import dataclass

from cri_server.api import api_pb2 as api
from cri_server.containers import launch
from cri_server.containers.create import target_pid
from cri_server.observability import events
from cri_server.operations.steps import Step, Steps
from cri_server.services import Services
from cri_server.spec import pod_files, sources
from cri_server.status import sandbox as status
from cri_server.store.model import Container, Exit, Sandbox
from pyrunc.errors import Error, InvalidArgument, KernelError, NotFound, WrongState
from pyrunc.kernel.tree import remove_path

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StartContext:
    """A container that is being started."""

    services: Services
    sandbox: Sandbox
    container: Container


async def start(services: Services, reference: str) -> None:
    """Start a container, which is then RUNNING. Raises NotFound, WrongState, and the error of a
    step that failed.

    If the launch failed, the container is EXITED with code 128 and reason StartError. If an earlier
    step failed, such as making the log folder or asking an NRI plugin, the container stays CREATED.
    A second call after a successful start raises WrongState, even if the first reply was lost;
    kubelet then creates a new container.
    """
    container = services.index.containers.get(reference)
    await services.running.join(("start", container.id), lambda: _start(services, container))


async def _start(services: Services, container: Container) -> None:
    sandbox = services.index.sandboxes.get(container.sandbox_id)
    container.starting = True
    try:
        await _start_once(services, sandbox, container)
        status.publish(services, sandbox, container.id, events.STARTED)
        await services.observer.started_container(sandbox, container)
    finally:
        container.starting = False
        if container.exit is not None:
            status.publish(services, sandbox, container.id, events.STOPPED)
            services.observer.container_ended(container)


async def _start_once(services: Services, sandbox: Sandbox, container: Container) -> None:
    with sandbox.gate:
        async with container.lock:
            if (
                container.state != api.CONTAINER_CREATED
                or ("remove", container.id) in services.running
            ):
                state = api.ContainerState.Name(container.state)  # type: ignore[arg-type]
                raise WrongState(f"container {container.id} is {state}, not CONTAINER_CREATED")
            if sandbox.state != api.SANDBOX_READY:
                raise WrongState(f"sandbox {sandbox.id} is not ready")
            await STEPS.run(StartContext(services, sandbox, container))


async def check_target(context: StartContext) -> None:
    options = context.container.config.linux.security_context.namespace_options
    if options.pid == api.TARGET:
        target_pid(context.services, context.sandbox, options)


async def notify_plugins(context: StartContext) -> None:
    await context.services.observer.start_container(context.sandbox, context.container)


async def make_log_folder(context: StartContext) -> None:
    """Make the pod's log folder. The shim makes the folders below it; it follows no symlinks."""
    if context.container.log_path:
        timeout_s = context.services.config.containers.foreign_path_timeout_s
        folder = context.sandbox.config.log_directory
        await sources.run_with_deadline(timeout_s, folder, pod_files.make_log_directory, folder)


async def execute(context: StartContext) -> None:
    container, pod = context.container, context.services.pod(context.sandbox)
    try:
        await launch.ensure(context.services, context.sandbox, container)
        await pod.start(container)
    except Error as error:
        # The error may come from the loss of the shim; the shim that takes over may know the exit,
        # or have taken over the container's process.
        await pod.wait_taken_over()
        if not container.running:
            if container.exit is None:
                container.set_exit(Exit.of_failed_start(error.message))
            # NotFound: the container's command is missing. kubelet would take it for a missing
            # container.
            if (
                isinstance(error, NotFound)
                or pod_files.is_bad_log_path(error)
                or is_bad_path(error)
            ):
                raise InvalidArgument(error.message) from None
            raise
        log.warning(
            "container %s is running, but its start reported an error: %s", container.id, error
        )
    checkpoint = context.services.paths.restore_folder(container.id)
    if checkpoint.exists():
        await asyncio.to_thread(remove_path, checkpoint)


def is_bad_path(error: Error) -> bool:
    """Return whether a start failed because of a path in the image. The path of the working
    directory, of a mount or of a device may be too long, lead to a file of the wrong kind, or have
    a loop of symlinks."""
    if not isinstance(error, KernelError) or error.call not in (
        "mkdir",
        "chdir",
        "mknod",
        "attach",
    ):
        return False
    return error.errno in (
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    )


async def end(context: StartContext) -> None:
    """Undo the container's start because a later step failed: kill its process with SIGKILL."""
    if context.container.running:
        await context.services.pod(context.sandbox).kill(context.container, signal.SIGKILL)


STEPS: Steps[StartContext] = Steps(
    "start_container",
    [
        Step("target", check_target),
        Step("log", make_log_folder),
        Step("nri", notify_plugins),
        Step("execute", execute, end),
    ],
)
