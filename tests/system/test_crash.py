"""Tests commands that are killed, and many at once: `delete --force` can remove all leftovers."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import Box, Runtime, eventually, reap

ATTEMPTS = 24


def groups(name: str) -> list[Path]:
    return [
        path
        for base in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
        if (path := Path(base) / name).is_dir()
    ]


def test_a_create_that_is_killed_anywhere_can_be_deleted(runtime: Runtime) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("finds what another runtime leaves")
    luck = random.Random(1)
    for _ in range(ATTEMPTS):
        box = runtime.box("sleep", "60")
        command = runtime.command("create", "--bundle", str(box.folder), box.id)
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as child:
            time.sleep(luck.uniform(0, 0.06))
            child.send_signal(signal.SIGKILL)
        box.delete("--force").ok()
        assert not groups(box.id), box.id
        assert not (runtime.root / box.id).exists()
        box.create().ok()
        box.delete("--force").ok()
        reap()


def test_a_killed_create_counts_as_stopped(runtime: Runtime) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("our state files")
    box = runtime.box("sleep", "60")
    runtime.root.mkdir(parents=True, exist_ok=True)
    (runtime.root / box.id).mkdir(mode=0o1700)
    assert box.status == "stopped"
    box.exec("true").fails("stopped", code=255)
    box.start().fails("stopped")
    box.delete().ok()


def test_folders_of_others_in_the_root_are_no_containers(runtime: Runtime) -> None:
    """A server's state, a socket's folder or an administrator's own folder beside the containers is
    not taken for a container."""
    if not runtime.is_pyrunc:
        pytest.skip("another runtime takes every folder for a container")
    foreign = {
        "containers": "state.json",
        "sandboxes": "x/pause.json",
        "empty": "",
        "broken": "config.json",
    }
    for name, file in foreign.items():
        path = runtime.root / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if file:
            path.write_text('{"version": 1, "pid": 1, "start_time": 1}')
        else:
            path.mkdir(exist_ok=True)
    box = runtime.box("sleep", "60")
    box.create().ok()
    assert runtime("list", "--quiet").out.split() == [box.id]
    for name in foreign:
        runtime("state", name).fails("does not exist")
        runtime("delete", name).fails("does not exist")
        runtime("delete", "--force", name).ok()
        runtime("kill", name).fails("does not exist")
        assert (runtime.root / name).is_dir(), f"{name} was deleted"
    other = runtime.box("sleep", "60")
    (runtime.root / other.id).mkdir()
    other.create().fails("does not belong to a container")
    (runtime.root / other.id).rmdir()
    runtime("delete", "--force", "--regex", ".*").ok()
    assert not (runtime.root / box.id).exists()
    for name in foreign:
        shutil.rmtree(runtime.root / name)


def test_one_of_many_concurrent_creates_of_an_id_succeeds(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    with ThreadPoolExecutor(10) as pool:
        codes = list(pool.map(lambda _: box.create().code, range(10)))
    assert sorted(codes) == [0] + [1] * 9
    assert box.status == "created"
    box.delete("--force").ok()
    assert not groups(box.id)


def test_many_containers_live_at_once(runtime: Runtime) -> None:
    boxes = [runtime.box("sleep", "60") for _ in range(24)]

    def live(box: Box) -> None:
        box.create().ok()
        box.start().ok()
        assert box.exec("true").code == 0
        box.kill("KILL").ok()
        eventually(lambda: box.status == "stopped")
        box.delete().ok()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(live, boxes))
    assert not any(groups(box.id) for box in boxes)


def test_an_attached_run_that_is_killed_leaves_a_container_to_delete(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    command = runtime.command("run", "--bundle", str(box.folder), box.id)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as child:
        eventually(lambda: runtime("state", box.id).code == 0 and box.status == "running")
        child.send_signal(signal.SIGKILL)
    assert box.status == "running"
    box.delete("--force").ok()
    assert not groups(box.id)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a container's lock, as another command does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_awaited(folder: Path) -> bool:
    """Return whether a process waits for the lock of the folder (proc_locks(5))."""
    inode = folder.stat().st_ino
    return any(
        "->" in line and f":{inode} " in line
        for line in Path("/proc/locks").read_text().splitlines()
    )


def test_a_run_ends_with_the_exit_code_also_when_another_command_deletes_its_container(
    runtime: Runtime,
) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("our lock")
    box = runtime.box("sleep", "60")
    folder = runtime.root / box.id
    command = runtime.command("run", "--bundle", str(box.folder), box.id)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as child:
        eventually(lambda: runtime("state", box.id).code == 0 and box.status == "running")
        with locked(folder):
            box.kill("KILL").ok()
            eventually(lambda: is_awaited(folder))
            for path in groups(box.id):
                path.rmdir()
            shutil.rmtree(folder)
            # A new container claims the id before `run` has the lock.
            folder.mkdir(mode=0o1700)
        assert child.wait(60) == 137
    assert folder.exists()


def test_a_delete_that_waits_for_another_one_finds_no_container(runtime: Runtime) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("our lock")
    folder = runtime.root / "twice"
    folder.mkdir(mode=0o1700, parents=True)
    with ThreadPoolExecutor() as pool:
        with locked(folder):
            forced = pool.submit(runtime, "delete", "--force", "twice")
            eventually(lambda: is_awaited(folder))
            folder.rmdir()
        forced.result().ok()
        folder.mkdir(mode=0o1700)
        with locked(folder):
            plain = pool.submit(runtime, "delete", "twice")
            eventually(lambda: is_awaited(folder))
            folder.rmdir()
        plain.result().fails("container does not exist: twice")


def test_a_start_that_waits_for_the_create_runs_the_program(
    runtime: Runtime, tmp_path: Path
) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("our lock")
    go = tmp_path / "go"
    wait = ["sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done"]

    def change(config: dict[str, Any]) -> None:
        config["hooks"] = {"createRuntime": [{"path": "/bin/busybox", "args": wait}]}

    box = runtime.box("sleep", "60", change=change)
    with ThreadPoolExecutor() as pool:
        created = pool.submit(box.create)
        eventually((runtime.root / box.id / "state.json").exists)
        started = pool.submit(box.start)
        eventually(lambda: is_awaited(runtime.root / box.id))
        go.touch()
        created.result().ok()
        started.result().ok()
    assert box.status == "running"


def test_a_start_race_runs_the_program_once(runtime: Runtime, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    mount = {"destination": "/tmp", "source": str(marks), "type": "bind", "options": ["bind"]}
    box = runtime.box(
        "sh", "-c", "echo x >>/tmp/ran; sleep 60", change=lambda c: c["mounts"].append(mount)
    )
    box.create().ok()
    with ThreadPoolExecutor(6) as pool:
        codes = sorted(pool.map(lambda _: box.start().code, range(6)))
    assert codes == [0] + [1] * 5
    eventually((marks / "ran").exists)
    assert (marks / "ran").read_text() == "x\n"


def test_the_store_of_filters_survives_rubbish(runtime: Runtime) -> None:
    if not runtime.is_pyrunc or os.geteuid():
        pytest.skip("our store")
    seccomp = {
        "defaultAction": "SCMP_ACT_ALLOW",
        # a new profile, which no earlier run has stored
        "syscalls": [
            {
                "names": ["swapoff"],
                "action": "SCMP_ACT_ERRNO",
                "errnoRet": 1 + time.time_ns() % 4000,
            }
        ],
    }
    runtime.run("true", seccomp=seccomp).ok()
    store = Path("/run/pyrunc/.seccomp")
    newest = max(store.iterdir(), key=lambda p: p.stat().st_mtime)
    newest.write_bytes(b"rubbish")
    assert runtime.run("sh", "-c", "exit 3", seccomp=seccomp).code == 3
    assert newest.read_bytes() != b"rubbish"
