"""Tests that containers inherit the same state from every start of the server: from a unit with
settings, or a shell with limits.

The server is started by a process that has changed everything that fork(2) and execve(2) pass on.
The values in containers and execs are read from /proc and compared with the expected ones, once for
each kind of process.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from pyrunc.abi.arch import arch
from tests.cri.server_harness import Server
from tests.support.capabilities import holds
from tests.support.processes import wait_until

INFINITY = resource.RLIM_INFINITY
MIB = 1 << 20
# systemd's defaults for services, with which containerd runs; without the limit of processes, which
# pids.max counts.
LIMITS = {
    "CPU": (INFINITY, INFINITY),
    "FSIZE": (INFINITY, INFINITY),
    "DATA": (INFINITY, INFINITY),
    "STACK": (8 * MIB, INFINITY),
    "CORE": (0, INFINITY),
    "RSS": (INFINITY, INFINITY),
    "NPROC": (INFINITY, INFINITY),
    "NOFILE": (1024, 524288),
    "MEMLOCK": (8 * MIB, 8 * MIB),
    "AS": (INFINITY, INFINITY),
    "MSGQUEUE": (819200, 819200),
    "NICE": (0, 0),
    "RTPRIO": (0, 0),
    "RTTIME": (INFINITY, INFINITY),
}
# Before the server: a unit's Nice=, IOSchedulingClass=, CPUSchedulingPolicy=, CPUAffinity=,
# TimerSlackNSec=, Personality=, UMask=, IgnoreSIGPIPE=, OOMScoreAdjust=, KeyringMode=,
# CoredumpFilter=, NUMAPolicy=, Limit…=, and settings of prctl(2) only.
CHANGED = """
import ctypes, os, resource, signal, sys
call = ctypes.CDLL(None, use_errno=True).syscall
numbers = dict(zip(("ioprio_set", "personality", "keyctl", "add_key", "set_mempolicy"), \
map(int, sys.argv[1].split(","))))
os.setpriority(os.PRIO_PROCESS, 0, 5)
call(numbers["ioprio_set"], 1, 0, 3 << 13)
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
prctl = ctypes.CDLL(None).prctl
prctl(29, 123456, 0, 0, 0)  # PR_SET_TIMERSLACK
prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
prctl(33, 1, 1, 0, 0)  # PR_MCE_KILL, set, late
prctl(67, 1, 0, 0, 0)  # PR_SET_MEMORY_MERGE
call(numbers["personality"], 0x0040000)  # ADDR_NO_RANDOMIZE
mask = ctypes.c_ulong(1)
call(numbers["set_mempolicy"], 2, ctypes.byref(mask), 64)  # bind to node 0
open("/proc/self/coredump_filter", "w").write("0x7f")
open("/proc/self/oom_score_adj", "w").write("77")
call(numbers["keyctl"], 1, b"of-the-server", 0, 0, 0)
key = call(numbers["add_key"], b"user", b"secret-of-the-server", b"x", 1, -3)
call(numbers["keyctl"], 5, key, 0x3f000000)  # to be seen by possession only
os.umask(0o077)
os.chdir("/tmp")
os.environ["OF_THE_SERVER"] = "1"
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGALRM})
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
for name, soft in (("NOFILE", -1), ("STACK", 16 << 20), ("CORE", 4096), ("FSIZE", 1 << 40), \
("MEMLOCK", 4 << 20), ("MSGQUEUE", 4096)):
    number = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(number)[1]
    resource.setrlimit(number, (hard if soft < 0 or 0 <= hard < soft else soft, hard))
