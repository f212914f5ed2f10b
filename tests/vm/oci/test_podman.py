"""Tests Debian's podman as root with our runtime: the requested settings are read back from the
kernel's files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.oci import commands, engines
from tests.vm.oci.commands import User
from tests.vm.oci.engines import IMAGE, Podman

pytestmark = pytest.mark.slow
MIB = 1 << 20


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    engines.configure()
    engine = Podman(User())
    engine("import", str(engines.box(tmp_path_factory.mktemp("image"))), IMAGE)
    assert (
        engine.output("info", "--format", "{{.Host.OCIRuntime.Name}} {{.Host.CgroupManager}}")
        == "pyrunc systemd"
    )
    yield engine
    engine("rm", "--all", "--force", "--time", "0")
    assert not list(Path("/run/pyrunc").glob("[0-9a-f]" * 64))
    assert not list(Path("/sys/fs/cgroup/machine.slice").glob("libpod-*"))


@pytest.fixture(scope="module")
def long(podman: Podman) -> str:
    """Return a container with limits that runs as long as this file's tests."""
    podman.start("long", "--memory", "64m", "--cpus", "0.5", "--pids-limit", "44")
    return "long"


def test_podmans_limits_are_in_the_kernels_files(podman: Podman, long: str) -> None:
    group = podman.group(long)
    assert (
        group.name.startswith("libpod-")
        and group.name.endswith(".scope")
        and group.parent.name == "machine.slice"
    )
    values = {
        name: (group / name).read_text().strip() for name in ("memory.max", "cpu.max", "pids.max")
    }
    assert values == {"memory.max": str(64 * MIB), "cpu.max": "50000 100000", "pids.max": "44"}
    podman("update", "--memory", "96m", long)
    assert (group / "memory.max").read_text().strip() == str(96 * MIB)


def test_podman_exec_runs_in_the_container(podman: Podman, long: str) -> None:
    assert podman.output("exec", long, "cat", "/proc/self/cgroup") == "0::/"
    assert podman.output(
        "exec",
        "--user",
        "1000",
        "--env",
        "A=b",
        "--workdir",
        "/tmp",
        long,
        "sh",
        "-c",
        "id -u; echo $A; pwd",
    ).split() == ["1000", "b", "/tmp"]
    assert podman("exec", long, "sh", "-c", "exit 9", check=False).returncode == 9
    missing = podman("exec", long, "no-such-program", check=False)
    assert missing.returncode == 127 and "executable file not found" in missing.stderr
    assert "/dev/pts/0" in podman("exec", "-it", long, "tty", terminal=True).stdout


def test_podman_shows_statistics_and_processes(podman: Podman, long: str) -> None:
    (stats,) = json.loads(podman.output("stats", "--no-stream", "--format", "json", long))
    assert (
        stats["name"] == long
        and stats["mem_usage"].split()[0] not in ("--", "0B")
        and int(stats["pids"]) >= 1
    )
    assert "trap" in podman.output("top", long, "args")


def test_podman_pauses_and_resumes_a_container(podman: Podman, long: str) -> None:
    podman("pause", long)
    group = podman.group(long)
    assert "frozen 1" in (group / "cgroup.events").read_text()
    assert podman.output("inspect", long, "--format", "{{.State.Status}}") == "paused"
    podman("unpause", long)
    assert "frozen 0" in (group / "cgroup.events").read_text()


def test_a_podman_container_can_have_a_terminal(podman: Podman) -> None:
    output = podman(
        "run",
        "--rm",
        "-it",
        "--network",
        "none",
        IMAGE,
        "sh",
        "-c",
        "tty; test -c /dev/console && echo console",
        terminal=True,
    ).stdout
    assert output.split() == ["/dev/pts/0", "console"]


def test_a_podman_container_can_be_read_only_without_capabilities(podman: Podman) -> None:
    output = podman.run(
        "--read-only",
        "--user",
        "1000:1001",
        "--cap-drop",
        "all",
        IMAGE,
        "sh",
        "-c",
        "id -u; id -g; grep Cap /proc/self/status; touch /x 2>&1; touch /tmp/fine && echo made",
    )
    assert output.split()[:2] == ["1000", "1001"] and output.count("0000000000000000") == 5
    assert "Read-only file system" in output and output.endswith("made")


def test_a_podman_container_can_have_a_seccomp_filter(podman: Podman, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    rules = [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}]
    profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}))
    output = podman.run(
        "--security-opt",
        f"seccomp={profile}",
        IMAGE,
        "sh",
        "-c",
        "grep Seccomp: /proc/self/status; mkdir /d 2>&1; true",
    )
    assert output.split()[1] == "2" and "Function not implemented" in output


def test_a_podman_container_can_have_a_user_namespace(podman: Podman) -> None:
    maps = ("--uidmap", "0:200000:5000", "--gidmap", "0:200000:5000")
    output = podman.run(
        *maps,
        IMAGE,
        "sh",
        "-c",
        "cat /proc/self/uid_map; touch /mine; stat -c %u /mine /bin/busybox",
    )
    assert output.split() == ["0", "200000", "5000", "0", "0"]
    # podman divides these ids among containers with --userns=auto
    for name in ("subuid", "subgid"):
        with open(f"/etc/{name}", "a") as file:
            file.write("containers:1000000:200000\n")
    output = podman.run(
        "--userns",
        "auto:size=3000",
        IMAGE,
        "sh",
        "-c",
        "cat /proc/self/uid_map; stat -c %u /bin/busybox",
    )
    assert output.split() == ["0", "1000000", "3000", "0"]


