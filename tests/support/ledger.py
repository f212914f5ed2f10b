"""What a test may leave behind, counted: one snapshot before, one after, and the difference is a leak.

Always: descriptors and children of the test's process, and what is the session's own, whatever else the machine does
meanwhile: processes with the session's mark in their environment or in the name of their cgroup, and all that descend from
these; mounts in folders of the session; network namespaces, links and cgroups with the mark in their names.
A process is known again by its pid and start time; its name may change in between (a zygote takes its own after execve).

With `PYRUNC_LEDGER=machine`, CI's way, all that belongs to the machine counts, whoever made it: also a leak under a name that
nobody meant, nftables with their elements, and every process that runs one of our programs. Nothing else may then work on
the machine. State entries are counted for the folders that a test names.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import session

OURS = ("pyrunc", "cri_server", "cni_plugins", "/memfd:launcher", "/memfd:pause", "pyrunc/native/")
FOLDERS: set[str] = set()
"""Folders of this session whose path does not contain its mark, each with a slash at its end."""

Entries = dict[str, dict[str, str]]


@dataclass
class Ledger:
    """One snapshot: the kind of thing -> what each is known by -> how it is told."""

    entries: Entries = field(default_factory=dict)

    def leaks(self, earlier: Ledger) -> list[str]:
        """What is here and was not there, a line each."""
        return [
            f"{kind}: {words}"
            for kind, found in sorted(self.entries.items())
            for known_by, words in sorted(found.items())
            if known_by not in earlier.entries.get(kind, {})
        ]


def take(folders: Iterable[Path] = ()) -> Ledger:
    """Count now."""
    entries: Entries = {
        "descriptor": _by_name(descriptors()),
        "child": children(),
        "process": own_processes(),
        "mount": _by_name(mounts()),
        "network namespace": _by_name(_listing("/run/netns")),
        "link": _by_name(name for _, name in socket.if_nameindex()),
        "cgroup": _by_name(cgroups()),
    }
    if counts_the_machine():
        entries |= {"nftables": _by_name(nftables()), "process of ours": our_processes()}
    else:
        for kind in ("mount", "network namespace", "link", "cgroup"):
            entries[kind] = {name: words for name, words in entries[kind].items() if _is_own(name)}
    for folder in folders:
        entries[f"state in {folder}"] = _by_name(os.path.relpath(path, folder) for path in _below(folder))
    return Ledger(entries)


def counts_the_machine() -> bool:
    """`PYRUNC_LEDGER=machine` says so; where the variable is not set, CI does."""
    return os.environ.get("PYRUNC_LEDGER", "machine" if os.environ.get("CI") else "") == "machine"


def settle(earlier: Ledger, folders: Iterable[Path] = (), timeout_s: float = 20.0) -> list[str]:
    """The leaks that are still there when the kernel had `timeout_s` to finish what it does in the background."""
    folders, deadline = list(folders), time.monotonic() + timeout_s
    while True:
        found = take(folders).leaks(earlier)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def descriptors() -> set[str]:
    """`number -> target` of this process, without what listing them opens and the launcher's copy, made once and kept."""
    found = set()
    for number in _listing("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if not target.startswith(("/proc/", "/memfd:pyrunc:launcher")):
            found.add(f"{number} -> {target}")
    return found


def children() -> dict[str, str]:
    """Living and dead children of this process, zombies included."""
    found: dict[str, str] = {}
    for task in _listing("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{task}/children").read_text().split()
        except OSError:
            continue
        for pid in pids:
            found |= _described(pid)
    return found


def own_processes() -> dict[str, str]:
    """This session's processes, wherever they ended up, without this one: those that bear its mark, and their descendants.

    A process of a container has the environment that its image says: it is known by its cgroup or its parents.
    """
    parents = {pid: _name_and_parent(pid)[1] for pid in _pids()}
    own = {pid for pid in parents if _bears_the_mark(pid)}
    found: dict[str, str] = {}
    for pid in parents:
        line = [pid]
        while line[-1] not in own and (above := parents.get(line[-1], "0")) not in ("0", *line):
            line.append(above)
        if line[-1] in own and int(pid) != os.getpid() and not _kept_by_a_zygote(pid):
            found |= _described(pid)
    return found


def _bears_the_mark(pid: str) -> bool:
    mark = session.mark()
    if not mark:
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"{session.VARIABLE}={mark}".encode() in file.read().split(b"\0"):
                return True
    except OSError:
        pass  # it is gone, or a zombie, which still has its cgroup
    try:
        return mark in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False


def our_processes() -> dict[str, str]:
    """Processes that run one of our programs, by executable or command line."""
    found: dict[str, str] = {}
    for pid in _pids():
        try:
            what = os.readlink(f"/proc/{pid}/exe") + Path(f"/proc/{pid}/cmdline").read_bytes().decode(
                "utf-8", "replace"
            )
        except OSError:
            continue
        if (
            any(word in what for word in OURS)
            and "pytest" not in what
            and int(pid) not in (os.getpid(), os.getppid())
            and not _kept_by_a_zygote(pid)
        ):
            found |= _described(pid)
    return found


def mounts() -> set[str]:
    """Mount points of this mount namespace with their type and source.

    Not /run/netns itself, which the first `ip netns add` of a machine's life binds onto itself for good.
    """
    found = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[4] == "/run/netns":
            continue
        found.add(f"{left.split()[4]} ({right.split()[0]} {right.split()[1]})")
    return found


def cgroups() -> set[str]:
    """Every group of the v2 tree, but for the server's default parent of all pods, which stays once it was made."""
    root = cgroup_root()
    return {f"{base}/{name}" for base, names, _ in os.walk(root) for name in names} - {f"{root}/pyrunc"}


def cgroup_root() -> str:
    """The v2 tree."""
    return "/sys/fs/cgroup/unified" if os.path.isdir("/sys/fs/cgroup/unified") else "/sys/fs/cgroup"


def nftables() -> set[str]:
    """The ruleset without its counters, a line each, with the place where the line stands."""
    listing = subprocess.run(
        ["nft", "--stateless", "list", "ruleset"], capture_output=True, text=True, check=False
    ).stdout
    found: set[str] = set()
    place: list[str] = []
    for line in listing.splitlines():
        word = line.strip()
        found.add(" / ".join([*place, word]))
        if word.endswith("{"):
            place.append(word.removesuffix(" {"))
        elif word == "}" and place:
            place.pop()
    return found


def _is_own(name: str) -> bool:
    """Whether a mount, link, cgroup or named namespace is this session's."""
    mark = session.mark()
    return bool(mark and mark in name) or any(folder in name for folder in FOLDERS)


def _by_name(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


def _described(pid: str) -> dict[str, str]:
    """Nothing for a process that has ended and was reaped since it was listed."""
    name, fields = _facts(pid)
    if not fields:
        return {}
    dead = " zombie" if fields[0] == "Z" else ""  # R, S and D change all the time
    return {f"{pid} since {fields[19]}{dead}": f"{pid} ({name}){dead}"}


def _kept_by_a_zygote(pid: str) -> bool:
    """Whether it is a zygote's spare child or one that compiles: some there always are, others each time, and they end with the
    zygote. Without a zygote above it is a leak like any other."""
    name, parent = _name_and_parent(pid)
    return name in ("pyrunc-spare", "pyrunc-compile") and _name_and_parent(parent)[0] == "pyrunc-zygote"


def _name_and_parent(pid: str) -> tuple[str, str]:
    name, fields = _facts(pid)
    return name, fields[1] if fields else "0"


def _facts(pid: str) -> tuple[str, list[str]]:
    """/proc/PID/stat: the name, and the fields from the third on; empty for a process that is not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a name may be cut within a letter
    except OSError:
        return "", []
    return text[text.index("(") + 1 : text.rindex(")")], text.rpartition(")")[2].split()


def _pids() -> list[str]:
    return [name for name in _listing("/proc") if name.isdigit()]


def _listing(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def _below(folder: Path) -> list[str]:
    """Every path below; what goes away meanwhile is not there."""
    return [f"{base}/{name}" for base, folders, files in os.walk(folder) for name in (*folders, *files)]
