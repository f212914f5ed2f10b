"""Cleans up after a shim that has died or dropped a pod: waits until the shim's child processes for
this pod have ended, reads the files that the shim has written, kills the containers and removes
their cgroups."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import time

from cri_server.spec import groups
from cri_server.store.facts import ProcessIdentity
from cri_server.store.model import Container, Exit
from cri_server.store.paths import Paths
from pyrunc import atomic_file
from pyrunc.atomic_file import DamagedRecord
from pyrunc.cgroups.group import Cgroup
from pyrunc.container.state import State
from pyrunc.errors import Error, NotFound
from pyrunc.kernel.fd import closing_fd
from pyrunc.shim import messages

log = logging.getLogger(__name__)

FORKS_TIMEOUT_S, FORKS_INTERVAL_S = 10.0, 0.005


async def wait_for_forks(paths: Paths, sandbox_id: str) -> None:
    """Wait until the sandbox's shim and the helpers that it has forked have ended. Each of them
    holds a lock on a file in the sandbox's folder: shim.lock, or up to version 0.1.0 the shim's
    log. After `FORKS_TIMEOUT_S` log an error and return.

    The kernel kills the helpers when the shim dies, but not at the same moment. Without this wait a
    helper could make a cgroup after the caller has removed the cgroups.
    """
    for name in (messages.LOCK, messages.LOG):
        try:
            lock = os.open(paths.sandbox_state(sandbox_id) / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        with closing_fd(lock):
            await _wait_for_lock(lock, sandbox_id)


async def _wait_for_lock(lock: int, sandbox_id: str) -> None:
    deadline = time.monotonic() + FORKS_TIMEOUT_S
    while not _locked(lock):
        if time.monotonic() > deadline:
            log.error("sandbox %s: child processes of its shim do not end", sandbox_id)
            return
        await asyncio.sleep(FORKS_INTERVAL_S)


def read_records(paths: Paths, container: Container) -> None:
    """Set the exit, process and start time of `container` from the files that the shim has written
    into the container's folder. Missing files change nothing; a damaged exit.json counts as an exit
    with reason Unknown."""
    folder = paths.container_state(container.id)
    try:
        record = atomic_file.read_json(str(folder / messages.EXIT_RECORD))
        container.set_exit(Exit.of(record, DamagedRecord))
    except NotFound:
        pass
    except Error as error:
        log.error("container %s: cannot read its exit record: %s", container.id, error)
        # The exit was written, so the container has ended, even if exit.json cannot be read.
        container.set_exit(Exit.unknown(time.time_ns(), error.message))
    try:
        state = State.read(folder)
    except Error:
        return
    container.process = ProcessIdentity(state.pid, state.start_time) if state.pid else None
    container.started_at_ns = container.started_at_ns or state.started_at_ns or 0


async def end_container(paths: Paths, container: Container) -> None:
    """Kill the container. Set its exit, with reason Unknown, and write it to exit.json. A failed
    write is logged."""
    if container.process is not None:
        kill_process(container.process)
    await kill_group(container.cgroups_path, container.id)
    ended = Exit.unknown(time.time_ns(), f"{messages.LOST_CODE}; the container was killed")
    path = paths.container_state(container.id) / messages.EXIT_RECORD
    try:
        atomic_file.write_json(str(path), ended.to_fields())
    except OSError as error:
        log.error("container %s: cannot write %s: %s", container.id, path, error)
    container.set_exit(ended)


def was_started(container: Container) -> bool:
    """Return whether the container may have been started, although its shim has left no file that
    says so. True if the server had requested the start, or if the container's cgroup contains
    processes."""
    return container.start_sent or groups.place(container.cgroups_path, container.id).populated()


async def kill_group(cgroups_path: str, identifier: str) -> None:
    """Kill all processes of a cgroup and remove it; failures are logged."""
    if not cgroups_path:
        return
    try:
        group = groups.place(cgroups_path, identifier)
        if group.exists():
            await asyncio.to_thread(_kill_and_remove, group)
    except (Error, OSError) as error:
        log.warning("cannot kill and remove cgroup %s: %s", cgroups_path, error)


def _kill_and_remove(group: Cgroup) -> None:
    group.kill()
    group.remove()


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def kill_process(process: ProcessIdentity) -> None:
    """Send SIGKILL to the process through a pidfd. Does nothing when the process has ended."""
    send_signal(process, signal.SIGKILL)


def send_signal(process: ProcessIdentity, number: int) -> None:
    """Send a signal to the process through a pidfd, after a check of its start time, so that
    another process with the same pid never gets the signal. Does nothing when the process has
    ended."""
    try:
        with closing_fd(os.pidfd_open(process.pid)) as descriptor:
            if process.alive():
                signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        pass
