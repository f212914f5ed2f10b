"""Tests the identity of the container's process: users, groups, capabilities, privileges, limits,
filters, working directory, names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pyrunc.abi.capability import CAPABILITIES
from pyrunc.errors import Error, InvalidSpec, KernelError
from tests.kernel.box import Box
from tests.support.capabilities import holds

ALL = sorted(CAPABILITIES, key=CAPABILITIES.__getitem__)


def status(box: Box, **more: object) -> dict[str, str]:
    """Return /proc/self/status of a process that is not a shell: name -> value."""
    code, text = box.outcome("cat", "/proc/self/status", **more)
    assert code == 0, text
    return {
        name: value.strip()
        for name, _, value in (line.partition(":") for line in text.splitlines())
    }


def bits(*names: str) -> str:
    return f"{sum(1 << CAPABILITIES[name] for name in names):016x}"


def test_a_process_has_its_user_and_groups(box: Box) -> None:
    box.process["user"] = {
        "uid": 1000,
        "gid": 2000,
        "additionalGids": [30, 7, 4000000000],
        "umask": 0o027,
    }
    fields = status(box)
    assert fields["Uid"].split() == ["1000"] * 4
    assert fields["Gid"].split() == ["2000"] * 4
    assert sorted(map(int, fields["Groups"].split())) == [7, 30, 4000000000]
    assert fields["Umask"] == "0027"


def test_the_callers_groups_do_not_leak(box: Box) -> None:
    before = os.getgroups()
    os.setgroups([5, 27])
    try:
        assert status(box)["Groups"] == ""
    finally:
        os.setgroups(before)


def test_umask_is_0022_by_default(box: Box) -> None:
    before = os.umask(0o077)
    try:
        assert status(box)["Umask"] == "0022"
    finally:
        os.umask(before)


def test_root_without_a_capabilities_object_keeps_the_runtimes_capabilities(box: Box) -> None:
    own = Path("/proc/self/status").read_text()
    assert f"CapBnd:\t{status(box)['CapBnd']}\n" in own


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("no_new_privileges", [False, True])
def test_a_process_has_its_capabilities(box: Box, uid: int, no_new_privileges: bool) -> None:
    box.process["user"] = {"uid": uid, "gid": uid}
    box.process["noNewPrivileges"] = no_new_privileges
    box.process["capabilities"] = {
        "bounding": ["CAP_KILL", "CAP_CHOWN", "CAP_NET_RAW"],
        "effective": ["CAP_KILL", "CAP_CHOWN"],
        "permitted": ["CAP_KILL", "CAP_CHOWN"],
    }
    fields = status(box)
    assert fields["CapBnd"] == bits("CAP_KILL", "CAP_CHOWN", "CAP_NET_RAW")
    assert fields["CapInh"] == fields["CapAmb"] == bits()
    assert fields["NoNewPrivs"] == str(int(no_new_privileges))
    # execve gives root the whole bounding set, unless no_new_privs limits it to what is permitted;
    # a user keeps nothing.
    root = bits("CAP_KILL", "CAP_CHOWN") if no_new_privileges else fields["CapBnd"]
    expected = root if uid == 0 else bits()
    assert fields["CapPrm"] in (expected, fields["CapBnd"] if uid == 0 else expected)
    assert fields["CapEff"] == fields["CapPrm"]


def test_ambient_capabilities_outlive_execve(box: Box) -> None:
    names = ["CAP_NET_BIND_SERVICE", "CAP_CHOWN"]
    box.process["user"] = {"uid": 1000, "gid": 1000}
    box.process["capabilities"] = dict.fromkeys(
        ("bounding", "effective", "permitted", "inheritable", "ambient"), names
    )
    fields = status(box)
    for kind in ("CapBnd", "CapEff", "CapPrm", "CapInh", "CapAmb"):
        assert fields[kind] == bits(*names), kind


def test_a_process_can_have_no_capabilities(box: Box) -> None:
    box.process["capabilities"] = {}
    fields = status(box)
    assert {fields[kind] for kind in ("CapBnd", "CapEff", "CapPrm", "CapInh", "CapAmb")} == {bits()}


def test_unknown_and_ungrantable_capabilities_are_warnings(box: Box) -> None:
    box.process["capabilities"] = {
        key: [*ALL, "CAP_TEST"] for key in ("bounding", "effective", "permitted")
    }
    with box.running() as (created, _):
        (warning,) = created.warnings
        assert warning.startswith("ignoring unknown or unavailable capabilities: [")
        assert "CAP_TEST" in warning
        assert len(status(box)) > 20


def test_no_new_privileges_disables_set_uid_programs(box: Box) -> None:
    # busybox gives up set-user-ID by itself
    source = (
        '#include <stdio.h>\n#include <unistd.h>\nint main(void) { return printf("%d\\n", '
        "geteuid()) < 0; }"
    )
    command = ["gcc", "-static", "-x", "c", "-o", str(box.image / "bin/euid"), "-"]
    subprocess.run(command, input=source.encode(), check=True)
    os.chmod(box.image / "bin/euid", 0o4755)
    box.process["user"] = {"uid": 1000, "gid": 1000}
    assert box.outcome("euid") == (0, "0\n")
    box.process["noNewPrivileges"] = True
    assert box.outcome("euid") == (0, "1000\n")


def test_a_process_has_its_rlimits(box: Box) -> None:
    box.process["rlimits"] = [
        {"type": "RLIMIT_NOFILE", "soft": 5, "hard": 10},
        {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
        {"type": "RLIMIT_FSIZE", "soft": 4096, "hard": 8192},
        {"type": "RLIMIT_STACK", "soft": 65536, "hard": 131072},
        {"type": "RLIMIT_AS", "soft": 1 << 26, "hard": 1 << 27},
    ]
    code, text = box.outcome("cat", "/proc/self/limits")
    limits = {line[:25].strip(): line[25:].split()[:2] for line in text.splitlines()}
    assert code == 0
    assert limits["Max open files"] == ["5", "10"]
    assert limits["Max core file size"] == ["0", "0"]
    assert limits["Max file size"] == ["4096", "8192"]
    assert limits["Max stack size"] == ["65536", "131072"]
    assert limits["Max address space"] == [str(1 << 26), str(1 << 27)]


@pytest.mark.parametrize(
    "limits",
    [
        [{"type": "RLIMIT_NOPE", "soft": 1, "hard": 1}],
        [{"type": "RLIMIT_CORE", "soft": 2, "hard": 1}],
        [{"type": "RLIMIT_CORE", "soft": 1, "hard": 1}] * 2,
    ],
)
def test_invalid_rlimits_are_refused(box: Box, limits: list[object]) -> None:
    box.process["rlimits"] = limits
    with pytest.raises(InvalidSpec, match=r"process\.rlimits"):
        box.run("true")


def test_a_process_has_its_oom_score(box: Box) -> None:
    box.process["oomScoreAdj"] = 500
    assert box.run("cat /proc/self/oom_score_adj").strip() == "500"
    assert Path("/proc/self/oom_score_adj").read_text().strip() != "500"


def test_lowering_the_oom_score_needs_the_right(box: Box) -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text())
    box.process["oomScoreAdj"] = own - 1 if own > -1000 else own
    if holds("CAP_SYS_RESOURCE"):
        assert int(box.run("cat /proc/self/oom_score_adj")) == own - 1
        return
    with pytest.raises(KernelError, match=r"oom_score_adj to .*: EACCES"):
        box.run("true")


def test_a_process_has_its_working_directory(box: Box) -> None:
    box.process["cwd"] = "/made/for/me"
    assert box.run("pwd; stat -c %a /made/for").split() == ["/made/for/me", "755"]


def test_a_user_can_start_in_a_working_directory_of_root(box: Box) -> None:
    (box.image / "root").chmod(0o700)
    box.process["cwd"] = "/root"
    box.process["user"] = {"uid": 1000, "gid": 1000}
    box.process["capabilities"] = {}
    assert box.outcome("sh", "-c", "ls / >/dev/null && echo ran")[1] == "ran\n"


@pytest.mark.parametrize("number", range(3, 24))
def test_a_working_directory_behind_a_descriptor_stays_inside(box: Box, number: int) -> None:
    """CVE-2024-21626: the caller leaves descriptors of the host's root open, and the working
    directory is a path through /proc/self/fd. The start fails, or the working directory is in the
    container's root."""
    if number % 4:
        box.process["cwd"] = f"/proc/self/fd/{number}"
    else:
        box.process["cwd"] = f"/proc/self/fd/{number}/../../.."
    extra = [os.open("/", os.O_RDONLY) for _ in range(4)]
    for fd in extra:
        os.set_inheritable(fd, True)
    try:
        try:
            inside = box.run("stat -c %d:%i . /; ls /")
        except Error:
            return
        # a descriptor of the container's own root leads to it
        here, root, *names = inside.splitlines()
        assert here == root
        assert names == sorted(p.name for p in box.image.iterdir())
    finally:
        for fd in extra:
            os.close(fd)


