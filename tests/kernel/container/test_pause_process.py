"""Tests a pod's pause process: its namespaces, its empty root, and containers that join its
namespaces."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pyrunc.abi.clone import CLONE_NEWNET
from pyrunc.compile.requests import CgroupChoice, PauseRequest
from pyrunc.errors import InvalidArgument, InvalidSpec, KernelError
from pyrunc.kernel import namespace
from tests.kernel.box import Box
from tests.kernel.pause_process import PauseProcess, hold
from tests.support import session
from tests.support.capabilities import holds
from tests.support.processes import wait_until

POD = {"network": "new", "ipc": "new", "uts": "new", "pid": "none"}


@contextmanager
def started_pause(**more: Any) -> Iterator[PauseProcess]:
    request = {
        "namespaces": POD,
        "hostname": "pod-1",
        "cgroup": CgroupChoice(missing_controllers="warn"),
    }
    pause = hold(session.name("pod"), PauseRequest(**{**request, **more}))
    try:
        yield pause
    finally:
        try:
            os.kill(pause.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.waitid(os.P_PIDFD, pause.pidfd, os.WEXITED)
        os.close(pause.pidfd)
        if pause.cgroup is not None:
            pause.cgroup.remove()


def own(pid: int, kind: str) -> bool:
    return os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")


@pytest.mark.requirement("3.1.10")
def test_the_pause_process_has_no_rights(tmp_path: Path) -> None:
    with started_pause(sysctls={"net.ipv4.ip_forward": "1", "kernel.shmmax": "4096"}) as pod:
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{pod.pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        assert status["Uid"].split() == status["Gid"].split() == ["65535"] * 4
        assert status["Groups"].strip() == ""
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {
            "0" * 16
        }
        assert status["NoNewPrivs"] == "1"
        assert status["SigIgn"] == "0" * 16
        assert Path(f"/proc/{pod.pid}/cmdline").read_bytes() == b"pause\0"
        assert wait_until(lambda: Path(f"/proc/{pod.pid}/comm").read_text() == "pause\n", 30, 0.01)
        assert os.readlink(f"/proc/{pod.pid}/exe").startswith("/memfd:pyrunc:pause")
        assert sorted(os.listdir(f"/proc/{pod.pid}/fd")) == ["0", "1", "2"]
        lines = Path(f"/proc/{pod.pid}/mountinfo").read_text().splitlines()
        assert len(lines) == 1
        assert " / ro,nosuid,nodev,noexec" in lines[0]
        for kind in ("mnt", "net", "ipc", "uts"):
            assert own(pod.pid, kind), kind
        for kind in ("pid", "user", "cgroup", "time"):
            assert not own(pod.pid, kind), kind


def test_a_pause_process_whose_filter_denies_waiting_ends() -> None:
    refused = {"names": ["rt_sigtimedwait", "prctl"], "action": "SCMP_ACT_ERRNO"}
    with started_pause(seccomp={"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [refused]}) as pod:
        result = os.waitid(os.P_PIDFD, pod.pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None and (result.si_code, result.si_status) == (os.CLD_EXITED, 1)


def test_the_pause_process_exits_on_sigterm() -> None:
    with started_pause() as pod:
        os.kill(pod.pid, signal.SIGTERM)
        result = os.waitid(os.P_PIDFD, pod.pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None
        # killed when the signal came before its handler was there
        assert (result.si_code, result.si_status) in (
            (os.CLD_EXITED, 0),
            (os.CLD_KILLED, signal.SIGTERM),
        )


def test_a_pause_process_can_stay_in_the_hosts_namespaces() -> None:
    with started_pause(namespaces=dict.fromkeys(POD, "host"), hostname="") as pod:
        assert not any(own(pod.pid, kind) for kind in ("net", "ipc", "uts", "pid"))


@pytest.mark.parametrize("path", ["", "/proc/self/ns"])
def test_settings_of_shared_namespaces_are_not_changed(path: str) -> None:
    """The machine's name and settings stay unchanged, whether its namespaces are shared by
    default or by path."""
    before = os.uname().nodename
    shared = {
        kind: f"{path}/{name}" if path else "host"
        for kind, name in (("uts", "uts"), ("network", "net"))
    }
    for more in ({}, {"hostname": "", "sysctls": {"net.ipv4.ip_default_ttl": "65"}}):
        with (
            pytest.raises(InvalidSpec, match=r"needs a (uts|network) namespace"),
            started_pause(namespaces=shared, **more),
        ):
            pass
    assert os.uname().nodename == before
    assert Path("/proc/sys/net/ipv4/ip_default_ttl").read_text() == "64\n"


def test_a_pause_process_joins_an_existing_network_namespace() -> None:
    before = namespace.open_own("net")
    namespace.unshare(CLONE_NEWNET)
    network = namespace.open_own("net")
    namespace.setns(before, CLONE_NEWNET)
    os.close(before)
    try:
        with started_pause(namespaces={**POD, "network": f"/proc/self/fd/{network}"}) as pod:
            assert os.stat(f"/proc/{pod.pid}/ns/net").st_ino == os.fstat(network).st_ino
    finally:
        os.close(network)


def test_a_container_joins_the_namespaces_of_a_pause_process(box: Box) -> None:
    with started_pause(
        namespaces={**POD, "pid": "new"}, sysctls={"net.ipv4.ip_forward": "1"}
    ) as pod:
        for entry in box.linux["namespaces"]:
            name = {"pid": "pid", "network": "net", "ipc": "ipc", "uts": "uts"}.get(entry["type"])
            if name:
                entry["path"] = f"/proc/{pod.pid}/ns/{name}"
        box.config["hostname"] = ""
        text = box.run(
            "hostname; cat /proc/1/cmdline | tr '\\0' ' '; cat /proc/sys/net/ipv4/ip_forward; "
            "echo $$"
        )
        assert text.split()[:3] == ["pod-1", "pause", "1"]
        assert int(text.split()[3]) > 1


@pytest.mark.requirement("3.1.10")
def test_a_pause_process_has_the_oom_score_that_is_permitted() -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text())
    with started_pause(oom_score_adj=-998) as pod:
        score = int(Path(f"/proc/{pod.pid}/oom_score_adj").read_text())
        assert score == (-998 if holds("CAP_SYS_RESOURCE") else own)
    with started_pause(oom_score_adj=789) as pod:  # which needs no capability
        assert Path(f"/proc/{pod.pid}/oom_score_adj").read_text() == "789\n"


@pytest.mark.parametrize(
    "more",
    [
        {"namespaces": {"mount": "new"}},
        {"namespaces": {"network": "sometimes"}},
        {"sysctls": {"net.ipv4.nothing": "1"}},
        {"namespaces": {"network": "/proc/self/ns/ipc"}},
    ],
)
def test_a_failed_start_of_a_pause_process_leaves_nothing(more: dict[str, Any]) -> None:
    with pytest.raises((InvalidArgument, KernelError)), started_pause(**more):
        pass
    from pyrunc.cgroups.naming import place

    assert not place("", session.name("pod"), "cgroupfs").exists()
