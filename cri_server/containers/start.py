"""StartContainer: the shim carries the launch out; the call returns when the process has been
executed, or says why it was not."""

from __future__ import annotations

import errno
import signal
import time
from dataclasses import dataclass

from cri_server.api import api_pb2 as api
from cri_server.containers import launch, restore
from cri_server.containers.create import target_pid
from cri_server.observability import events
from cri_server.observability.timeline.trace import graft
from cri_server.operations.steps import Step, Steps
from cri_server.services import Services
from cri_server.spec import pod_files, sources
from cri_server.status import sandbox as status
from cri_server.store.facts import Process
from cri_server.store.model import Container, Exit, Sandbox
from pyrunc.errors import Error, InvalidArgument, KernelError, NotFound, WrongState

START_ERROR, START_ERROR_CODE = "StartError", 128


@dataclass(slots=True)
class Work:
    """A container that is being started."""

    services: Services
    sandbox: Sandbox
    container: Container


async def start(services: Services, reference: str) -> None:
    """CREATED -> RUNNING, or EXITED with code 128 and reason StartError, and the error.

    A repetition of a start that succeeded while its caller had hung up is an error like any other
    (kubelet recreates). Raises NotFound, WrongState.
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
            await STEPS.run(Work(services, sandbox, container))


async def check_target(work: Work) -> None:
    options = work.container.config.linux.security_context.namespace_options
    if options.pid == api.TARGET:
        target_pid(work.services, work.sandbox, options)


async def tell_plugins(work: Work) -> None:
    await work.services.observer.start_container(work.sandbox, work.container)


async def make_log_folder(work: Work) -> None:
    """The pod's; what is below it is made by the shim, which follows no link there."""
    if work.container.log_path:
        timeout_s = work.services.config.containers.foreign_path_timeout_s
        folder = work.sandbox.config.log_directory
        await sources.in_time(timeout_s, folder, pod_files.make_log_directory, folder)


async def execute(work: Work) -> None:
    container = work.container
    try:
        await launch.ensure(work.services, work.sandbox, container)
        container.created_in = None
        started = await work.services.shims.get(work.sandbox).start_container(container.id)
        graft(started.parts)
    except Error as error:
        await work.services.shims.drain(work.sandbox)
        if container.exit is None:
            message = error.message
            container.ended(
                Exit(START_ERROR_CODE, time.time_ns(), reason=START_ERROR, message=message)
            )
        # NotFound is about the program, not about the container.
        if isinstance(error, NotFound) or pod_files.is_bad_log_path(error) or is_bad_place(error):
            raise InvalidArgument(error.message) from None
        raise
    container.process = Process(started.pid, started.start_time)
    container.started_at_ns = started.started_at_ns
    if work.services.paths.restore_folder(container.id).exists():
        await restore.forget(work.services, container.id)


def is_bad_place(error: Error) -> bool:
    """Whether a start failed because the image has a file, or a loop of links, on the way to the
    working directory, a mount's place or a device: what is asked for cannot be there."""
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


async def end(work: Work) -> None:
    """It runs, but the start failed afterwards."""
    if work.container.running:
        await work.services.shims.get(work.sandbox).stop(work.container.id, signal.SIGKILL, 0.0)


STEPS: Steps[Work] = Steps(
    "start_container",
    [
        Step("target", check_target),
        Step("log", make_log_folder),
        Step("nri", tell_plugins),
        Step("execute", execute, end),
    ],
)
