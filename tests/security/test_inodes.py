"""Attacks through inodes of the host that a process of a container has open: it could change their
mode, owner or times.

fchmod(2) and fchown(2) need CAP_FOWNER and CAP_CHOWN, which containers have, and ignore the mount's
flags: a container whose stdin is the host's /dev/null could make it 0600 for the whole machine.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server
from tests.support.processes import installed, wait_until
from tests.system.harness import Box, Runtime

Config = dict[str, Any]
NULL = os.makedev(1, 3)


def devices_of_the_host() -> set[int]:
    """Return st_dev of every filesystem that is mounted on the host."""
    devices = set()
    # Pipes, sockets and memfds are in none of these filesystems.
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        major, minor = line.split()[2].split(":")
        devices.add(os.makedev(int(major), int(minor)))
    return devices


def links_of(pid: int) -> Iterator[str]:
    yield from (f"/proc/{pid}/{name}" for name in ("root", "cwd", "exe"))
    yield from (f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd"))


def held_of_the_host(pid: int, allowed: Path | None = None) -> list[str]:
    """Return the host's files that the process has open, as `link -> path`, except those below
    `allowed`."""
    host, files = devices_of_the_host(), []
    for link in links_of(pid):
        status = os.stat(link)
        if status.st_dev not in host:
            continue
        path = os.readlink(link)
        places = (
            []
            if allowed is None
            else [allowed / path.lstrip("/"), allowed / os.path.relpath(path, allowed)]
        )
        if not any(place.exists() and os.path.samestat(place.stat(), status) for place in places):
            files.append(f"{link} -> {path}")
    return files


def null_numbers(pid: int) -> set[int]:
    """Return which of the process's standard streams (0, 1, 2) are null devices."""
    return {n for n in range(3) if os.stat(f"/proc/{pid}/fd/{n}").st_rdev == NULL}


def processes_below(group: Path) -> dict[int, str]:
    """Return pids and names of all processes in a cgroup and in groups below it."""
    pids = [int(pid) for file in group.rglob("cgroup.procs") for pid in file.read_text().split()]
    return {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}