def test_a_container_has_its_hostname_and_domainname(box: Box) -> None:
    box.config["hostname"], box.config["domainname"] = "here", "example.org"
    assert box.run("hostname; cat /proc/sys/kernel/domainname").split() == ["here", "example.org"]
    assert os.uname().nodename != "here"


def test_a_container_has_its_sysctls(box: Box) -> None:
    forwarding = Path("/proc/sys/net/ipv4/ip_forward").read_text()
    box.linux["sysctl"] = {
        "net.ipv4.ip_forward": "1",
        "net.ipv4.ping_group_range": "5 6",
        "kernel/shmmax": "123456",
        "fs.mqueue.msg_max": "11",
    }
    text = box.run(
        "cd /proc/sys; cat net/ipv4/ip_forward kernel/shmmax fs/mqueue/msg_max "
        "net/ipv4/ping_group_range"
    )
    assert text.split() == ["1", "123456", "11", "5", "6"]
    assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == forwarding


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kernel.core_pattern", "|/evil"),
        ("net.ipv4..//../kernel/core_pattern", "x"),
        ("net/../kernel/core_pattern", "x"),
        ("kernel.hostname", "x"),
        ("kernel.shm_rmid_forced", "1\nkernel.core_pattern=x"),
        ("user.max_user_namespaces", "1"),
    ],
)
def test_sysctls_of_the_host_and_malformed_ones_are_refused(box: Box, key: str, value: str) -> None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    box.linux["sysctl"] = {key: value}
    with pytest.raises(InvalidSpec, match=r"linux\.sysctl\."):
        box.run("true")
    assert Path("/proc/sys/kernel/core_pattern").read_text() == pattern


