"""Checks for leftovers: shims, network namespaces and cgroups of pods that have no record, mounts
below the server's directories, and damaged records. Also checks whether a server answers."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from cri_server.doctor import cgroups
from cri_server.doctor.model import CheckResult, Level, Machine, fine, note, warning
from cri_server.store.disk import records_in
from cri_server.store.facts import ProcessIdentity, entries
from cri_server.store.paths import Paths
from pyrunc.atomic_file import read_json
from pyrunc.errors import Error
from pyrunc.kernel.mountinfo import mount_points
from pyrunc.shim.messages import SHIM_RECORD

ANSWER_S = 3.0
SCOPE = re.compile(r"cri-pyrunc-([0-9a-f]{64})\.scope")
PLAIN = re.compile(r"([0-9a-f]{64})")
LISTED_MAX = 3


def server(host: Machine) -> Iterator[CheckResult]:
    """Check that a server answers on its socket."""
    path = host.config.socket_path
    problem = _unanswered(path)
    if not problem:
        yield fine("server", f"answers at {path}")
        return
    shims = len(_shims(host))
    pods = (
        f"{shims} pods run on, but kubelet cannot stop, probe or list them"
        if shims
        else "no pod can start"
    )
    start = f"pyrunc-cri serve --listen unix://{path}"
    remedy = host.service("start", "pyrunc-cri", f"{start} (systemd does not run here)")
    yield warning("server", f"no server at {path}: {problem}", pods, remedy)


def _unanswered(path: Path) -> str:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            # connect(2) to a unix socket blocks while the backlog of a hanging server is full.
            sock.settimeout(ANSWER_S)
            sock.connect(str(path))
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def pods(host: Machine) -> Iterator[CheckResult]:
    """Look for running pods that have no record below the root directory. A starting server ends
    such pods."""
    recorded = set(records_in(_paths(host).sandbox_records))
    stray = {name: pid for name, pid in _shims(host).items() if name not in recorded}
    if stray:
        listed = [f"{name[:12]} (pid {pid})" for name, pid in stray.items()]
        by_hand = "stop the server and run pyrunc-cri serve again"
        restart = host.service("restart", "pyrunc-cri", by_hand)
        yield warning(
            "leftover-shims",
            f"{len(stray)} pods of shims have no record: {_some(listed)}",
            "their processes and addresses are of no use",
            f"{restart} (a starting server ends them; pods with a record run on)",
        )
    else:
        yield fine("leftover-shims", "none")


def mounts(host: Machine) -> Iterator[CheckResult]:
    """Look for mounts below the server's directories. This version makes none there; they come from
    other software or earlier versions."""
    # mountinfo lists resolved paths, and /var/run is a link to /run.
    folders = [os.path.realpath(path) for path in (host.config.root, host.config.state)]
    paths = [
        m.path for m in mount_points() if any(m.path.startswith(f"{folder}/") for folder in folders)
    ]
    if paths:
        yield warning(
            "leftover-mounts",
            f"{len(paths)} mounts below the server's directories: {_some(paths)}",
            "the server cannot remove files below them",
            f"umount -l {paths[-1]}",
        )
    else:
        yield fine("leftover-mounts", "none")


def names(host: Machine) -> Iterator[CheckResult]:
    """Look for leftover network namespaces: files in `netns_dir` with the name of a sandbox that
    has no record, no state folder and no network record."""
    paths, folder = _paths(host), host.path(host.config.network.netns_dir)
    recorded = {
        *records_in(paths.sandbox_records),
        *entries(paths.sandbox_states),
        *records_in(paths.root / "network"),
    }
    stray = sorted(
        name for name in entries(folder) if PLAIN.fullmatch(name) and name not in recorded
    )
    if not stray:
        yield fine("leftover-names", "none")
        return
    place = f"{host.config.network.netns_dir}/{stray[0]}"
    yield note(
        "leftover-names",
        f"{len(stray)} names of network namespaces without a record: {_some(stray)}",
        "they belong to a server with another root, or to pods whose records were lost; each keeps"
        " a network namespace",
        f"umount -l {place}; rm {place}",
    )


def groups(host: Machine) -> Iterator[CheckResult]:
    """Look for cgroups with the name of a container or pod that has neither a record nor a state
    folder."""
    top = cgroups.tree(host)
    if not top:
        return
    paths = _paths(host)
    recorded = {*records_in(paths.sandbox_records), *records_in(paths.container_records)}
    recorded |= {*entries(paths.sandbox_states), *entries(paths.container_states)}
    parent = host.config.cgroup.default_parent.strip("/") or "pyrunc"
    stray = _stray(host.path(top), SCOPE, recorded) + _stray(
        host.path(top) / parent, PLAIN, recorded
    )
    if not stray:
        yield fine("leftover-groups", "none")
        return
    living = [group for group in stray if "populated 1" in _events(group)]
    chosen = (living or stray)[0]
    listed = _some(str(g) for g in living or stray)
    yield CheckResult(
        "leftover-groups",
        Level.WARNING if living else Level.NOTE,
        f"{len(living)} cgroups with processes and without a record: {listed}"
        if living
        else f"{len(stray)} empty cgroups: {listed}",
        "they belong to a server with another root, or to pods whose records were lost"
        if living
        else "each takes some KiB of the kernel's memory",
        f"look at {chosen}/cgroup.procs; to end them: echo 1 > {chosen}/cgroup.kill"
        if living
        else f"rmdir {chosen}",
    )


def records(host: Machine) -> Iterator[CheckResult]:
    """Look for files `*.damaged`: records that a starting server could not read and has renamed."""
    paths = _paths(host)
    folders = (paths.sandbox_records, paths.container_records)
    damaged = [f / name for f in folders for name in entries(f) if name.endswith(".damaged")]
    if damaged:
        yield note(
            "damaged-records",
            f"{len(damaged)} damaged records: {_some(map(str, damaged))}",
            "a disk failed, or another process wrote to them; their pods are lost",
            f"examine them, then rm {damaged[0]}",
        )
    else:
        yield fine("damaged-records", "none")


def _shims(host: Machine) -> dict[str, int]:
    """Return the running shims: a dict from the sandbox's id to the shim's pid."""
    pids = {}
    states = _paths(host).sandbox_states
    for name in entries(states):
        try:
            process = ProcessIdentity.of(read_json(str(states / name / SHIM_RECORD)))
        except (OSError, Error):
            continue
        if process.alive():
            pids[name] = process.pid
    return pids


def _stray(top: Path, pattern: re.Pattern[str], recorded: set[str]) -> list[Path]:
    paths = []
    for folder, names, _ in os.walk(top):
        for name in list(names):
            match = pattern.fullmatch(name)
            if match:
                # Keeps os.walk from descending: a container may have made any number of cgroups
                # below its own.
                names.remove(name)
                if match[1] not in recorded:
                    paths.append(Path(folder, name))
    return sorted(paths)


def _events(group: Path) -> str:
    try:
        return (group / "cgroup.events").read_text()
    except OSError:
        return ""


def _paths(host: Machine) -> Paths:
    return Paths(host.path(host.config.root), host.path(host.config.state))


def _some(names: Iterator[str] | list[str] | map[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - LISTED_MAX} more" if len(listed) > LISTED_MAX else ""
    return ", ".join(listed[:LISTED_MAX]) + more
