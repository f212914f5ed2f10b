"""Attacks on the runtime's own program from a container (CVE-2019-5736, LXC's CVE-2019-5736, runc
CVE-2016-9962).

Before its own program is executed, a container runs only the launcher, from a sealed memfd, and
never Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pyrunc.program.launch import LAUNCHER
from tests.security.attack import slowly, traced
from tests.system.harness import Runtime, eventually

ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
PTRACE = ["CAP_SYS_PTRACE", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH"]


def fingerprint() -> list[tuple[str, int, int, str]]:
    """Return path, inode, time and digest of the host's executables that run in or next to a
    container."""
    files = [
        os.path.realpath(sys.executable),
        LAUNCHER,
        os.path.join(os.path.dirname(LAUNCHER), "pause"),
    ]
    values = []
    for path in files:
        status = os.stat(path)
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        values.append((path, status.st_ino, status.st_mtime_ns, digest))
    return values


def test_proc_self_exe_is_never_a_file_of_the_host(runtime: Runtime, rootfs: Path) -> None:
    """CVE-2019-5736: the image's program is a script whose interpreter is /proc/self/exe, so that
    execve opens the executable of the runtime's process, by run and exec. No Python starts, and the
    host's executables are unchanged."""
    before = fingerprint()
    (rootfs / "bin/evil").write_text("#!/proc/self/exe\n")
    (rootfs / "bin/evil").chmod(0o755)
    # The executable is the launcher's memfd, which exits with 126 without its descriptors.
    assert runtime.run("/bin/evil").code != 0
    box = runtime.box("sleep", "60").up()
    assert box.exec("/bin/evil").code not in (0, 1)  # 1 would mean that a Python started and failed
    assert fingerprint() == before


def test_executables_cannot_be_overwritten_through_another_process(runtime: Runtime) -> None:
    """CVE-2019-5736, the usual exploit: an attacker in the container opens /proc/PID/exe of each
    process that `exec` brings in, and opens the file again for writing when that process has ended.
    The host's executables are unchanged."""

    def change(config: dict[str, object]) -> None:
        process: dict[str, object] = config["process"]  # type: ignore[assignment]
        # Without CAP_SYS_PTRACE the kernel denies the lookup (test_newcomer).
        process["capabilities"] = dict.fromkeys(("bounding", "effective", "permitted"), PTRACE)

    before = fingerprint()
    box = runtime.box("probe", "overwrite", "100", change=change)
    out = runtime.folder / "hunter.out"
    with open(out, "wb") as to:
        hunter = subprocess.Popen(
            runtime.command("run", "--bundle", str(box.folder), box.id),
            stdout=to,
        )
    eventually(lambda: out.read_bytes().startswith(b"hunting"))
    # leaves the attacker time for the lookup
    slow = slowly(runtime, ["execve", "execveat"], 100)
    for number in itertools.count(1):
        slow("exec", box.id, "true")
        if number >= 3 and b"prey" in out.read_bytes():
            break
    box.kill("TERM").ok()
    hunter.wait(60)
    match = re.search(r"opened (\d+) written (\d+)", out.read_text())
    assert match is not None and int(match[1]) > 0, (
        "the attack opened no executable, so the test proves nothing"
    )
    assert match[2] == "0"
    assert fingerprint() == before


def test_a_created_container_runs_a_sealed_memfd(runtime: Runtime) -> None:
    """Between create and start a process of the runtime waits in the container. Its executable is a
    memfd with all four seals, which not even root of the host can open for writing."""
    box = runtime.box("true")
    box.create().ok()
    exe = f"/proc/{box.pid}/exe"
    assert os.readlink(exe).startswith("/memfd:pyrunc:launcher")
    assert os.stat(exe).st_ino not in {inode for _, inode, _, _ in fingerprint()}
    with open(exe, "rb") as file:
        assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & ALL_SEALS == ALL_SEALS
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        with pytest.raises(OSError):
            os.open(exe, flags)


def test_a_process_in_the_container_opens_no_code_before_execve(
    runtime: Runtime, tmp_path: Path
) -> None:
    """Between setns or pivot_root and execve, a process of the runtime in the container opens no
    code: no *.py, no *.so, no nsswitch, locale or codec."""
    calls = "openat,openat2,open,execve,execveat,setns,pivot_root,clone3"
    one, two = traced(runtime, tmp_path / "run", calls), traced(runtime, tmp_path / "exec", calls)
    box, other = runtime.box("true"), runtime.box("sleep", "60").up()
    one("run", "--bundle", str(box.folder), box.id).ok()
    two("exec", other.id, "true").ok()
    for log, border in (("run", r"pivot_root\("), ("exec", r"setns\(.*CLONE_NEWNS")):
        who, opened = after_the_border((tmp_path / log).read_text(), border)
        assert who, f"no process entered the container in {log}"
        for path in opened:
            assert not re.search(
                r"\.(py|pyc|so)(\.|$)|nsswitch|locale|gconv|encodings|ld\.so|\.pth", path
            ), (
                log,
                path,
            )


def after_the_border(log: str, border: str) -> tuple[set[str], list[str]]:
    """Return the processes that entered the container by the call `border`, and the files that they
    and their children opened between this call and execve."""
    inside: set[str] = set()
    entered: set[str] = set()
    opened = []
    for line in log.splitlines():
        pid, _, call = line.partition(" ")
        match = re.match(r"\s*clone3\(.* = (\d+)$", call)
        if re.match(rf"\s*{border}.* = 0", call):
            inside.add(pid)
            entered.add(pid)
        elif match is not None and pid in inside:
            inside.add(match[1])
        elif pid in inside and re.match(r"\s*execve\(.* = 0$", call):
            inside.discard(pid)
        elif pid in inside and re.match(r"\s*open", call):
            opened.append(call.partition('"')[2].partition('"')[0])
    return entered, opened


def test_a_thousand_execs_beside_an_attacker_change_no_executable(runtime: Runtime) -> None:
    """The container searches for processes that `exec` brings in, to overwrite their executables.
    The executables of the host stay the same, whether or not it finds such a process in time."""
    before = fingerprint()
    box = runtime.box("probe", "overwrite", "60").up()
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        box.exec("true").ok()
    assert fingerprint() == before
