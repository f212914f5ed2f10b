"""Attacks on a process that enters a container: until its execve it belongs to the runtime, and
processes inside must not inspect it (CVE-2016-9962).

The spy (probe.c) tries every way for each process called pyrunc:*, and counts only attempts that
ended while the process still had that name.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from tests.security.attack import slowly
from tests.system.harness import Box, Runtime, eventually

Config = dict[str, Any]


class Spy:
    """A container that tries to inspect the runtime's processes until the test reads its report."""

    def __init__(self, runtime: Runtime, user: int = 0) -> None:
        def change(config: Config) -> None:
            config["process"]["user"] = {"uid": user, "gid": user}

        self.box: Box = runtime.box("probe", "spy", "100", change=change)
        self.out = runtime.folder / f"{self.box.id}.spy"
        command = runtime.command("run", "--bundle", str(self.box.folder), self.box.id)
        with open(self.out, "wb") as to:
            self.child = subprocess.Popen(command, stdout=to, stdin=subprocess.DEVNULL)
        eventually(lambda: self.out.read_bytes().startswith(b"spying"))

    def looked(self) -> bool:
        """Return whether the spy has tried everything with at least one process."""
        return b"getfd" in self.out.read_bytes()

    def report(self) -> Counter[str]:
        """Stop the spy; return a counter of its successes and failures."""
        self.box.kill("TERM").ok()
        assert self.child.wait(60) == 0
        _, *lines, last = self.out.read_text().splitlines()
        # The last line is the number of processes that the spy saw.
        assert int(last.split()[1]) > 0, "the spy saw no process, so the test proves nothing"
        return Counter(lines)


def nothing_done(report: Counter[str]) -> None:
    assert report, "the spy tried nothing in time, so the test proves nothing"
    assert not [line for line in report if line.endswith(" DONE")], report


def test_a_process_that_waits_for_start_cannot_be_inspected(runtime: Runtime) -> None:
    """CVE-2016-9962: two containers share a pid namespace and have the same user and capabilities.
    One waits for start; the other spies on it by /proc/PID/{root,cwd,exe,fd,environ,mem,maps},
    ptrace and pidfd_getfd. Each attempt fails, because the launcher is not dumpable."""
    spy = Spy(runtime)
    pid = runtime("state", spy.box.id).ok().json["pid"]
    kinds = [{"type": kind} for kind in ("network", "ipc", "uts", "mount", "cgroup")]
    waiting = runtime.box(
        "true", namespaces=[*kinds, {"type": "pid", "path": f"/proc/{pid}/ns/pid"}]
    )
    waiting.create().ok()
    eventually(spy.looked)
    newcomer = waiting.pid
    waiting.kill("KILL").ok()
    os.waitpid(newcomer, 0)  # the spy's pid namespace ends when all its processes are reaped
    report = spy.report()
    nothing_done(report)
    assert {line.split()[0] for line in report} >= {
        "root",
        "cwd",
        "exe",
        "environ",
        "mem",
        "ptrace",
        "getfd",
        "write-exe",
    }


def test_an_entering_process_cannot_be_inspected(runtime: Runtime) -> None:
    """CVE-2016-9962 for exec: a spy with the same user inspects the entering process while it
    changes its ids and until its execve. Each attempt fails."""
    for user in (0, 1000):
        spy = Spy(runtime, user)
        # Each change of ids resets the dumpable flag to fs.suid_dumpable; the launcher clears it
        # again.
        slow = slowly(runtime, ["setresuid", "capset", "chdir", "execve"], 25)
        for number in itertools.count(1):
            slow("exec", spy.box.id, "true")
            if number >= 3 and spy.looked():
                break
        nothing_done(spy.report())


def test_a_process_is_not_dumpable_after_the_change_of_ids(
    runtime: Runtime, tmp_path: Path
) -> None:
    """/proc/PID of a created container with uid 1000 belongs to root, which is how the kernel shows
    that the process is not dumpable (proc(5))."""

    def change(config: Config) -> None:
        config["process"]["user"] = {"uid": 1000, "gid": 1000}

    box = runtime.box("true", change=change)
    box.create().ok()
    status = Path(f"/proc/{box.pid}/status").read_text()
    assert "Uid:\t1000\t1000\t1000\t1000" in status
    assert Path(f"/proc/{box.pid}/environ").stat().st_uid == 0
    box.start().ok()
