"""Tests that a step is undone only after it has ended, even if the caller is cancelled or another
step fails while a thread executes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from cri_server.containers import checkpoint, update
from cri_server.sandboxes import checkpoint as pod_checkpoint
from cri_server.store.model import Container, ResolvedUser
from pyrunc.errors import DeadlineExceeded

PATIENCE_S = 10.0
A_WHILE_S = 0.2  # in which a task that does not wait would have continued


class Slow:
    """A function that blocks its thread until the test lets it return."""

    def __init__(self) -> None:
        self.begun, self._may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self._may_end.wait(PATIENCE_S)

    async def end_after(self, task: asyncio.Task[Any], what: Callable[[], object]) -> None:
        """Call `what` while the thread is in this function, then let `task` run for a while, and
        only then let the function return."""
        assert await asyncio.to_thread(self.begun.wait, PATIENCE_S)
        what()
        await asyncio.wait([task], timeout=A_WHILE_S)
        self._may_end.set()


def container(name: str) -> Container:
    container = Container(
        id=name,
        sandbox_id="p",
        config=api.ContainerConfig(),
        created_at_ns=1,
        boot_id="b",
        image_id="",
        image_ref="",
        image_name="",
        user=ResolvedUser(0, 0, ()),
        stop_signal="SIGTERM",
        log_path="",
        cgroups_path=f"/p/{name}",
        resources=api.LinuxContainerResources(),
    )
    container.started_at_ns = 1
    return container


async def test_a_limit_whose_caller_gave_up_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, written = Slow(), []
    before, changes = api.LinuxContainerResources(), api.LinuxContainerResources(cpu_shares=7)

    def write(
        work: update.UpdateContext, whole: object, changed: api.LinuxContainerResources
    ) -> None:
        if changed is changes:
            slow()
        written.append(changed.cpu_shares)

    monkeypatch.setattr(update, "_write", write)
    services: Any = None
    work = update.UpdateContext(services, container("c"), changes, changes, before)
    task = asyncio.create_task(update.STEPS.run(work))
    await slow.end_after(task, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert written == [7, 0]


async def test_no_container_of_a_pod_stays_frozen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """When freezing one container fails, another one, which a thread is still freezing, is
    thawed."""
    slow, done = Slow(), []

    class Group:
        def __init__(self, name: str) -> None:
            self._name = name

        def freeze(self) -> None:
            if self._name == "bad":
                raise DeadlineExceeded("it runs on")
            slow()
            done.append("frozen")

        def thaw(self) -> None:
            if self._name == "good":
                done.append("thawed")

    monkeypatch.setattr(checkpoint.groups, "place", lambda path, name: Group(name))
    monkeypatch.setattr(checkpoint, "require_running", lambda container: None)
    services: Any = SimpleNamespace(paths=SimpleNamespace(checkpoint_work=tmp_path.joinpath))
    sandbox: Any = None
    parts = [
        checkpoint.CheckpointContext(services, sandbox, container(name)) for name in ("bad", "good")
    ]
    job = pod_checkpoint.PodCheckpointContext(services, sandbox, parts, str(tmp_path))
    task = asyncio.create_task(pod_checkpoint._capture(job))
    await slow.end_after(task, lambda: None)
    with pytest.raises(DeadlineExceeded):
        await task
    assert done == ["frozen", "thawed"]
