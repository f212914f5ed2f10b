"""Tests a shim that may open no more descriptors: each call succeeds or fails as a whole, and no
failure leaks a descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from pyrunc.errors import Error
from pyrunc.shim import messages
from tests.kernel.shim.pod import TestPod, gone, until
from tests.kernel.shim.test_containers import describe


@pytest_asyncio.fixture
async def pod(tmp_path: Path) -> AsyncIterator[TestPod]:
    async with TestPod(tmp_path / "pod", library=True) as test_pod:
        yield test_pod


MOST_FREE = 60  # more descriptors than a start opens


def descriptors(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


@contextlib.contextmanager
def few_descriptors(pid: int, free: int) -> Iterator[None]:
    """Let the process open only `free` further descriptors."""
    used, limit = descriptors(pid), 0
    while free > 0 or limit in used:
        free -= limit not in used
        limit += 1
    unlimited = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, unlimited[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, unlimited)


async def no_more_descriptors(pod: TestPod, before: set[int]) -> None:
    with contextlib.suppress(AssertionError):
        await until(lambda: not _further(pod, before), 5)
    assert not _further(pod, before)


def _further(pod: TestPod, before: set[int]) -> list[str]:
    """Return the files that are open in addition to `before`, without those that the shim keeps."""
    links = []
    for number in descriptors(pod.pid) - before:
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/{pod.pid}/fd/{number}"))
    closed = len(before - descriptors(pod.pid))
    kept = ("anon_inode:bpf-prog", "/memfd:pyrunc:pause")
    return [link for link in links if not link.startswith(kept)][closed:]


@pytest.mark.parametrize("tty", [False, True])
async def test_a_start_without_descriptors_leaves_nothing(pod: TestPod, tty: bool) -> None:
    started = 0
    for free in range(MOST_FREE):
        name = f"c{free}"
        await pod.client.state()
        before = descriptors(pod.pid)
        pod.container(name, "exec sleep 1000", tty=tty, stdin=True)
        try:
            await pod.client.create_container(messages.CreateContainer(name))
            with few_descriptors(pod.pid, free):
                async with asyncio.timeout(10):
                    process = await pod.client.start_container(name)
        except Error as error:
            print(free, error)
            await until(lambda name=name: not pod.cgroup(name).exists())
            (state,) = [one for one in (await pod.client.state()).containers if one.id == name]
            assert state.exit is not None and not state.running
        else:
            started += 1
            assert not gone(process.pid)
            await pod.client.stop(name, 9, 0)
        await pod.client.forget(name)
        await no_more_descriptors(pod, before)
        if started == 3:
            return
    raise AssertionError("no start succeeded")


@pytest.mark.parametrize("tty", [False, True])
async def test_an_exec_without_descriptors_leaves_nothing(pod: TestPod, tty: bool) -> None:
    await pod.run("a", "exec sleep 1000")
    started = 0
    for free in range(MOST_FREE):
        await pod.client.state()
        before, processes = descriptors(pod.pid), pod.processes()
        args = {"args": ["/bin/sleep", "1000"], "cwd": "/"}
        try:
            with few_descriptors(pod.pid, free):
                async with asyncio.timeout(10):
                    session = await pod.exec("a", f"e{free}", args, stdin=True, tty=tty)
        except Error as error:
            print(free, error)
        else:
            started += 1
            await pod.client.kill_exec(session.exec_id)
            await session.exited
            session.close()
        await until(lambda processes=processes: pod.processes() == processes)
        await no_more_descriptors(pod, before)
        assert f"e{free}" not in (await pod.client.state()).execs
        if started == 3:
            return
    raise AssertionError("no exec succeeded")


async def test_a_shim_without_descriptors_accepts_clients_later(pod: TestPod) -> None:
    await pod.client.state()
    with few_descriptors(pod.pid, 0):
        client = await pod.connect()
        answer = asyncio.ensure_future(client.state())
        before = os.times(), _processor_ticks(pod.pid)
        await asyncio.sleep(1)
        assert _processor_ticks(pod.pid) - before[1] < 20, "the shim does not spin"
        assert not answer.done()
    async with asyncio.timeout(10):
        await answer
    client.close()
    assert pod.shim_log().count("\n") < 20


def _processor_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_a_container_that_cannot_be_compiled_leaves_no_descriptor(pod: TestPod) -> None:
    """A failed `create_container` leaves no descriptor open."""
    for free in range(MOST_FREE):
        name = f"c{free}"
        await pod.client.state()
        before = descriptors(pod.pid)
        pod.container(name, "exec sleep 1000", linux={"sysctl": {"net.ipv4.ip_forward": "1"}})
        try:
            with few_descriptors(pod.pid, free):
                async with asyncio.timeout(10):
                    await pod.client.create_container(messages.CreateContainer(name))
        except Error as error:
            print(free, error)
        else:
            await pod.client.drop_container(name)
            await no_more_descriptors(pod, before)
            return
        # The container's cgroup may stay, as its removal needs descriptors, too; the server
        # removes it.
        await no_more_descriptors(pod, before)
    raise AssertionError("no container was compiled")


async def test_an_attach_without_descriptors_leaves_nothing(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 1000", stdin=True)
    await pod.client.state()
    before = descriptors(pod.pid)
    for free in range(7):
        with few_descriptors(pod.pid, free):
            try:
                streams = await pod.client.attach("a", stdin=True, stdout=True, stderr=True)
            except Error:
                assert free < 6
            else:
                assert free == 6
                streams.close()
        await no_more_descriptors(pod, before)


async def test_a_pause_process_without_descriptors_leaves_nothing(tmp_path: Path) -> None:
    for free in range(MOST_FREE):
        async with TestPod(tmp_path / f"pod{free}", library=True) as pod:
            describe(pod)
            await pod.client.state()
            before = descriptors(pod.pid)
            try:
                with few_descriptors(pod.pid, free):
                    async with asyncio.timeout(10):
                        await pod.start_pause()
            except Error as error:
                print(free, error)
                await until(lambda pod=pod: not pod.processes())
                await no_more_descriptors(pod, before)
            else:
                return
    raise AssertionError("no pause process was started")


async def test_a_stop_without_descriptors_ends_the_container(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 1000")
    await pod.client.state()
    with few_descriptors(pod.pid, 0):
        stops = [asyncio.ensure_future(pod.client.stop("a", 9, 0)) for _ in range(2)]
        async with asyncio.timeout(20):
            assert [exit.signal for exit in await asyncio.gather(*stops)] == [9, 9]


async def test_a_terminal_that_the_client_cannot_copy_ends_its_exec(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 1000")
    before = pod.processes()
    # One is free: that by which `few_descriptors` lists the open ones.
    with few_descriptors(os.getpid(), 0), pytest.raises(OSError, match="Too many open files"):
        await pod.exec("a", "e", {"args": ["/bin/sleep", "1000"], "cwd": "/"}, stdin=True, tty=True)
    await until(lambda: pod.processes() == before)
