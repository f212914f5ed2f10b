"""Reused pids: no signal reaches a process that got the number of another one.

The test does not wait for the number to come up: clone3(2) makes a process with a chosen pid
(set_tid), in the container's cgroup.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from pyrunc.cgroups.group import Cgroup
from pyrunc.kernel import cgroup as tree
from pyrunc.kernel.call import address, buffer, raw
from pyrunc.kernel.process import alive_since
from pyrunc.shim.tree import kill_session, stat
from pyrunc.zygote import descendants
from tests.kernel.shim.pod import TestPod
from tests.support.processes import wait_until

CLONE_INTO_CGROUP = 1 << 33


@pytest_asyncio.fixture
async def pod(tmp_path: Path) -> AsyncIterator[TestPod]:
    async with TestPod(tmp_path / "pod", library=True) as test_pod:
        yield test_pod


@contextmanager
def process_with(pid: int, group: str) -> Iterator[None]:
    """Run a process with this pid in the cgroup during the block; fail if anything has killed it.
    Raises FileExistsError when another process has the pid."""
    pids, folder = buffer(struct.pack("<i", pid)), os.open(group, os.O_PATH)
    arguments = struct.pack(
        "<11Q", CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, address(pids), 1, folder
    )
    result = raw("clone3", buffer(arguments), len(arguments))
    if result == 0:
        os.execv("/bin/sleep", ["sleep", "1000"])
    os.close(folder)
    if result < 0:
        raise FileExistsError(-result, os.strerror(-result))
    assert result == pid
    try:
        yield
    finally:
        os.kill(pid, signal.SIGTERM)  # ours and not reaped
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM, (
            "it was killed before"
        )


async def test_killing_a_session_spares_a_process_with_its_leaders_pid(pod: TestPod) -> None:
    started = await pod.run("a", "exec sleep 1000")
    group = tree.root() + (tree.own_path(started.pid) or "")
    for number in range(20):
        session = await pod.exec("a", f"e{number}", {"args": ["true"], "cwd": "/"})
        assert await session.exited == 0
        session.close()
        try:
            with process_with(session.pid, group):
                await pod.client.kill_exec(f"e{number}")
                return
        except FileExistsError:
            continue
    pytest.fail("other processes took every number")


def test_members_of_a_session_outlive_its_leader() -> None:
    """The processes of a session are killed although its leader has ended."""
    script = "sleep 1000 & echo $!; exec true"
    with subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        member = int(leader.stdout.readline())
        status = stat(leader.pid)
        leader.wait()
        assert status is not None
        # The kernel does not reuse the session's number while members live.
        for _ in kill_session(leader.pid, status.start_time, lambda: [member]):
            pass
        assert wait_until(lambda: not alive_since(member), 30)


def test_a_listed_process_that_left_the_group_gets_no_signal(tmp_path: Path) -> None:
    """A process gets no signal if it is not in the cgroup at the time of the signal."""
    group = Cgroup(f"/pid-reuse-{os.getpid()}", "cgroupfs")
    group.create()
    try:
        with subprocess.Popen(["sleep", "1000"]) as outside:
            try:
                # A listed pid may belong to a process of another cgroup by then.
                assert not group.send_signal(outside.pid, signal.SIGKILL)
                assert outside.poll() is None
                group.attach(outside.pid)
                assert group.send_signal(outside.pid, signal.SIGKILL)
                assert outside.wait() == -signal.SIGKILL
            finally:
                outside.kill()
        assert not group.send_signal(outside.pid, signal.SIGKILL)
    finally:
        group.remove()


def test_a_jobs_descendants_are_identified_by_more_than_their_pids() -> None:
    """A process that was listed as a job's descendant gets no signal if its parent is another
    process at the time of the signal."""
    with (
        subprocess.Popen(["sleep", "1000"]) as foreign,
        subprocess.Popen(["sleep", "1000"]) as job,
    ):
        try:
            assert descendants.open_descendant(foreign.pid, {job.pid}) is None
            opened = descendants.open_descendant(foreign.pid, {os.getpid()})
            assert opened is not None
            os.close(opened)
        finally:
            foreign.kill()
            job.kill()
