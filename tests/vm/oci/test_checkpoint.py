"""Tests checkpoint and restore by the real CRIU: a counting container continues where it was."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import groups
from tests.support.processes import wait_until
from tests.vm.oci import commands
from tests.vm.oci.commands import Container, User

MIB = 1 << 20
COUNT = "i=0; while :; do echo $i > /tmp/next; mv /tmp/next /count; i=$((i+1)); sleep 0.1; done"


@pytest.fixture(params=["cgroupfs", "systemd"])
def counting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Container]:
    """Run a container that counts in a file, with settings that CRIU must restore: a bind mount,
    masked and read-only paths, a seccomp filter, limits."""
    container = Container(
        tmp_path, User(), *(["--systemd-cgroup"] if request.param == "systemd" else [])
    )
    (tmp_path / "outside").mkdir()

    def change(config: dict[str, Any]) -> None:
        bind = {
            "destination": "/outside",
            "type": "bind",
            "source": str(tmp_path / "outside"),
            "options": ["rbind", "ro"],
        }
        config["mounts"].append(bind)

    container.make(
        "sh",
        "-c",
        COUNT,
        change=change,
        maskedPaths=["/proc/kcore", "/proc/keys", "/sys/firmware"],
        readonlyPaths=["/proc/sys"],
        seccomp={
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}],
        },
        resources={
            "memory": {"limit": 64 * MIB},
            "pids": {"limit": 20},
            "devices": [{"allow": False, "access": "rwm"}],
        },
    )
    container.run()
    yield container
    container.remove()
    assert not Path(f"/run/pyrunc/{container.id}").exists()


def count(container: Container) -> int:
    """Return the last number that the container has written; -1 if there is none."""
    try:
        return int((container.bundle / "rootfs/count").read_text())
    except FileNotFoundError:
        return -1


def wait_beyond(container: Container, number: int) -> None:
    assert wait_until(lambda: count(container) > number, 30, 0.2)


def images(container: Container, name: str = "images") -> list[str]:
    return [
        "--image-path",
        str(container.folder / name),
        "--work-path",
        str(container.folder / "work"),
    ]


def restore(container: Container, *options: str) -> None:
    container.pyrunc(
        "restore", "-d", "--bundle", container.bundle, *images(container), *options, container.id
    )


def test_a_restored_container_continues_its_count(counting: Container) -> None:
    wait_beyond(counting, 5)
    counting.pyrunc("checkpoint", *images(counting), counting.id)
    assert counting.id not in counting.pyrunc("list", "-q").stdout.split()
    at_dump = count(counting)
    time.sleep(0.5)
    assert count(counting) == at_dump
    restore(counting)
    assert counting.state["status"] == "running"
    wait_beyond(counting, at_dump)
    assert count(counting) < at_dump + 100


def test_the_pid_file_and_mounts_are_restored(counting: Container) -> None:
    wait_beyond(counting, 2)
    counting.pyrunc("checkpoint", *images(counting), counting.id)
    (counting.folder / "outside/new").touch()
    restore(counting, "--pid-file", str(counting.folder / "pid"))
    pid = counting.state["pid"]
    assert (counting.folder / "pid").read_text() == str(pid)
    assert (counting.group / "memory.max").read_text().strip() == str(64 * MIB)
    assert (counting.group / "pids.max").read_text().strip() == "20"
    assert str(pid) in (counting.group / "cgroup.procs").read_text().split()
    status = Path(f"/proc/{pid}/status").read_text()
    assert "Seccomp:\t2" in status and "NoNewPrivs:\t1" in status
    inside = counting.sh(
        "ls /outside; touch /outside/x; cat /proc/keys; echo x > /proc/sys/kernel/hostname;"
        " mkdir /d",
        check=False,
    )
    assert inside.stdout.split() == ["new"]
    assert (
        inside.stderr.count("Read-only file system") == 2
        and "can't create directory '/d'" in inside.stderr
    )
    subprocess.run(["mknod", f"/proc/{pid}/root/dev/mem", "c", "1", "1"], check=True)
    assert "not permitted" in counting.sh(": </dev/mem", check=False).stderr
    mounts = {line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()}
    assert {
        "/",
        "/proc",
        "/dev",
        "/dev/pts",
        "/outside",
        "/proc/sys",
        "/proc/keys",
        "/sys/firmware",
    } <= mounts
    assert str(counting.bundle) not in Path("/proc/self/mountinfo").read_text()
    counting.pyrunc("kill", counting.id, "KILL")
    counting.wait("stopped")


def test_mounts_at_links_of_the_image_are_restored(container: Container) -> None:
    source = container.folder / "secrets"
    source.mkdir()

    def change(config: dict[str, Any]) -> None:
        bind = {"destination": "/var/run/secrets", "type": "bind", "source": str(source)}
        config["mounts"].append({**bind, "options": ["rbind", "ro"]})

    container.make("sh", "-c", COUNT, change=change, maskedPaths=["/masked"])
    root = container.bundle / "rootfs"
    for name in ("run", "var"):
        (root / name).mkdir(exist_ok=True)
    (root / "var/run").symlink_to("/run")
    (root / "file").write_text("content")
    (root / "masked").symlink_to("file")
    container.run()
    wait_beyond(container, 2)
    container.pyrunc("checkpoint", *images(container), container.id)
    (source / "token").touch()
    at_dump = count(container)
    restore(container)
    wait_beyond(container, at_dump)
    assert container.sh("ls /var/run/secrets; cat /file").stdout.split() == ["token"]


def test_a_file_of_the_host_as_stdout_is_replaced_after_a_redirection(
    container: Container,
) -> None:
    """At the checkpoint the shell's stdout is a file of the container; after the restore it is the
    new file of the host."""
    script = "until [ -e /go ]; do sleep 0.1; done >/own; while :; do echo after; sleep 0.1; done"
    container.make("sh", "-c", script)
    container.run()
    assert wait_until((container.bundle / "rootfs/own").exists, 30, 0.2)
    container.pyrunc("checkpoint", *images(container), container.id)
    (container.bundle / "rootfs/go").touch()
    output = container.folder / "output"
    words = ["restore", "-d", "--bundle", container.bundle, *images(container), container.id]
    # CRIU requires that the new file has the mode of the old one, for stderr too.
    with open(output, "wb") as stdout:
        subprocess.run(
            [commands.PYRUNC, *words],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            check=True,
        )
    assert wait_until(lambda: "after\n" in output.read_text(), 30, 0.2)


def test_leave_running_keeps_the_container_running(container: Container) -> None:
    container.make("sh", "-c", COUNT)
    container.run()
    wait_beyond(container, 2)
    container.pyrunc("checkpoint", "--leave-running", *images(container), container.id)
    assert container.state["status"] == "running"
    wait_beyond(container, count(container))


def test_a_pre_dump_makes_the_dump_smaller(container: Container) -> None:
    # The process with the memory does not fork: a child that is dumped before its execve would have
    # all of the memory, and no earlier dump.
    container.make(
        "sh", "-c", f"({COUNT}) & a=$(head -c 20000000 /dev/zero | tr '\\0' x); : > /big; wait"
    )
    container.run()
    assert wait_until((container.bundle / "rootfs/big").exists, 60, 0.5)
    wait_beyond(container, 0)
    container.pyrunc("checkpoint", "--pre-dump", *images(container, "parent"), container.id)
    assert container.state["status"] == "running"
    container.pyrunc("checkpoint", "--parent-path", "../parent", *images(container), container.id)
    parent, final = (
        sum(f.stat().st_size for f in (container.folder / name).glob("pages-*"))
        for name in ("parent", "images")
    )
    assert parent > 20_000_000 and final < parent / 4
    at_dump = count(container)
    restore(container)
    wait_beyond(container, at_dump)


def test_a_paused_container_can_be_checkpointed(container: Container) -> None:
    container.make("sh", "-c", COUNT)
    container.run()
    wait_beyond(container, 2)
    container.pyrunc("pause", container.id)
    container.pyrunc("checkpoint", *images(container), container.id)
    at_dump = count(container)
    restore(container)
    wait_beyond(container, at_dump)


@pytest.mark.parametrize("redirection", ["", ">/own 2>/own"])
def test_an_attached_restore_uses_new_pipes(container: Container, redirection: str) -> None:
    """`restore` gets the program's later output and ends with its exit code, even if at the
    checkpoint the shell's stdout and stderr are files of the container."""
    wait = f"until [ -e /go ]; do sleep 0.1; done {redirection}"
    container.make("sh", "-c", f"echo before; touch /said; {wait}; echo after; exit 3")
    runtime = [str(commands.PYRUNC), "run", "--bundle", str(container.bundle), container.id]
    with subprocess.Popen(
        runtime, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        try:
            assert wait_until((container.bundle / "rootfs/said").exists, 30, 0.2)
            if redirection:
                assert wait_until((container.bundle / "rootfs/own").exists, 30, 0.2)
            container.pyrunc("checkpoint", *images(container), container.id)
            assert running.communicate(timeout=60)[0] == b"before\n"
        finally:
            running.kill()
    (container.bundle / "rootfs/go").touch()
    again = [
        str(commands.PYRUNC),
        "restore",
        "--bundle",
        str(container.bundle),
        *images(container),
        container.id,
    ]
    done = subprocess.run(
        again, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (3, b"after\n"), done.stderr
    assert container.id not in container.pyrunc("list", "-q").stdout.split()


def test_a_container_with_a_network_namespace_by_path_is_restored(container: Container) -> None:
    namespace = f"/run/netns/{container.id}"
    subprocess.run(["ip", "netns", "add", container.id], check=True)
    try:
        kinds = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "cgroup")]
        container.make(
            "sh", "-c", COUNT, namespaces=[*kinds, {"type": "network", "path": namespace}]
        )
        container.run()
        wait_beyond(container, 2)
        container.pyrunc("checkpoint", *images(container), container.id)
        at_dump = count(container)
        restore(container)
        wait_beyond(container, at_dump)
        assert os.stat(f"/proc/{container.state['pid']}/ns/net").st_ino == os.stat(namespace).st_ino
    finally:
        container.remove()
        subprocess.run(["ip", "netns", "del", container.id], check=True)


