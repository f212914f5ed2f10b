"""Tests names that a container gives to its processes and network interfaces. The kernel shows them
in /proc with nearly every byte unchanged."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from cri_server.cli.observe import top
from cri_server.config.model import Config
from cri_server.doctor import kubelet
from cri_server.doctor.model import Machine
from pyrunc.abi.clone import CLONE_NEWNET
from pyrunc.abi.prctl import PR_SET_NAME
from pyrunc.cgroups.group import Cgroup
from pyrunc.container import stats
from pyrunc.kernel import cgroup as tree
from pyrunc.kernel import namespace
from pyrunc.kernel.call import buffer, syscall
from pyrunc.kernel.process import interface_counters
from pyrunc.launch.hook_process import inner_pid
from tests.support.groups import own_group

NAMES = [b"\xff", b"\rTgid:\t1", b"\rNSpid:\t1", b"a\x1cb\xc2\x85c", b") R 1 ("]


@contextmanager
def waiting_process(prepare: Callable[[], object]) -> Iterator[int]:
    """Fork a child that calls `prepare` and waits to be killed; yield its pid."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            prepare()
            os.write(write_end, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(write_end)
    try:
        assert os.read(read_end, 1), "the child failed"
        yield pid
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def process_named(name: bytes) -> AbstractContextManager[int]:
    return waiting_process(lambda: syscall("prctl", "name", PR_SET_NAME, buffer(name + b"\0")))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_process_cannot_change_or_break_readers_of_proc(name: bytes) -> None:
    with process_named(name) as pid:
        assert inner_pid(pid) == pid
        assert stats._allowed(pid)["cpus"] == sorted(os.sched_getaffinity(pid))
        process = top._read("main", pid)
        assert process is not None and (process.pid, process.parent) == (pid, os.getpid())
        # Reads the names of all processes of the machine.
        kubelet._command(Machine(Config()))


@pytest.mark.parametrize("name", NAMES)
def test_a_threaded_group_lists_processes_of_any_name(name: bytes) -> None:
    with own_group("threaded") as group, process_named(name) as pid:
        threaded = group / "own"
        (group / "cgroup.procs").write_text(str(pid))
        (threaded / "cgroup.type").write_text("threaded")
        (threaded / "cgroup.threads").write_text(str(pid))
        # The processes are found by their threads, as a threaded group has no cgroup.procs.
        assert Cgroup(f"/{threaded.relative_to(tree.root())}").processes() == [pid]


@pytest.mark.parametrize("name", [b"\xff", b"\x1c", b"\x1ceth0", "größe\x85".encode()])
def test_an_interface_can_have_any_name(name: bytes) -> None:
    def rename() -> None:
        namespace.unshare(CLONE_NEWNET)
        subprocess.run([b"ip", b"link", b"set", b"lo", b"name", name], check=True)

    with waiting_process(rename) as pid:
        [(shown, columns)] = interface_counters(pid).items()
        assert shown == name.decode("utf-8", "backslashreplace") and len(columns) == 16
        assert stats.interfaces(pid) == [{"Name": shown} | dict.fromkeys(stats._COUNTERS, 0)]


def test_a_cgroup_of_a_container_can_have_any_name() -> None:
    with own_group("named") as group:
        inner = Path(os.fsdecode(os.fsencode(group / "own") + b"\x1c\xff\r"))
        inner.mkdir()
        with process_named(b"inner") as pid:
            (inner / "cgroup.procs").write_text(str(pid))
            assert [process.pid for process in top.of_group("main", pid)] == [pid]
