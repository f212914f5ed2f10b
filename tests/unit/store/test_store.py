"""Tests records, the index, deletion, operations that callers share, and journals of steps."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from cri_server.operations.locks import Gate, SingleFlight
from cri_server.operations.steps import Failpoints, InjectedError, Parallel, Step, Steps
from cri_server.store.facts import ProcessIdentity
from cri_server.store.index import StoreIndex
from cri_server.store.model import Container, Exit, ResolvedUser, Sandbox
from cri_server.store.records import ContainerRecord, SandboxRecord
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import AlreadyExists, NotFound
from pyrunc.kernel.process import alive_since


def sandbox(identifier: str = "a" * 64, **labels: str) -> Sandbox:
    config = api.PodSandboxConfig(
        metadata=api.PodSandboxMetadata(name=identifier, uid="u", namespace="n"), labels=labels
    )
    return Sandbox(
        identifier,
        config,
        "",
        1,
        "boot",
        "/p",
        "/p/x",
        pause=ProcessIdentity(1, 2),
        ips=["10.0.0.1"],
    )


def container(identifier: str, owner: Sandbox, **labels: str) -> Container:
    config = api.ContainerConfig(metadata=api.ContainerMetadata(name=identifier), labels=labels)
    return Container(
        identifier,
        owner.id,
        config,
        5,
        "boot",
        "sha256:i",
        "ref",
        "name",
        ResolvedUser(1, 2, (2, 3), "/h"),
        "SIGTERM",
        "/log",
        "/p/c",
        api.LinuxContainerResources(cpu_shares=7),
    )


def test_records_survive_the_disk() -> None:
    one = sandbox()
    two = container("b" * 64, one, k="v")
    written = json.loads(json.dumps(one.to_record().to_fields()))
    assert (
        written["holder"] == {"pid": 1, "start_time": 2}
        and written["shim"] is None
        and written["selinux"] == ["", ""]
    )
    assert Sandbox.from_record(SandboxRecord.of(written)).to_record().to_fields() == written
    written = json.loads(json.dumps(two.to_record().to_fields()))
    assert written["user"] == [1, 2, [2, 3], "/h"]
    again = Container.from_record(ContainerRecord.of(written))
    assert (
        again.to_record().to_fields() == written
        and again.user == two.user
        and again.config == two.config
    )


@pytest.mark.parametrize(
    "change",
    [
        {"config": "!!"},
        {"config": 5},
        {"id": None},
        {"ips": 3},
        {"holder": {"pid": 1}},
        {"selinux": ["a"] * 3},
    ],
)
def test_damaged_records_are_told_apart(change: dict[str, Any]) -> None:
    record = {**sandbox().to_record().to_fields(), **change}
    if change.get("id", "") is None:
        del record["id"]
    with pytest.raises(DamagedRecord):
        Sandbox.from_record(SandboxRecord.of(record, DamagedRecord))


def test_states_follow_from_facts() -> None:
    pod = sandbox()
    assert pod.state == api.SANDBOX_NOTREADY
    pod.pause_alive = True
    assert pod.state == api.SANDBOX_READY
    pod.phase = "stopping"
    assert pod.state == api.SANDBOX_NOTREADY
    one = container("c" * 64, pod)
    assert one.state == api.CONTAINER_CREATED
    one.started_at_ns = 9
    assert one.running
    one.lost = True
    assert one.state == api.CONTAINER_UNKNOWN
    one.set_exit(Exit(1, None, 10))
    one.set_exit(Exit(2, None, 11))
    assert one.state == api.CONTAINER_EXITED and one.exit == Exit(1, None, 10)


@pytest.mark.parametrize(
    ("ended", "word"),
    [
        (Exit(0, None, 1), "Completed"),
        (Exit(3, None, 1), "Error"),
        (Exit(137, None, 1, oom_killed=True), "OOMKilled"),
        (Exit(128, None, 1, reason="StartError"), "StartError"),
    ],
)
def test_exits_have_cris_reasons(ended: Exit, word: str) -> None:
    assert ended.cri_reason == word


@pytest.mark.requirement("1.9")
def test_objects_are_found_by_prefix_and_filter() -> None:
    index = StoreIndex()
    first, second = sandbox("ab" + "0" * 62, app="x"), sandbox("ac" + "0" * 62, app="y")
    index.sandboxes.add(first), index.sandboxes.add(second)
    assert index.sandboxes.find("ab") is first and index.sandboxes.find("a") is None
    assert index.sandboxes.find("") is None and index.sandboxes.find("zz") is None
    with pytest.raises(NotFound):
        index.sandboxes.get("a")
    one = container("d" * 64, first, k="v")
    index.containers.add(one)
    assert index.select_containers(sandbox="ab", labels={"k": "v"}) == [one]
    assert index.select_containers(sandbox="ac") == index.select_containers(sandbox="zz") == []
    assert index.select_sandboxes(labels={"app": "y"}) == [second]
    assert index.users_of("sha256:i") == [one.id]
    index.sandboxes.remove(first), index.sandboxes.remove(first)
    assert index.sandboxes.find("ab") is None and index.sandboxes.find_by_name(first.name) is None


def test_a_process_is_known_by_its_start() -> None:
    started = alive_since(os.getpid())
    assert started is not None
    assert (
        ProcessIdentity(os.getpid(), started).alive()
        and not ProcessIdentity(os.getpid(), started + 1).alive()
    )
    assert alive_since(2**22 + 1) is None


async def test_equal_calls_join_and_outlive_their_callers() -> None:
    joined, runs, end = SingleFlight(), [], asyncio.Event()

    async def work() -> int:
        runs.append(1)
        await end.wait()
        return 7

    async def begun(count: int) -> None:
        async with asyncio.timeout(30):
            while len(runs) < count:
                await asyncio.sleep(0)

    caller = asyncio.create_task(joined.join("k", work))
    await begun(1)
    assert joined.seconds_without_caller("k") == 0
    caller.cancel()
    await asyncio.wait([caller])
    assert joined.seconds_without_caller("k") > 0
    callers = asyncio.gather(*(joined.join("k", work) for _ in range(20)))
    await asyncio.sleep(0)
    assert joined.seconds_without_caller("k") == 0
    end.set()
    assert await callers == [7] * 20
    assert joined.seconds_without_caller("k") == 0
    assert runs == [1] and "k" not in joined
    end.clear()
    first = asyncio.create_task(joined.join("k", work, request="a"))
    await begun(2)
    with pytest.raises(AlreadyExists):
        await joined.join("k", work, request="b")
    end.set()
    assert await joined.join("k", work, request="a") == await first == 7 and runs == [1, 1]


async def test_a_gate_waits_for_all_users_to_leave() -> None:
    gate = Gate()
    await gate.empty()
    with gate, gate, pytest.raises(TimeoutError):
        await asyncio.wait_for(gate.empty(), 0.01)
    await gate.empty()


async def test_steps_are_undone_in_reverse_and_failures_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Steps, "registered", {})
    seen: list[str] = []

    def step(name: str, *, fails: bool = False, undo_fails: bool = False) -> Step[list[str]]:
        async def do(work: list[str]) -> None:
            work.append(f"do {name}")
            if fails:
                raise NotFound(name)

        async def undo(work: list[str]) -> None:
            work.append(f"undo {name}")
            if undo_fails:
                raise OSError("stuck")

        return Step(name, do, undo)

    async def stuck(work: list[str]) -> None:
        work.append("stuck")

    steps = Steps(
        "verb",
        [step("a"), step("b", undo_fails=True), step("c", fails=True), step("d")],
        stuck=stuck,
    )
    with pytest.raises(NotFound) as caught:
        await steps.run(seen)
    assert seen == ["do a", "do b", "do c", "undo c", "undo b", "undo a", "stuck"]
    assert caught.value.__notes__ == ["undo of b failed: stuck"]
    assert Steps.points() == ["verb.a", "verb.b", "verb.c", "verb.d"]
    with pytest.raises(ValueError, match="twice"):
        Steps("verb", [])


async def test_steps_beside_each_other_are_all_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "registered", {})
    other_has_begun, never = asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    async def fail(work: list[str]) -> None:
        await other_has_begun.wait()
        raise NotFound("left")

    async def wait(work: list[str]) -> None:
        other_has_begun.set()
        try:
            await never.wait()
        except asyncio.CancelledError:
            work.append("cancelled")
            raise

    async def arrive(work: list[str]) -> None:
        await other_has_begun.wait()
        work.append("done")

    def undo(name: str) -> Callable[[list[str]], Awaitable[None]]:
        async def take_back(work: list[str]) -> None:
            work.append(f"undo {name}")

        return take_back

    left, right = Step("left", fail, undo("left")), Step("right", wait, undo("right"))
    failing = Steps("failing", [Parallel((left, right)), Step("last", wait, undo("last"))])
    with pytest.raises(NotFound):
        await failing.run(seen)
    assert seen == ["cancelled", "undo right", "undo left"]
    assert Steps.points() == ["failing.left", "failing.right", "failing.last"]

    other_has_begun.clear()
    seen.clear()
    running = asyncio.create_task(
        Steps("stopped", [Parallel((Step("left", wait, undo("left")), right))]).run(seen)
    )
    await other_has_begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert seen == ["cancelled", "cancelled", "undo right", "undo left"]

    other_has_begun.clear()
    seen.clear()
    order = Parallel(
        (Step("left", arrive), Step("right", lambda work: opened(work, other_has_begun))),
        lambda work: ("right", "left"),
    )
    await Steps("ordered", [order]).run(seen)
    assert seen == ["opened", "done"]


async def opened(work: list[str], event: asyncio.Event) -> None:
    work.append("opened")
    event.set()


async def test_failpoints_raise_and_delay() -> None:
    points = Failpoints.parse("a.b=2*error,c.d=delay(1)")
    for _ in range(2):
        with pytest.raises(InjectedError):
            await points.reached("a.b")
    await points.reached("a.b")
    await points.reached("c.d")
    await points.reached("other")
    with pytest.raises(ValueError):
        Failpoints.parse("a.b=explode")