def test_a_restored_cgroup_belongs_to_its_user_again(container: Container) -> None:
    """The container's ordinary user owns the restored group and may make groups below it, but does
    not own its limits."""

    def change(config: dict[str, Any]) -> None:
        config["process"]["user"] = {"uid": 1000, "gid": 1000}
        (tree,) = (mount for mount in config["mounts"] if mount["destination"] == "/sys/fs/cgroup")
        tree["options"] = [option for option in tree["options"] if option != "ro"]

    container.make("sh", "-c", "while :; do sleep 0.1; done", change=change)
    container.run()
    container.pyrunc("checkpoint", *images(container), container.id)
    restore(container)
    owners = {
        name: (container.group / name).stat().st_uid for name in (".", "cgroup.procs", "memory.max")
    }
    assert owners == {".": 1000, "cgroup.procs": 1000, "memory.max": 0}
    container.sh("mkdir /sys/fs/cgroup/below && rmdir /sys/fs/cgroup/below")


def test_a_refused_checkpoint_changes_nothing(container: Container) -> None:
    container.make("sleep", "1000")
    container.pyrunc("create", "--bundle", container.bundle, container.id)
    refused = container.pyrunc("checkpoint", *images(container), container.id, check=False)
    assert (
        refused.returncode == 1
        and "Container cannot be checkpointed in created state" in refused.stderr
    )
    container.pyrunc("start", container.id)
    for options, why in (
        (["--parent-path", "/abs"], "must be relative"),
        (["--parent-path", "../none"], "none"),
        (["--manage-cgroups-mode", "odd"], "one of ignore"),
        (["--empty-ns", "pid"], "only network"),
        (["--page-server", "nowhere"], "ADDRESS:PORT"),
    ):
        refused = container.pyrunc(
            "checkpoint", *images(container), *options, container.id, check=False
        )
        assert refused.returncode == 1 and why in refused.stderr, refused.stderr
    assert container.state["status"] == "running"


