"""Tests that the ledger separates a session's own leaks from changes by others on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support import ledger, session
from tests.support.processes import wait_until


class Things:
    """Makes objects that the ledger can find. `kinds[KIND](NAME)` makes one and returns the path or
    name by which the ledger reports it; the end of the test removes it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.stack, self.folder = stack, folder
        self.kinds: dict[str, Callable[[str], str]] = {
            "cgroup": self.cgroup,
            "network namespace": self.namespace,
            "link": self.link,
            "mount": self.mount,
        }

    def cgroup(self, name: str) -> str:
        group = f"{ledger.cgroup_root()}/{name}"
        os.mkdir(group)
        self.stack.callback(os.rmdir, group)
        return group

    def namespace(self, name: str) -> str:
        subprocess.run(["ip", "netns", "add", name], check=True)
        self.stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        return name

    def link(self, name: str) -> str:
        subprocess.run(["ip", "link", "add", name, "type", "bridge"], check=True)
        self.stack.callback(subprocess.run, ["ip", "link", "del", name], check=True)
        return name

    def mount(self, name: str) -> str:
        (place := self.folder / name).mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "left", place], check=True)
        self.stack.callback(subprocess.run, ["umount", place], check=True)
        return str(place)

    def orphan(self, name: str, environment: dict[str, str]) -> int:
        """Start a process that is not a descendant of this one and has a child; `name` is in its
        command line. Both processes are killed at the end of the test."""
        script = "echo $$; sleep 1000 >/dev/null & echo $!; exec >/dev/null; wait"
        done = subprocess.run(
            ["setsid", "--fork", "sh", "-c", script, name],
            env={"PATH": os.environ["PATH"], **environment},
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        pids = [int(pid) for pid in done.stdout.split()]
        for pid in pids:
            self.stack.callback(wait_until, lambda pid=pid: not _lives(pid), 30)
            self.stack.callback(_kill, pid)
        return pids[0]


def _kill(pid: int) -> None:
    """End a process, which may have ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def things(monkeypatch: pytest.MonkeyPatch) -> Iterator[Things]:
    monkeypatch.setenv("PYRUNC_LEDGER", "")
    with ExitStack() as stack:
        folder = Path(f"/tmp/other-{os.getpid()}")
        folder.mkdir()
        stack.callback(folder.rmdir)
        things = Things(stack, folder)
        stack.callback(lambda: [path.rmdir() for path in folder.iterdir()])
        yield things


@pytest.mark.parametrize("kind", ["cgroup", "network namespace", "link", "mount"])
def test_only_own_objects_are_leaks(things: Things, kind: str) -> None:
    make, before = things.kinds[kind], ledger.take()
    make(f"oth-{os.getpid()}")
    assert ledger.take().leaks(before) == []
    own = make(session.name("own"))
    leaks = ledger.take().leaks(before)
    assert any(line.startswith(f"{kind}: {own}") for line in leaks) and all(
        own in line for line in leaks
    )


def test_mounts_in_folders_of_the_session_are_leaks(things: Things, tmp_path: Path) -> None:
    before, things.folder = ledger.take(), tmp_path
    place = things.mount("volume")
    assert ledger.take().leaks(before) == [f"mount: {place} (tmpfs left)"]


def test_processes_are_known_by_their_mark_their_parents_and_their_cgroup(things: Things) -> None:
    before = ledger.take()
    stranger = things.orphan("pyrunc-cri", {})
    assert ledger.take().leaks(before) == []
    group = Path(things.cgroup(session.name("processes")))
    before = ledger.take()
    (group / "cgroup.procs").write_text(str(stranger))
    try:
        assert len(ledger.take().leaks(before)) == 2  # its child has no mark
    finally:
        Path(ledger.cgroup_root(), "cgroup.procs").write_text(str(stranger))
    own = things.orphan("own", {session.VARIABLE: session.mark()})
    assert {line.split()[1] for line in ledger.take().leaks(before)} > {str(own)}


def test_the_whole_machine_counts_on_request(
    things: Things, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYRUNC_LEDGER", "machine")
    before = ledger.take()
    group, stranger = things.cgroup(f"oth-{os.getpid()}"), things.orphan("pyrunc-cri", {})
    leaks = ledger.take().leaks(before)
    assert f"cgroup: {group}" in leaks and any(f" {stranger} (" in line for line in leaks), leaks


def test_objects_of_another_worker_are_no_leaks(
    things: Things, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYRUNC_LEDGER", "machine")
    monkeypatch.setattr(ledger, "OTHER_FOLDERS", {f"{things.folder}/"})
    own, before = session.mark(), ledger.take()
    other = own[:-1] + "z"  # neither one of two workers nor their parent
    theirs = [
        things.kinds[kind](name) for kind, name in (("cgroup", f"oth-{other}"), ("mount", "volume"))
    ]
    theirs += [f" {things.orphan('pyrunc-cri', {session.VARIABLE: other})} ("]
    contained = things.orphan("pyrunc-cri", {})
    (Path(theirs[0]) / "cgroup.procs").write_text(str(contained))
    try:
        leaks = ledger.take().leaks(before)
    finally:
        Path(ledger.cgroup_root(), "cgroup.procs").write_text(str(contained))
    assert not any(word in line for line in leaks for word in (*theirs, f" {contained} (")), leaks
    assert ledger.take(of_machine=False).leaks(before) == []
    monkeypatch.setattr(ledger, "FOLDERS", {f"{things.folder}/volume"})
    assert [line for line in ledger.take().leaks(before) if "mount" in line], (
        "the own folder may be below the other workers'"
    )