def test_an_error_names_the_sysctl_that_the_kernel_refuses(box: Box) -> None:
    box.linux["sysctl"] = {"net.ipv4.ip_forward": "nonsense"}
    with pytest.raises(KernelError, match=r"sysctl 'net/ipv4/ip_forward' = 'nonsense': EINVAL"):
        box.run("true")


SECCOMP = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
    "syscalls": [{"names": ["mkdirat", "mkdir"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}],
}


@pytest.mark.parametrize("no_new_privileges", [False, True])
@pytest.mark.parametrize("uid", [0, 1000])
def test_a_process_has_its_seccomp_filter(box: Box, no_new_privileges: bool, uid: int) -> None:
    box.linux["seccomp"] = SECCOMP
    box.process["noNewPrivileges"] = no_new_privileges
    box.process["user"] = {"uid": uid, "gid": uid}
    box.process["capabilities"] = {"bounding": ["CAP_CHOWN"]}
    text = box.run("grep Seccomp: /proc/self/status; mkdir /tmp/x 2>&1; true")
    assert text.split()[1] == "2"
    assert "Function not implemented" in text


def test_a_profile_may_forbid_calls_of_the_setup(box: Box) -> None:
    box.process["noNewPrivileges"] = True
    forbidden = [
        "getcwd",
        "chdir",
        "setgroups",
        "capset",
        "openat2",
        "mount",
        "setresuid",
        "seccomp",
    ]
    box.linux["seccomp"] = {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": forbidden, "action": "SCMP_ACT_KILL_PROCESS"}],
    }
    assert box.outcome("true")[0] == 0


def test_a_process_has_its_scheduler_and_io_priority(box: Box) -> None:
    box.process["scheduler"] = {"policy": "SCHED_BATCH", "nice": 5}
    box.process["ioPriority"] = {"class": "IOPRIO_CLASS_IDLE", "priority": 0}
    with box.running() as (created, _):
        assert os.sched_getscheduler(created.pid) == os.SCHED_BATCH
        assert os.getpriority(os.PRIO_PROCESS, created.pid) == 5
        assert ioprio(created.pid) == 3 << 13


def ioprio(pid: int) -> int:
    import ctypes

    from pyrunc.abi.arch import arch

    value: int = ctypes.CDLL(None).syscall(arch().syscalls["ioprio_get"], 1, pid)
    return value


def test_a_process_has_its_personality(box: Box) -> None:
    box.linux["personality"] = {"domain": "LINUX32"}
    with box.running() as (created, _):
        assert Path(f"/proc/{created.pid}/personality").read_text().strip() == "00000008"