def test_a_failed_restore_leaves_nothing(container: Container) -> None:
    container.make("sleep", "1000")
    container.run()
    container.pyrunc("checkpoint", *images(container), container.id)
    (container.folder / "images/core-1.img").write_bytes(b"damaged")
    before = Path("/proc/self/mountinfo").read_text()
    words = ["restore", "-d", "--bundle", container.bundle, *images(container), container.id]
    failed = container.pyrunc(*words, check=False)
    assert failed.returncode == 1 and "criu failed" in failed.stderr and "Error" in failed.stderr
    assert Path("/proc/self/mountinfo").read_text() == before
    assert container.id not in container.pyrunc("list", "-q").stdout.split()
    assert not groups.below(commands.CGROUPS, container.id)
    (container.folder / "images/descriptors.json").unlink()
    assert "no checkpoint" in container.pyrunc(*words, check=False).stderr


def test_engines_can_probe_for_checkpoints() -> None:
    # podman and CRI-O run these commands to find out whether checkpoints can be made.
    root = User()
    assert root.run(commands.PYRUNC, "checkpoint", "--help").returncode == 0
    probe = root.run(commands.PYRUNC, "restore", "--lsm-mount-context", check=False)
    assert "flag needs an argument" in probe.stderr
    features = json.loads(root.output(commands.PYRUNC, "features"))
    assert features["annotations"]["org.opencontainers.runc.checkpoint.enabled"] == "true"
