"""Counts what a test leaves behind: a snapshot before and one after; the difference is a leak.

Always counted: descriptors and children of the test's process, and objects of this session:
processes with the session's mark in their environment or in the name of their cgroup, and their
descendants; mounts in folders of the session; network namespaces, network devices and cgroups with
the mark in their names. A process is identified by pid and start time; its name may change in
between (a zygote changes its own after execve).

With `PYRUNC_LEDGER=machine`, as in CI, all objects of the machine count: also a leak under an
unexpected name, nftables with their elements, and every process that runs one of the project's
programs. Nothing else may work on the machine then but other workers of the same run, which count
the objects with their own mark (`tests/support/schedule.py`).

Files in state directories are counted for the directories that a test names.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import session

OURS = ("pyrunc", "cri_server", "cni_plugins", "/memfd:launcher", "/memfd:pause", "pyrunc/native/")
FOLDERS: set[str] = set()
"""Folders of this session whose path does not contain its mark, each with a slash at its end."""
OTHER_FOLDERS: set[str] = set()
"""Folders of this run's other workers; those of this one may be within them."""

Entries = dict[str, dict[str, str]]
_PF_KTHREAD = 0x00200000  # include/linux/sched.h


@dataclass
class Ledger:
    """A snapshot of the machine: kind of object -> key of each object -> its description."""

    entries: Entries = field(default_factory=dict)
    of_machine: bool = True

    def leaks(self, earlier: Ledger) -> list[str]:
        """Return new objects since `earlier`, a line each."""
        return [
            f"{kind}: {words}"
            for kind, entries in sorted(self.entries.items())
            for known_by, words in sorted(entries.items())
            if known_by not in earlier.entries.get(kind, {})
        ]


def take(folders: Iterable[Path] = (), *, of_machine: bool = True) -> Ledger:
    """Take a snapshot; without `of_machine` only of the session's objects, whatever PYRUNC_LEDGER
    says."""
    there = processes()
    entries: Entries = {
        "descriptor": _by_name(descriptors()),
        "child": children(),
        "process": own_processes(there),
        "mount": _by_name(mounts()),
        "network namespace": _by_name(_listing("/run/netns")),
        "link": _by_name(name for _, name in socket.if_nameindex()),
        "cgroup": _by_name(cgroups()),
    }
    if of_machine and counts_the_machine():
        entries |= {"nftables": _by_name(nftables()), "process of ours": our_processes(there)}
        counts = _is_no_others
    else:
        counts = _is_own
    for kind in ("mount", "network namespace", "link", "cgroup"):
        entries[kind] = {name: words for name, words in entries[kind].items() if counts(name)}
    for folder in folders:
        entries[f"state in {folder}"] = _by_name(
            os.path.relpath(path, folder) for path in _below(folder)
        )
    return Ledger(entries, of_machine)


def counts_the_machine() -> bool:
    """Return whether all objects of the machine count: `PYRUNC_LEDGER=machine`, or CI without that
    variable."""
    return os.environ.get("PYRUNC_LEDGER", "machine" if os.environ.get("CI") else "") == "machine"


def settle(earlier: Ledger, folders: Iterable[Path] = (), timeout_s: float = 20.0) -> list[str]:
    """Return the leaks that remain after the kernel has had `timeout_s` to finish its background
    work."""
    folders, deadline = list(folders), time.monotonic() + timeout_s
    while True:
        leaks = take(folders, of_machine=earlier.of_machine).leaks(earlier)
        if not leaks or time.monotonic() > deadline:
            return leaks
        time.sleep(0.05)


@contextlib.contextmanager
def nothing_left(by: str, *, of_machine: bool = True) -> Iterator[None]:
    """Fail after the `with` block if objects remain that it made; `by` is the subject of the
    error."""
    before = take(of_machine=of_machine)
    yield
    leaks = settle(before)
    assert not leaks, f"{by} left behind:\n  " + "\n  ".join(leaks)


