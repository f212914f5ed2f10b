"""Attacks through descriptors of the host in a container, and through working directories on the
host (CVE-2024-21626, CVE-2016-9962).

The runtime inherits thirty descriptors of `/`, so that no attack has to guess a number.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.security.attack import Canary, slowly
from tests.system.console import receive_terminal
from tests.system.harness import Box, Runtime

Config = dict[str, Any]
CLIMB = "../../../../../../../../../../.."


@contextmanager
def leaked(count: int = 30) -> Iterator[tuple[int, ...]]:
    """Open `count` descriptors of the host's root folder that child processes inherit."""
    numbers = tuple(os.open("/", os.O_RDONLY | os.O_DIRECTORY) for _ in range(count))
    for number in numbers:
        os.set_inheritable(number, True)
    try:
        yield numbers
    finally:
        for number in numbers:
            os.close(number)


def climbing(canary: Canary) -> tuple[str, ...]:
    """Return a command that reads the canary by `..`, which succeeds only if the working directory
    is outside of the container's root."""
    return (
        "sh",
        "-c",
        (
            f"cat {CLIMB}{canary.path}/passwd 2>/dev/null; cat ./{CLIMB[3:]}{canary.path}/passwd"
            " 2>/dev/null; true"
        ),
    )


@pytest.mark.parametrize("tail", ["", "/../../..", "/sys-1"])
def test_the_working_directory_of_a_container_is_not_on_the_host(
    runtime: Runtime, canary: Canary, tail: str
) -> None:
    """CVE-2024-21626: process.cwd is a descriptor of a folder of the host that the runtime (or its
    caller) left open. Create fails, or the container cannot read the host's canary over `..`."""
    with leaked() as numbers:
        for n in (*range(3, 10), numbers[0], numbers[-1]):
            box = runtime.box(
                *climbing(canary),
                change=lambda c, n=n: c["process"].update(cwd=f"/proc/self/fd/{n}{tail}"),
            )
            result = runtime("run", "--bundle", str(box.folder), box.id, pass_fds=numbers)
            assert "canary" not in result.out, result
            # `..` may lead from a folder of the container to its root
            assert result.code != 0 or tail == "/../../..", result


@pytest.mark.parametrize("tail", ["", "/../../.."])
def test_the_working_directory_of_an_exec_is_not_on_the_host(
    runtime: Runtime, canary: Canary, tail: str
) -> None:
    """CVE-2024-21626 by `exec --cwd` with /proc/self/fd/N, or with a link of the image to it. Each
    exec fails, and the host's canary is not read over `..`."""
    box = runtime.box("sleep", "60").up()
    for n in range(3, 12):
        (runtime.rootfs / f"cwd{n}").symlink_to(f"/proc/self/fd/{n}{tail}")
    with leaked() as numbers:
        for n in (*range(3, 12), numbers[-1]):
            for cwd in (f"/proc/self/fd/{n}{tail}", f"/cwd{n}")[: 2 if n % 2 else 1]:
                result = box.exec(*climbing(canary), options=["--cwd", cwd], pass_fds=numbers)
                assert result.code != 0 and "canary" not in result.out, result


def test_the_program_is_not_run_through_a_descriptor(runtime: Runtime) -> None:
    """CVE-2024-21626, third way: args[0] is a program of the host at /proc/self/fd/N/…. The program
    is not found."""
    box = runtime.box("sleep", "60").up()
    with leaked() as numbers:
        for n in (3, 4, 5, 6, 7, 8, numbers[0]):
            result = box.exec(f"/proc/self/fd/{n}/bin/sh", "-c", "echo ran", pass_fds=numbers)
            assert result.code != 0 and "ran" not in result.out, result
    alive = runtime.run(f"/proc/self/fd/{5}/bin/sh", "-c", "echo ran")
    assert alive.code != 0 and "ran" not in alive.out


def test_a_process_has_only_its_three_descriptors(runtime: Runtime, tmp_path: Path) -> None:
    """The caller leaks thirty folders to run, exec, create and start, also with a terminal, sysctls
    and a seccomp filter. The container's process has only 0, 1, 2 and the descriptors of
    --preserve-fds."""
    seccomp = {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["close_range"], "action": "SCMP_ACT_ERRNO"}],
    }
    listing = ("sh", "-c", "cd /proc/self/fd; echo *")
    with leaked() as numbers:
        for linux in ({}, {"seccomp": seccomp}, {"sysctl": {"net.ipv4.ip_forward": "1"}}):
            box = runtime.box(*listing, **linux)
            result = runtime("run", "--bundle", str(box.folder), box.id, pass_fds=numbers).ok()
            # 3 is the descriptor of the list itself.
            assert result.out.split() in (["0", "1", "2"], ["0", "1", "2", "3"]), (linux, result)
        box = runtime.box("sleep", "60", seccomp=seccomp).up()
        assert len(box.exec(*listing, pass_fds=numbers).ok().out.split()) <= 4
        preserved = (
            box.exec(*listing, options=["--preserve-fds", "2"], pass_fds=(3, 4, *numbers))
            .ok()
            .out.split()
        )
        assert preserved[:5] == ["0", "1", "2", "3", "4"] and len(preserved) <= 6, preserved
        tty = runtime.box(
            "sh",
            "-c",
            "cd /proc/self/fd; echo fds * end",
            change=lambda c: c["process"].update(terminal=True),
        )
        with receive_terminal(tmp_path / "c") as console:
            tty.create("--console-socket", str(console.path), pass_fds=numbers).ok()
            tty.start().ok()
            text = console.read_until(b"end").decode()
    assert re.search(r"fds 0 1 2 (3 )?(255 )?end", text), text


