"""Terminals come from the container's own devpts. The caller gets the master; the process gets a
controlling terminal with the right size and owner."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from pyrunc.compile.exec import ExecRequest, merged
from pyrunc.container.create import create
from pyrunc.container.exec import execute
from pyrunc.errors import KernelError
from tests.kernel.box import Box, finish, reap


def read_all(master: int, timeout_s: float = 30) -> str:
    """Read everything until the other side hangs up (EIO)."""
    output = b""
    while select.select([master], [], [], timeout_s)[0]:
        try:
            part = os.read(master, 4096)
        except OSError:
            break
        output += part
    return output.decode().replace("\r\n", "\n")


def test_a_container_can_have_a_terminal(box: Box) -> None:
    box.process.update(
        terminal=True, consoleSize={"height": 33, "width": 77}, user={"uid": 1000, "gid": 1000}
    )
    script = (
        "tty; stty size; stat -c '%F %t %u:%g %a' $(tty); stat -c '%F %t' /dev/console; "
        "echo x > /dev/tty; ls /dev/pts"
    )
    created = create(box.request("sh", "-c", script))
    assert created.console_fd is not None
    text = read_all(created.console_fd)
    os.close(created.console_fd)
    assert finish(created) == 0
    lines = text.splitlines()
    assert lines[0] == "/dev/pts/0"
    assert lines[1] == "33 77"
    assert lines[2] == "character special file 88 1000:5 620"
    assert lines[3] == "character special file 88"
    assert lines[4] == "x"
    assert lines[5].split() == ["0", "ptmx"]


def test_a_terminal_belongs_to_a_session_that_gets_sighup(box: Box) -> None:
    box.process["terminal"] = True
    created = create(box.request("sleep", "1000"))
    assert created.console_fd is not None
    fields = Path(f"/proc/{created.pid}/stat").read_text().rpartition(")")[2].split()
    assert fields[3] == str(created.pid)  # leads its session
    assert fields[4] != "0"  # has a terminal
    assert sorted(os.listdir(f"/proc/{created.pid}/fd")) == ["0", "1", "2"]
    os.write(created.console_fd, b"\3")
    os.close(created.console_fd)  # pid 1 ignores SIGINT, but SIGHUP too: no handler
    os.kill(created.pid, 9)
    finish(created)


def test_an_exec_can_have_a_terminal(box: Box) -> None:
    with box.running() as (created, request):
        process = merged(
            request.spec,
            {
                "args": [
                    "sh",
                    "-c",
                    "tty; stty size; read x; echo got $x; ls -l /dev/console 2>&1 | head -c 2",
                ],
                "terminal": True,
                "consoleSize": {"height": 10, "width": 20},
            },
        )
        done = execute(
            ExecRequest(created.pid, created.pidfd, request.spec, process, cgroup=created.cgroup)
        )
        assert done.console_fd is not None
        os.write(done.console_fd, b"word\n")
        text = read_all(done.console_fd)
        os.close(done.console_fd)
        assert reap(done) == 0
        lines = text.splitlines()
        lines.remove("word")  # the echo comes before or after what the program writes first
        assert lines == ["/dev/pts/0", "10 20", "got word", "ls"]


def test_a_created_container_has_its_terminal_after_start(box: Box, tmp_path: Path) -> None:
    from pyrunc.container.start import release

    box.process["terminal"] = True
    created = create(
        box.request("sh", "-c", "tty", start_immediately=False, state_dir=str(tmp_path))
    )
    assert created.console_fd is not None
    release(str(tmp_path), ("sh",))
    assert read_all(created.console_fd) == "/dev/pts/0\n"
    os.close(created.console_fd)
    assert finish(created) == 0


@pytest.mark.parametrize("how", ["symlink", "file", "missing", "other pts"])
def test_a_hostile_ptmx_is_refused(box: Box, tmp_path: Path, how: str) -> None:
    """CVE-2025-52565: the terminal must come from a devpts at /dev/pts, and no link may lead
    to it."""
    dev = tmp_path / "dev"
    (dev / "pts").mkdir(parents=True)
    if how == "symlink":
        (dev / "pts/ptmx").symlink_to("/proc/sysrq-trigger")
    elif how == "file":
        (dev / "pts/ptmx").write_text("")
    elif how == "other pts":
        os.mknod(dev / "pts/ptmx", 0o20666, os.makedev(5, 2))
    os.mknod(dev / "null", 0o20666, os.makedev(1, 3))
    box.config["mounts"] = [
        m for m in box.config["mounts"] if not m["destination"].startswith("/dev")
    ]
    box.bind(dev, "/dev")
    box.process["terminal"] = True
    with pytest.raises(KernelError, match="open terminal"):
        create(box.request("true"))
