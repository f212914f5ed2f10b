"""Tests the end of a shim of another version: it logs what it has read, and its containers run
on."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cri_server.pod.processes import ShimProcesses
from cri_server.store.facts import ProcessIdentity
from pyrunc.errors import Error, WrongState
from pyrunc.kernel.process import alive_since
from tests.kernel.shim.pod import TestPod, gone, until

WITHOUT_CALL = "tests.kernel.shim.starter:WithoutEndShim"


@contextlib.asynccontextmanager
async def server_of_another_version(pod: TestPod, shims: Path) -> AsyncIterator[ShimProcesses]:
    """Start a server's shims in the folder `shims`, where the pod's shim has a link and counts as
    one of another version."""
    shims.mkdir()
    (shims / "outdated").symlink_to(pod.shim)
    processes = ShimProcesses(pod.zygote, shims, count=1)
    await processes.ready()
    try:
        yield processes
    finally:
        processes.close()


def identity(pid: int) -> ProcessIdentity:
    started = alive_since(pid)
    assert started is not None
    return ProcessIdentity(pid, started)


async def test_an_ended_shim_has_logged_what_it_has_read(pod: TestPod, tmp_path: Path) -> None:
    started = await pod.run("a", "printf begin; echo ready >&2; exec sleep 1000")
    await until(lambda: pod.logged("a", "stderr") == b"ready\n")
    async with server_of_another_version(pod, tmp_path / "shims") as processes:
        await processes.end_outdated(identity(pod.pid))
    assert gone(pod.pid) and not gone(started.pid)
    assert pod.logged("a", "stdout") == b"begin"


async def test_a_shim_whose_log_cannot_be_written_continues(
    pod: TestPod, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An outdated shim does not end while it cannot write its log, because the waiting output would
    be lost."""
    limit = resource.RLIM_INFINITY
    started = await pod.run(
        "a", "printf begin; echo ready >&2; read x; echo $x; sleep 1000", stdin=True
    )
    await until(lambda: pod.logged("a", "stderr") == b"ready\n")
    # A file size limit on the shim stands for the full disk.
    size = pod.log_path("a").stat().st_size
    resource.prlimit(pod.pid, resource.RLIMIT_FSIZE, (size, limit))
    async with server_of_another_version(pod, tmp_path / "shims") as processes:
        assert not await processes.end_outdated(identity(pod.pid))
        assert "continues: cannot write the logs of a" in caplog.text
        assert not gone(pod.pid)
        resource.prlimit(pod.pid, resource.RLIMIT_FSIZE, (limit, limit))
        attached = await pod.client.attach("a", stdin=True, stdout=False)
        assert attached.stdin_fd is not None
        os.write(attached.stdin_fd, b"more\n")
        await until(lambda: pod.logged("a", "stdout") == b"beginmore\n")
        attached.close()
        assert await processes.end_outdated(identity(pod.pid))
    assert gone(pod.pid) and not gone(started.pid)


async def test_a_shim_without_the_call_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = TestPod(tmp_path / "pod")
    earlier.starter = WITHOUT_CALL
    async with earlier as pod:
        async with server_of_another_version(pod, tmp_path / "shims") as processes:
            await processes.end_outdated(identity(pod.pid))
        await until(lambda: gone(pod.pid))
    assert "is killed, output may be lost: this shim has no call 'end_shim'" in caplog.text


async def test_a_shim_that_does_not_end_is_killed(pod: TestPod, tmp_path: Path) -> None:
    async with server_of_another_version(pod, tmp_path / "shims") as processes:
        os.kill(pod.pid, signal.SIGSTOP)
        await processes.end_outdated(identity(pod.pid))
        await until(lambda: gone(pod.pid))


async def test_the_end_of_a_shim_is_noticed_after_a_refused_shutdown(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 1000")
    with pytest.raises(WrongState):
        await pod.client.shutdown()
    os.kill(pod.pid, signal.SIGKILL)
    await until(lambda: pod.closed)


async def test_renewed_shims_keep_their_version(pod: TestPod, tmp_path: Path) -> None:
    """After `renew` the old shims still count as shims of this version."""
    async with server_of_another_version(pod, tmp_path / "shims") as processes:
        first = set(processes.of_this_version)
        await processes.renew()
        assert first < processes.of_this_version and len(processes.of_this_version) == 2


async def test_a_failed_fork_leaves_no_folder(pod: TestPod, tmp_path: Path) -> None:
    async with server_of_another_version(pod, tmp_path / "shims") as processes:
        before = set((tmp_path / "shims").iterdir())
        await pod.zygote.close()
        with pytest.raises(Error):
            await processes._fork()
        assert set((tmp_path / "shims").iterdir()) == before