def of_the_host(pid: int) -> list[str]:
    """Return the descriptors of a process from 3 on that are neither sockets, memfds nor files of
    its own mounts."""
    targets = []
    own = os.stat(f"/proc/{pid}/ns/mnt").st_ino
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            info = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
        except OSError:
            continue
        if int(name) < 3 or target.startswith(("socket:", "anon_inode:", "/memfd:")):
            continue
        match = re.search(r"mnt_id:\s*(\d+)", info)
        table = {
            line.split()[0] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        }
        if match is None or match[1] not in table:
            targets.append(f"{name} -> {target} ({own})")
    return targets


@pytest.mark.parametrize("nnp", [True, False])
def test_a_created_container_has_no_descriptor_of_the_host(runtime: Runtime, nnp: bool) -> None:
    """A created container may wait for long, and a neighbour with CAP_SYS_PTRACE could take its
    descriptors. Every descriptor above 2 is a socket or a memfd: none is of the host's cgroup tree
    or procfs."""

    def change(config: Config) -> None:
        config["process"]["noNewPrivileges"] = nnp
        config["linux"]["sysctl"] = {"net.ipv4.ip_forward": "1"}
        config["linux"]["seccomp"] = {"defaultAction": "SCMP_ACT_ALLOW"}
        config["hooks"] = {"startContainer": [{"path": "/bin/true"}]}

    for changes in (None, change):
        box = runtime.box("true", change=changes)
        box.create().ok()
        kinds = {
            os.readlink(f"/proc/{box.pid}/fd/{n}").partition(":")[0]
            for n in os.listdir(f"/proc/{box.pid}/fd")
            if int(n) > 2
        }
        assert kinds <= {"socket", "/memfd"}, kinds
        assert of_the_host(box.pid) == []
        box.start().ok()


def test_an_entering_process_has_no_descriptor_of_the_host(runtime: Runtime) -> None:
    """A neighbour could take the descriptors of a process that `exec` brings into the container,
    before its execve. No descriptor belongs to a mount outside of the container."""
    box = runtime.box("sleep", "60").up()
    namespace = os.readlink(f"/proc/{box.pid}/ns/pid")
    # Stops the process in the container's pid namespace, long before its execve.
    slow = slowly(runtime, ["capset"], 800)
    worker = threading.Thread(target=lambda: slow("exec", box.id, "true"))
    worker.start()
    looks: Counter[tuple[str, ...]] = Counter()
    while worker.is_alive():
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if (
                    Path(f"/proc/{name}/comm").read_text() == "pyrunc:exec\n"
                    and os.readlink(f"/proc/{name}/ns/pid") == namespace
                ):
                    looks[tuple(of_the_host(int(name)))] += 1
            except OSError:
                continue
    worker.join()
    ((descriptors, times),) = looks.most_common(1)
    assert descriptors == () and times > 10, looks


def test_only_passed_sockets_of_systemd_reach_the_container(runtime: Runtime) -> None:
    """Socket activation: the caller leaks descriptors and sets LISTEN_FDS. The container gets one
    of them for LISTEN_FDS=1, and none if the value is not a valid number."""
    runtime.program = ["sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh", *runtime.program]
    for text, most in (
        ("1", 5),
        ("x", 4),
        ("-3", 4),
        ("1_0", 4),
        ("\u0661", 4),
        ("99999999999999999999", 4),
    ):
        with leaked(3) as numbers:
            box = runtime.box("sh", "-c", "cd /proc/self/fd; echo *")
            result = runtime(
                "run",
                "--bundle",
                str(box.folder),
                box.id,
                pass_fds=numbers,
                env={"LISTEN_FDS": text},
            )
        assert result.code != 0 or len(result.out.split()) <= most, (text, result)
        assert "Traceback" not in result.err


def inner_pid(box: Box) -> int:
    return int(re.findall(r"NSpid:.*\t(\d+)", Path(f"/proc/{box.pid}/status").read_text())[0])


def test_a_created_container_shows_no_arguments_of_the_caller(runtime: Runtime) -> None:
    """Neighbours can read /proc/PID/cmdline and environ of a container that waits for start. They
    show only the launcher's own two arguments, nothing of the caller or of the program."""
    box = runtime.box(
        "true", "secret-argument", change=lambda c: c["process"]["env"].append("SECRET=configured")
    )
    box.create(env={"CALLER_SECRET": "caller"}).ok()
    words = Path(f"/proc/{box.pid}/cmdline").read_bytes().split(b"\0")
    assert words[0] == b"launcher" and words[1].isdigit() and words[2:] == [b""]
    assert Path(f"/proc/{box.pid}/environ").read_bytes() == b""
    assert inner_pid(box) == 1