os.execv(sys.argv[2], sys.argv[2:])
"""


def surrounded() -> tuple[str, ...]:
    calls = arch().syscalls
    names = ("ioprio_set", "personality", "keyctl", "add_key", "set_mempolicy")
    numbers = ",".join(str(calls[name]) for name in names)
    return (sys.executable, "-c", CHANGED, numbers)


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    with Server(network=False, prefix=surrounded()) as server:
        server.load_image()
        yield server


def limits_of(pid: int) -> dict[str, tuple[int, int]]:
    return {name: resource.prlimit(pid, getattr(resource, f"RLIMIT_{name}")) for name in LIMITS}


def expected_limits() -> dict[str, tuple[int, int]]:
    """Return LIMITS, lowered to those that the server may set."""
    limits = {}
    for name, (soft, hard) in LIMITS.items():
        own = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
        if not holds("CAP_SYS_RESOURCE"):
            # Raising a hard limit needs the capability.
            hard = lower(hard, own)
        limits[name] = (lower(soft, hard), hard)
    return limits


def lower(one: int, other: int) -> int:
    return other if one == INFINITY else one if other == INFINITY else min(one, other)


def field(name: str, pid: int) -> str:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    return ""


def inherited(pid: int) -> dict[str, object]:
    """Return the state that a process inherits, except limits."""
    libc = ctypes.CDLL(None)
    statistics = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {
        "nice": int(statistics[16]),
        "I/O priority": libc.syscall(arch().syscalls["ioprio_get"], 1, pid) >> 13 in (0, 2),
        "scheduler": os.sched_getscheduler(pid),
        "CPUs": os.sched_getaffinity(pid),
        "timer slack": int(Path(f"/proc/{pid}/timerslack_ns").read_text()),
        "personality": int(Path(f"/proc/{pid}/personality").read_text(), 16),
        "huge pages": field("THP_enabled", pid),
        "merged pages": "ksm_merge_any: yes" not in Path(f"/proc/{pid}/ksm_stat").read_text(),
        "NUMA policy": {
            line.split()[1] for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines()
        },
        "core dumps": int(Path(f"/proc/{pid}/coredump_filter").read_text(), 16),
        "umask": field("Umask", pid),
        "blocked": field("SigBlk", pid),
        "ignored": field("SigIgn", pid),
        "out of memory": int(Path(f"/proc/{pid}/oom_score_adj").read_text()),
        "capabilities": int(field("CapEff", pid), 16) != 0,
        "folder": os.readlink(f"/proc/{pid}/cwd"),
        "environment": b"OF_THE_SERVER" in Path(f"/proc/{pid}/environ").read_bytes(),
    }


EXPECTED = {
    "nice": 0,
    "I/O priority": True,
    "scheduler": os.SCHED_OTHER,
    "timer slack": 50000,
    "personality": 0,
    "huge pages": "1",
    "merged pages": True,
    "NUMA policy": {"default"},
    "umask": "0022",
    "blocked": "0" * 16,
    "ignored": "0" * 16,
    "capabilities": True,
    "folder": "/",
    "environment": False,
}


def test_processes_inherit_no_settings_of_the_server(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    container = server.launch(pod)
    (group,) = server._cgroups()

    def sleepers() -> dict[int, str]:
        files = [file for file in group.rglob("cgroup.procs") if container in str(file.parent)]
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        return {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in pids}

    request = api.ExecSyncRequest(container_id=container, cmd=["sleep", "1001"], timeout=600)
    call = server.runtime.ExecSync.future(request)
    try:
        assert wait_until(
            lambda: sorted(sleepers().values()) == ["sleep\x001001\0", "sleep\x003600\0"], 30
        )
        here = {
            "CPUs": os.sched_getaffinity(0),
            "out of memory": 0 if holds("CAP_SYS_RESOURCE") else 77,  # not below the server's own
            "core dumps": int(Path("/proc/1/coredump_filter").read_text(), 16),
        }
        for pid in sleepers():
            assert inherited(pid) == EXPECTED | here
            assert limits_of(pid) == expected_limits()
    finally:
        call.cancel()


def test_keys_of_the_server_are_in_no_container(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    command = ("sh", "-c", "cat /proc/keys; echo end; exec sleep 3600")
    container = server.launch(pod, server.container_config(command))
    server.wait_logged(container, "end")
    # /proc/keys lists the keys that the reader may see, here those of its session keyring.
    listings = [
        "\n".join(server.log_lines(container)),
        server.output(container, "cat", "/proc/keys"),
    ]
    assert "_ses." in listings[0] and "_ses." in listings[1]
    for text in listings:
        assert "secret-of-the-server" not in text, text


@pytest.mark.requirement("8.12")
def test_limits_are_a_setting(server: Server) -> None:
    """`[containers] rlimits` replaces the defaults of the limits that it names."""
    settings = {"containers": {"rlimits": ["nofile=300:400", "CORE=0"]}}
    with Server(network=False, settings=settings) as other:
        other.load_image()
        container = other.launch(other.run_pod(host_network=True))
        assert other.output(
            container, "sh", "-c", "ulimit -Sn; ulimit -Hn; ulimit -Hc"
        ).split() == [
            "300",
            "400",
            "0",
        ]
        other.remove_all()
