"""What should not be there: shims and groups of pods that no record knows, mounts below our
folders, damaged records; and whether a server answers at all."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from cri_server.doctor import cgroups
from cri_server.doctor.model import Finding, Host, Level, fine
from cri_server.store.disk import records_in
from cri_server.store.facts import Process, entries
from cri_server.store.paths import Paths
from pyrunc.atomic_file import read_json
from pyrunc.errors import Error
from pyrunc.kernel.mountinfo import mount_points
from pyrunc.shim.messages import SHIM_RECORD

ANSWER_S = 3.0
SCOPE = re.compile(r"cri-pyrunc-([0-9a-f]{64})\.scope")
PLAIN = re.compile(r"([0-9a-f]{64})")
SHOWN = 3


def server(host: Host) -> Iterator[Finding]:
    path = host.config.socket_path
    problem = _unanswered(path)
    if not problem:
        yield fine("server", f"answers at {path}")
        return
    shims = len(_shims(host))
    pods = (
        f"{shims} pods run on, but kubelet cannot stop, probe or list them"
        if shims
        else "no pod can be run"
    )
    start = f"pyrunc-cri serve --listen unix://{path}"
    mend = host.service("start", "pyrunc-cri", f"{start} (no systemd runs here)")
    yield Finding("server", Level.WARNING, f"no server at {path}: {problem}", pods, mend)


def _unanswered(path: Path) -> str:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(ANSWER_S)
            sock.connect(str(path))
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def pods(host: Host) -> Iterator[Finding]:
    """Shims of this state directory whose sandbox has no record: a server ends them when it starts."""
    known = set(records_in(_paths(host).sandbox_records))
    stray = {name: pid for name, pid in _shims(host).items() if name not in known}
    if stray:
        yield Finding(
            "leftover-shims",
            Level.WARNING,
            f"{len(stray)} shims hold pods without a record: {_some(f'{n[:12]} (pid {p})' for n, p in stray.items())}",
            "their processes and addresses serve no pod",
            f"{host.service('restart', 'pyrunc-cri', 'end the server and run pyrunc-cri serve again')} (the server ends them when it starts; pods with a record run on)",
        )
    else:
        yield fine("leftover-shims", "none")


def mounts(host: Host) -> Iterator[Finding]:
    """Mounts below the server's folders. This version makes none there: another program or an
    earlier version has made them."""
    folders = [os.path.realpath(path) for path in (host.config.root, host.config.state)]
    found = [
        m.path for m in mount_points() if any(m.path.startswith(f"{folder}/") for folder in folders)
    ]
    if found:
        yield Finding(
            "leftover-mounts",
            Level.WARNING,
            f"{len(found)} mounts below our folders: {_some(found)}",
            "what is below them cannot be removed",
            f"umount -l {found[-1]}",
        )
    else:
        yield fine("leftover-mounts", "none")


def names(host: Host) -> Iterator[Finding]:
    """Names of network namespaces that are called like sandboxes of ours, of which no record or
    attachment knows."""
    paths, folder = _paths(host), host.path(host.config.network.netns_dir)
    known = {
        *records_in(paths.sandbox_records),
        *entries(paths.sandbox_states),
        *records_in(paths.root / "network"),
    }
    found = sorted(name for name in entries(folder) if PLAIN.fullmatch(name) and name not in known)
    if not found:
        yield fine("leftover-names", "none")
        return
    place = f"{host.config.network.netns_dir}/{found[0]}"
    yield Finding(
        "leftover-names",
        Level.NOTE,
        f"{len(found)} names of network namespaces that no record knows: {_some(found)}",
        "they are of another server's root, or of pods whose records were lost; each keeps a network namespace",
        f"umount -l {place}; rm {place}",
    )


def groups(host: Host) -> Iterator[Finding]:
    """Groups with a container's or pod's name that no record below the root knows."""
    top = cgroups.tree(host)
    if not top:
        return
    paths = _paths(host)
    known = {*records_in(paths.sandbox_records), *records_in(paths.container_records)}
    known |= {*entries(paths.sandbox_states), *entries(paths.container_states)}
    parent = host.config.cgroup.default_parent.strip("/") or "pyrunc"
    found = _stray(host.path(top), SCOPE, known) + _stray(host.path(top) / parent, PLAIN, known)
    if not found:
        yield fine("leftover-groups", "none")
        return
    living = [group for group in found if "populated 1" in _events(group)]
    chosen = (living or found)[0]
    shown = _some(str(g) for g in living or found)
    yield Finding(
        "leftover-groups",
        Level.WARNING if living else Level.NOTE,
        f"{len(living)} groups with processes that no record knows: {shown}" if living else f"{len(found)} empty groups: {shown}",
        "they are of another server's root, or of pods whose record was lost" if living else "each takes some KiB of the kernel's memory",
        f"look at {chosen}/cgroup.procs; to end them: echo 1 > {chosen}/cgroup.kill" if living else f"rmdir {chosen}",
    )  # fmt: skip


def records(host: Host) -> Iterator[Finding]:
    paths = _paths(host)
    folders = (paths.sandbox_records, paths.container_records)
    damaged = [f / name for f in folders for name in entries(f) if name.endswith(".damaged")]
    if damaged:
        yield Finding(
            "damaged-records",
            Level.NOTE,
            f"{len(damaged)} records were put aside: {_some(map(str, damaged))}",
            "a disk failed, or another program wrote to them; their pods were given up",
            f"look at them, then rm {damaged[0]}",
        )
    else:
        yield fine("damaged-records", "none")


def _shims(host: Host) -> dict[str, int]:
    """Living shims by the id of their sandbox."""
    found = {}
    states = _paths(host).sandbox_states
    for name in entries(states):
        try:
            process = Process.of(read_json(str(states / name / SHIM_RECORD)))
        except (OSError, Error):
            continue
        if process.alive():
            found[name] = process.pid
    return found


def _stray(top: Path, pattern: re.Pattern[str], known: set[str]) -> list[Path]:
    found = []
    for folder, names, _ in os.walk(top):
        for name in list(names):
            match = pattern.fullmatch(name)
            if match:
                names.remove(name)
                if match[1] not in known:
                    found.append(Path(folder, name))
    return sorted(found)


def _events(group: Path) -> str:
    try:
        return (group / "cgroup.events").read_text()
    except OSError:
        return ""


def _paths(host: Host) -> Paths:
    return Paths(host.path(host.config.root), host.path(host.config.state))


def _some(names: Iterator[str] | list[str] | map[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