@contextmanager
def executing(*command: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(command, stdout=subprocess.PIPE, **more)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


def test_no_process_of_a_pod_has_a_file_of_the_host_open(server: Server) -> None:
    """In a shared pid namespace one container can take descriptors of another. No link in /proc/PID
    of the pause process, of a container or of an exec leads to a filesystem of the host, with and
    without stdin and a terminal."""
    config = server.pod_config("inodes")
    config.linux.security_context.namespace_options.pid = api.POD
    pod = server.run_pod(config, host_network=True)
    containers = []
    for name, changes in {
        "plain": {},
        "stdin": {"stdin": True},
        "tty": {"tty": True, "stdin": True},
    }.items():
        container_config = server.container_config(("sleep", "3600"), **changes)
        container_config.metadata.name = container_config.log_path = name
        container_config.linux.security_context.namespace_options.pid = api.POD
        containers.append(server.launch(pod, container_config))
    (group,) = server._cgroups()
    enter = ("nsenter", f"--net=/proc/{server.pid}/ns/net")  # where the streaming server listens
    client = [*enter, *installed("pyrunc-cri"), "--address", f"unix://{server.socket}", "exec"]
    try:
        with (
            executing(*client, containers[0], "sleep", "1001"),
            executing(*client, "-i", containers[0], "sleep", "1002", stdin=subprocess.PIPE),
            executing(*client, "-i", "-t", containers[0], "sleep", "1003", stdin=subprocess.PIPE),
        ):
            # Until its command is executed, an exec runs the launcher, which has descriptors open
            # and cannot be traced.
            programs = ["pause", *["sleep"] * 6]
            assert wait_until(lambda: sorted(processes_below(group).values()) == programs, 30), (
                processes_below(group)
            )
            processes = processes_below(group)
            assert [
                f"{processes[pid]}: {link}" for pid in processes for link in held_of_the_host(pid)
            ] == []
            nulls = sorted(sorted(null_numbers(pid)) for pid in processes)
            assert nulls == [
                [],
                [],
                [],
                [],
                [0],
                [0],
                [0, 1, 2],
            ], "of pause, of a container, of an exec"
    finally:
        server.stop_pod(pod)
        server.remove_pod(pod)


def mapped(config: Config) -> None:
    config["linux"]["namespaces"].append({"type": "user"})
    config["linux"]["uidMappings"] = [{"containerID": 0, "hostID": 0, "size": 65536}]
    config["linux"]["gidMappings"] = [{"containerID": 0, "hostID": 0, "size": 65536}]


def without_mounts(config: Config) -> None:
    namespaces = [entry for entry in config["linux"]["namespaces"] if entry["type"] != "mount"]
    config["linux"]["namespaces"], config["mounts"] = namespaces, []


def as_user(config: Config) -> None:
    config["process"]["user"] = {"uid": 1000, "gid": 1000}


@pytest.mark.parametrize("change", [None, as_user, mapped, without_mounts])
def test_no_process_of_a_bundle_has_a_file_of_the_host_open(runtime: Runtime, change: Any) -> None:
    """After create, start, run --detach and exec --detach with /dev/null as stdio, no link in
    /proc/PID leads to a filesystem of the host, except into the container's root."""
    nothing = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }

    def call(*words: str) -> None:
        command = [*runtime.program, "--root", str(runtime.root), *words]
        subprocess.run(command, check=True, timeout=60, **nothing)

    pids = []
    for verb in (("create",), ("run", "--detach")):
        box: Box = runtime.box("sleep", "3600", change=change)
        call(*verb, "--bundle", str(box.folder), box.id)
        waiting = [f"{n} of {verb}" for n in null_numbers(box.pid)]
        assert len(waiting) == 3
        # The container's root is a folder of the host.
        assert held_of_the_host(box.pid, runtime.rootfs) == []
        if verb == ("create",):
            box.start().ok()
        for attempt in ("whole", "kept"):
            file = box.folder / attempt
            call("exec", "--detach", "--pid-file", str(file), box.id, "sleep", "3600")
            pids.append(int(file.read_text()))
        pids.append(box.pid)
    for pid in pids:
        assert wait_until(lambda pid=pid: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", 30)  # type: ignore[misc]
        assert null_numbers(pid) == {0, 1, 2}
        assert held_of_the_host(pid, runtime.rootfs) == []


def test_hooks_in_the_container_have_no_file_of_the_host_open(
    runtime: Runtime, tmp_path: Path
) -> None:
    """createContainer and startContainer hooks run in the container's namespaces, where neighbours
    may see them. Their standard streams lead to no filesystem of the host."""

    # This hook still sees the host's tree; its output is the one file of the host that it opens.
    created = str(tmp_path / "created")

    def change(config: Config) -> None:
        script = [
            "sh",
            "-c",
            "stat -L -c '%d %n' /proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2 > $0",
        ]
        config["hooks"] = {
            "createContainer": [
                {"path": "/bin/sh", "args": [*script, created], "env": ["PATH=/bin:/usr/bin"]}
            ],
            "startContainer": [
                {"path": "/bin/sh", "args": [*script, "/tmp/start"], "env": ["PATH=/bin"]}
            ],
        }
        config["root"]["readonly"] = False
        config["mounts"].append({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"})

    box = runtime.box("sh", "-c", "cat /tmp/start", change=change)
    out = runtime("run", "--bundle", str(box.folder), box.id).ok().out
    devices = [int(line.split()[0]) for line in out.splitlines()]
    assert len(devices) == 3 and devices[0] not in devices_of_the_host(), out
    stdin, stdout, stderr = (
        int(line.split()[0]) for line in Path(created).read_text().splitlines()
    )
    assert stdout == os.stat(created).st_dev
    assert not {stdin, stderr} & devices_of_the_host()


def test_masked_paths_are_not_the_hosts_null_device(runtime: Runtime) -> None:
    """A null device masks a file, so that chmod(1) of the masked path changes the device's inode.
    This inode, like that of /dev/null, is not on a filesystem of the host, also with a user
    namespace."""
    for change in (None, mapped):
        box = runtime.box(
            "sleep", "3600", change=change, maskedPaths=["/proc/keys", "/proc/timer_list"]
        )
        box.up()
        host = devices_of_the_host()
        for path in ("/proc/keys", "/proc/timer_list", "/dev/null"):
            status = os.stat(f"/proc/{box.pid}/root{path}")
            assert status.st_rdev == NULL and status.st_dev not in host, (path, change)