def test_a_container_has_its_time_offsets(box: Box) -> None:
    box.linux["namespaces"].append({"type": "time"})
    box.linux["timeOffsets"] = {
        "boottime": {"secs": 86400 * 1000},
        "monotonic": {"secs": 5, "nanosecs": 7},
    }
    with box.running() as (created, request):
        assert os.readlink(f"/proc/{created.pid}/ns/time") != os.readlink("/proc/self/ns/time")
        up = float(box.execute(created, request, "cat /proc/uptime").split()[0])
        assert up > 86400 * 1000


def test_stdio_belongs_to_the_user(box: Box) -> None:
    box.process["user"] = {"uid": 1000, "gid": 1000}
    box.process["capabilities"] = {}
    assert box.run("echo again > /dev/stdout") == "again\n"
    assert os.stat("/dev/null").st_uid == 0


def test_null_stdio_is_the_containers(box: Box) -> None:
    code, text = box.outcome("stat", "-L", "-c", "%t:%T %d", "/proc/self/fd/0", "/dev/null")
    assert code == 0
    first, second = text.splitlines()
    assert first == second
    with box.running() as (created, _):
        assert os.stat(f"/proc/{created.pid}/fd/0").st_dev != os.stat("/dev/null").st_dev


def test_the_callers_cpus_do_not_leak(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyrunc.compile import host as facts

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        monkeypatch.setattr(facts, "_host", None)  # as in a new process
        with box.running() as (created, request):
            assert os.sched_getaffinity(created.pid) == before
            process = {"execCPUAffinity": {"initial": str(max(before)), "final": str(min(before))}}
            text = box.execute(
                created, request, "grep Cpus_allowed_list /proc/self/status", process
            )
            assert text.split() == ["Cpus_allowed_list:", str(min(before))]
            assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_an_early_filter_may_forbid_getcwd(box: Box) -> None:
    """The container starts although its seccomp filter forbids getcwd."""
    # So the filter is loaded before the change of user, but after the check of the directory.
    box.process["noNewPrivileges"] = False
    box.process["cwd"] = "/tmp"
    box.linux["seccomp"] = {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["getcwd", "chdir"], "action": "SCMP_ACT_ERRNO"}],
    }
    with box.running() as (created, _):
        assert os.readlink(f"/proc/{created.pid}/cwd") == "/tmp"


def test_a_process_has_its_memory_policy(box: Box) -> None:
    box.linux["memoryPolicy"] = {
        "mode": "MPOL_BIND",
        "nodes": "0",
        "flags": ["MPOL_F_STATIC_NODES"],
    }
    with box.running() as (created, _):
        assert " bind=static:0 " in Path(f"/proc/{created.pid}/numa_maps").read_text()
    box.linux["memoryPolicy"] = {"mode": "MPOL_BIND", "nodes": ""}
    with pytest.raises(InvalidSpec, match=r"linux\.memoryPolicy\.nodes"):
        box.run("true")


def test_a_listener_is_sent_to_the_agent(box: Box, tmp_path: Path) -> None:
    """A container and an exec each send the agent their seccomp listener, with the configured
    metadata and the state."""
    import array
    import json
    import socket

    path = str(tmp_path / "agent")
    agent = socket.socket(socket.AF_UNIX)
    agent.bind(path)
    agent.listen(4)
    box.linux["seccomp"] = {
        "defaultAction": "SCMP_ACT_ALLOW",
        "listenerPath": path,
        "listenerMetadata": "m",
        "syscalls": [{"names": ["mkdirat"], "action": "SCMP_ACT_NOTIFY"}],
    }
    with box.running() as (created, request):
        assert sorted(os.listdir(f"/proc/{created.pid}/fd")) == ["0", "1", "2"]
        box.execute(created, request, "true")
        for status in ("creating", "running"):
            connection, _ = agent.accept()
            message, ancillary, _, _ = connection.recvmsg(4096, 64)
            connection.close()
            process_state = json.loads(message)
            assert (
                process_state["metadata"],
                process_state["fds"],
                process_state["state"]["status"],
            ) == (
                "m",
                ["seccompFd"],
                status,
            )
            (number,) = array.array("i", ancillary[0][2])
            assert os.readlink(f"/proc/self/fd/{number}") == "anon_inode:seccomp notify"
            os.close(number)
    agent.close()


def test_without_an_agent_nothing_starts(box: Box, tmp_path: Path) -> None:
    box.linux["seccomp"] = {
        "defaultAction": "SCMP_ACT_ALLOW",
        "listenerPath": str(tmp_path / "none"),
        "syscalls": [{"names": ["mkdirat"], "action": "SCMP_ACT_NOTIFY"}],
    }
    with pytest.raises(KernelError, match="to the seccomp listener"):
        box.run("true")