def descriptors() -> set[str]:
    """Return the descriptors of this process as `number -> target`."""
    targets = set()
    for number in _listing("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        # without the one of this listing, and the launcher's memfd, which is made once and stays
        # open
        if not target.startswith(("/proc/", "/memfd:pyrunc:launcher")):
            targets.add(f"{number} -> {target}")
    return targets


def children() -> dict[str, str]:
    """Return the children of this process, zombies included."""
    names: dict[str, str] = {}
    for task in _listing("/proc/self/task"):
        for pid in _children(f"/proc/self/task/{task}"):
            if (process := _process(pid)) is not None:
                names |= process.labels()
    return names


def own_processes(there: Processes) -> dict[str, str]:
    """Return the other processes of this session: those with its mark in their environment or
    cgroup, and their descendants."""
    # A container's process has the image's environment, without the mark.
    own = {pid for pid in there if _bears_the_mark(pid)}
    names: dict[str, str] = {}
    for pid, process in there.items():
        if (
            pid != str(os.getpid())
            and _first_above(pid, own, there)
            and not _kept_by_a_zygote(pid, there)
        ):
            names |= process.labels()
    return names


def our_processes(there: Processes) -> dict[str, str]:
    """Return processes that run one of the project's programs, by executable or command line,
    except those of another worker of this run."""
    names: dict[str, str] = {}
    others: set[str] | None = None
    for pid, process in there.items():
        try:
            what = os.readlink(f"/proc/{pid}/exe") + Path(
                f"/proc/{pid}/cmdline"
            ).read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if (
            any(word in what for word in OURS)
            and "pytest" not in what
            and int(pid) not in (os.getpid(), os.getppid())
            and not _kept_by_a_zygote(pid, there)
        ):
            if others is None:
                others = _of_other_workers(there)
            if _first_above(pid, {str(os.getpid()), *others}, there) not in others:
                names |= process.labels()
    return names


def _of_other_workers(there: Processes) -> set[str]:
    """Return the pids of the other workers of a parallel run, and of processes with their marks."""
    # A fork of a worker shows only the mark that all workers share.
    workers: set[str] = set()
    if "PYTEST_XDIST_WORKER" in os.environ:
        workers = {*_children(f"/proc/{os.getppid()}/task/{os.getppid()}")} - {str(os.getpid())}
    return {
        pid
        for pid in there
        if pid in workers
        or (
            (mark := _mark_of(pid)) not in ("", _mark_of("self"))
            and session.of_another_worker(mark)
        )
        or session.of_another_worker(_cgroup_of(pid))
    }


def _first_above(pid: str, pids: Container[str], there: Processes) -> str:
    """Return this process or its nearest ancestor that is in `pids`; empty if there is none."""
    line = [pid]
    while (
        line[-1] not in pids and line[-1] in there and (above := there[line[-1]].parent) not in line
    ):
        line.append(above)
    return line[-1] if line[-1] in pids else ""


def _bears_the_mark(pid: str) -> bool:
    mark = session.mark()
    return bool(mark) and (_mark_of(pid) == mark or mark in _cgroup_of(pid))


def _cgroup_of(pid: str) -> str:
    """Return the lines of the process's cgroups, which a zombie has too; empty for a process that
    is gone."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


def _mark_of(pid: str) -> str:
    """Return the mark in the environment at the process's start; empty without one."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            _, name, rest = file.read().partition(f"{session.VARIABLE}=".encode())
    except OSError:
        return ""
    return rest.partition(b"\0")[0].decode() if name else ""


def mounts() -> set[str]:
    """Return the mount points of this mount namespace, with type and source."""
    lines = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        # The first `ip netns add` after a boot mounts it on itself and never unmounts it.
        if left.split()[4] == "/run/netns":
            continue
        lines.add(f"{left.split()[4]} ({right.split()[0]} {right.split()[1]})")
    return lines


def cgroups() -> set[str]:
    """Return every cgroup of the v2 tree, except the server's default parent of all pods, which
    stays."""
    root = cgroup_root()
    return {f"{base}/{name}" for base, names, _ in os.walk(root) for name in names} - {
        f"{root}/pyrunc"
    }


def cgroup_root() -> str:
    """Return the mount point of the cgroup v2 tree."""
    return "/sys/fs/cgroup/unified" if os.path.isdir("/sys/fs/cgroup/unified") else "/sys/fs/cgroup"


def nftables() -> set[str]:
    """Return the lines of the ruleset without counters, each with the headings of its blocks before
    it."""
    listing = subprocess.run(
        ["nft", "--stateless", "list", "ruleset"], capture_output=True, text=True, check=False
    ).stdout
    lines: set[str] = set()
    place: list[str] = []
    for line in listing.splitlines():
        word = line.strip()
        lines.add(" / ".join([*place, word]))
        if word.endswith("{"):
            place.append(word.removesuffix(" {"))
        elif word == "}" and place:
            place.pop()
    return lines


def _is_own(name: str) -> bool:
    """Return whether a mount, network device, cgroup or named namespace is this session's."""
    mark = session.mark()
    return bool(mark and mark in name) or any(folder in name for folder in FOLDERS)


def _is_no_others(name: str) -> bool:
    """Return whether the object belongs to no other worker of this run."""
    in_other_folder = any(folder in name for folder in OTHER_FOLDERS) and not any(
        f in name for f in FOLDERS
    )
    return not in_other_folder and not session.of_another_worker(name)


def _by_name(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


@dataclass(frozen=True, slots=True)
class Process:
    """A process, with fields of /proc/PID/stat."""

    pid: str
    name: str
    state: str
    parent: str
    since: str

    def labels(self) -> dict[str, str]:
        """Return a dict with one entry: pid and start time -> pid and name."""
        dead = " zombie" if self.state == "Z" else ""  # the states R, S and D change all the time
        # The start time makes a reused pid another process.
        return {f"{self.pid} since {self.since}{dead}": f"{self.pid} ({self.name}){dead}"}


Processes = dict[str, Process]


def processes() -> Processes:
    """Return every process by its pid, without the kernel's threads."""
    readable = (_process(pid) for pid in _listing("/proc") if pid.isdigit())
    return {process.pid: process for process in readable if process is not None}


def _process(pid: str) -> Process | None:
    """Read a process; None for a process that is gone, and for a kernel thread."""
    try:
        # the kernel may cut a name within a letter
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return (
        None
        if int(fields[6]) & _PF_KTHREAD
        else Process(pid, name, fields[0], fields[1], fields[19])
    )


def _children(task: str) -> list[str]:
    try:
        return Path(f"{task}/children").read_text().split()
    except OSError:
        return []


def _kept_by_a_zygote(pid: str, there: Processes) -> bool:
    """Return whether the process is a shim or a network worker below a zygote."""
    process = there[pid]
    above = there.get(process.parent)
    # Such a process may stay after a test; without a zygote as its parent it is a leak.
    is_supervised = process.name in ("pyrunc-shim", "pyrunc-cni")
    return is_supervised and above is not None and above.name == "pyrunc-zygote"


def _listing(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def _below(folder: Path) -> list[str]:
    """Return all paths below the folder; entries that vanish meanwhile are skipped."""
    return [
        f"{base}/{name}" for base, folders, files in os.walk(folder) for name in (*folders, *files)
    ]