def test_a_podman_container_can_have_mounts_and_devices(podman: Podman, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("outside")
    options = (
        "-v",
        f"{tmp_path}:/mnt:ro",
        "--tmpfs",
        "/scratch:size=1m",
        "--device",
        "/dev/fuse",
        "--shm-size",
        "2m",
    )
    script = (
        "cat /mnt/file; touch /mnt/x 2>&1; df -k /scratch /dev/shm | awk 'NR>1 {print $2}'; test -c"
        " /dev/fuse && echo device"
    )
    output = podman.run(*options, IMAGE, "sh", "-c", script)
    assert (
        output.startswith("outside")
        and "Read-only" in output
        and output.endswith("1024\n2048\ndevice")
    )


def test_a_podman_container_can_have_an_init_and_no_cgroup(podman: Podman) -> None:
    assert podman.run("--init", IMAGE, "cat", "/proc/1/cmdline").startswith("/run/podman-init\0")
    assert podman.run("--cgroups", "disabled", IMAGE, "cat", "/proc/self/cgroup")


def test_a_podman_container_has_a_network(podman: Podman) -> None:
    assert "10.88." in podman.output("run", "--rm", IMAGE, "ip", "-4", "addr")


def test_a_podman_container_can_have_a_hostname_and_sysctls(podman: Podman) -> None:
    output = podman.run(
        "--hostname", "named", "--sysctl", "net.ipv4.ip_forward=1", IMAGE,
        "sh", "-c", "hostname; cat /proc/sys/net/ipv4/ip_forward",
    )  # fmt: skip
    assert output.split() == ["named", "1"]


def test_podman_reports_programs_that_cannot_be_executed(podman: Podman) -> None:
    missing = podman("run", "--rm", "--network", "none", IMAGE, "no-such-program", check=False)
    assert missing.returncode == 127 and "executable file not found in $PATH" in missing.stderr
    assert podman("run", "--rm", "--network", "none", IMAGE, "/etc", check=False).returncode == 126


def test_podman_can_use_cgroupfs(podman: Podman) -> None:
    other = Podman(podman.user, "--cgroup-manager", "cgroupfs")
    try:
        other(
            "run",
            "-d",
            "--name",
            "plain",
            "--network",
            "none",
            "--memory",
            "32m",
            IMAGE,
            "sleep",
            "1000",
        )
        group = other.group("plain")
        assert group.parent.name == "libpod_parent" and (
            group / "memory.max"
        ).read_text().strip() == str(32 * MIB)
        assert other.output("exec", "plain", "echo", "fine") == "fine"
    finally:
        other("rm", "--force", "--time", "0", "plain")


def test_podman_reports_an_oom_kill(podman: Podman) -> None:
    try:
        ended = podman(
            "run",
            "--name",
            "hungry",
            "--network",
            "none",
            "--memory",
            "16m",
            IMAGE,
            "tail",
            "/dev/zero",
            check=False,
        )
        assert ended.returncode == 137
        assert podman.output("inspect", "hungry", "--format", "{{.State.OOMKilled}}") == "true"
    finally:
        podman("rm", "--force", "hungry")


def test_a_podman_container_runs_with_six_mebibytes(podman: Podman) -> None:
    assert podman.run("--memory", "6m", IMAGE, "echo", "fine") == "fine"


def test_podman_builds_an_image(podman: Podman, tmp_path: Path) -> None:
    (tmp_path / "Containerfile").write_text(
        f"FROM {IMAGE}\nRUN echo built > /built && id -u\nUSER 1000\nCMD cat /built\n"
    )
    podman(
        "build",
        "--network",
        "none",
        "--runtime",
        str(commands.PYRUNC),
        "-t",
        "built",
        str(tmp_path),
    )
    assert podman.run("localhost/built") == "built"


def test_podman_checkpoints_and_restores_a_container(podman: Podman) -> None:
    script = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.2; done"
    podman("run", "-d", "--name", "counter", "--network", "none", IMAGE, "sh", "-c", script)
    try:
        podman("container", "checkpoint", "counter")
        output = [int(line) for line in podman.output("logs", "counter").split()]
        podman("container", "restore", "counter")
        assert podman.output("inspect", "counter", "--format", "{{.State.Status}}") == "running"
        podman("exec", "counter", "sleep", "1")
        after = [int(line) for line in podman.output("logs", "counter").split()]
        assert (
            after[: len(output)] == output
            and len(after) > len(output)
            and after == list(range(len(after)))
        )
    finally:
        podman("rm", "--force", "--time", "0", "counter")


def test_podman_stops_and_removes_a_container(podman: Podman, long: str) -> None:
    pid, group = podman.pid(long), podman.group(long)
    podman("stop", "--time", "20", long)
    assert podman.output("inspect", long, "--format", "{{.State.ExitCode}}") == "5"
    podman("rm", long)
    assert not Path(f"/proc/{pid}").exists() and not group.exists()
