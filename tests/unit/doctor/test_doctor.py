"""Tests doctor's passive checks on machines made of files: a machine without problems, and one for
each problem."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest

from cri_server.config import Config
from cri_server.doctor import (
    cgroups,
    examine,
    file_systems,
    kernel,
    kubelet,
    limits,
    network,
    registries,
    startup,
)
from cri_server.doctor.model import Check, CheckResult, Level, Machine
from cri_server.zygote.client import JobResult, Zygote
from pyrunc.errors import Unavailable

FLANNEL = (
    '{"cniVersion": "1.0.0", "name": "cbr0", "plugins": [{"type": "flannel"}, {"type": "portmap"}]}'
)
BRIDGE = (
    '{"cniVersion": "1.0.0", "name": "pods",'
    ' "plugins": [{"type": "bridge", "ipam": {"type": "host-local"}}]}'
)
GOOD = {
    "/proc/sys/kernel/osrelease": "6.12.9-amd64",
    "/proc/self/ns/cgroup": "",
    "/proc/self/ns/ipc": "",
    "/proc/self/ns/mnt": "",
    "/proc/self/ns/net": "",
    "/proc/self/ns/pid": "",
    "/proc/self/ns/user": "",
    "/proc/self/ns/uts": "",
    "/proc/sys/user/max_user_namespaces": "31000",
    "/proc/sys/kernel/seccomp/actions_avail": (
        "kill_process kill_thread trap errno user_notif trace log allow"
    ),
    "/proc/filesystems": "nodev\tsysfs\n\text4\nnodev\toverlay\n",
    "/proc/sys/net/bridge/bridge-nf-call-iptables": "1",
    "/proc/sys/net/ipv4/ip_forward": "1",
    "/proc/cmdline": "root=/dev/sda1",
    "/proc/swaps": "Filename\tType\tSize\tUsed\tPriority",
    "/proc/sys/fs/inotify/max_user_instances": "8192",
    "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids",
    "/sys/module/apparmor/parameters/enabled": "Y",
    "/usr/sbin/apparmor_parser": "#!",
    "/usr/sbin/nft": "#!",
    "/run/systemd/system/x": "",
    "/etc/cni/net.d/10.conflist": BRIDGE,
    "/usr/lib/systemd/system/kubelet.service": "[Service]\nExecStart=/usr/bin/kubelet",
    "/etc/systemd/system/kubelet.service.d/10-kubeadm.conf": (
        '[Service]\nEnvironment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"\n'
        "EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env\n"
        "ExecStart=\nExecStart=/usr/bin/kubelet $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS\n"
    ),
    "/var/lib/kubelet/kubeadm-flags.env": (
        'KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///run/pyrunc/cri.sock"'
    ),
    "/var/lib/kubelet/config.yaml": "cgroupDriver: systemd\n",
}
CHECKS: tuple[Check, ...] = (
    kernel.version,
    kernel.calls,
    kernel.namespaces,
    kernel.seccomp,
    kernel.modules,
    cgroups.version,
    cgroups.driver,
    network.configuration,
    network.names,
    network.forwarding,
    limits.apparmor,
    limits.selinux,
    limits.sysctls,
    limits.swap,
    kubelet.kubelet,
)


def machine(tmp_path: Path, changes: dict[str, str | None] | None = None, **config: Any) -> Machine:
    for name, text in {**GOOD, **(changes or {})}.items():
        if text is not None:
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
    configuration = Config()
    for key, value in config.items():
        table, name = key.split("__")
        setattr(getattr(configuration, table), name, value)
    return Machine(configuration, tmp_path, {"PATH": "/usr/bin"})


def results(host: Machine) -> dict[str, CheckResult]:
    """Return a dict: code -> result, of all checks that find a problem."""
    results = [f for f in examine.examine(host, CHECKS) if f.level != Level.FINE]
    assert len({f.code for f in results}) == len(results)
    assert all(f.observation and f.effect for f in results)
    return {f.code: f for f in results}


def test_a_good_machine_has_only_fine_results(tmp_path: Path) -> None:
    host = machine(tmp_path)
    assert results(host) == {}
    assert len(list(examine.examine(host, CHECKS))) >= len(CHECKS)


KUBELET = "/usr/lib/systemd/system/kubelet.service"
FLAGS = "/var/lib/kubelet/kubeadm-flags.env"


@pytest.mark.parametrize(
    ("changes", "config", "code", "level", "says"),
    [
        ({"/proc/sys/kernel/osrelease": "5.15.0"}, {}, "kernel-version", Level.WRONG, "5.15.0"),
        ({"/proc/self/ns/net": None}, {}, "namespaces", Level.WRONG, "net"),
        (
            {"/proc/sys/user/max_user_namespaces": "0"},
            {},
            "namespaces",
            Level.WARNING,
            "user namespaces are disabled",
        ),
        (
            {"/proc/sys/kernel/seccomp/actions_avail": None},
            {},
            "seccomp",
            Level.WRONG,
            "no seccomp",
        ),
        (
            {"/proc/sys/kernel/seccomp/actions_avail": "allow errno"},
            {},
            "seccomp",
            Level.WRONG,
            "kill_process",
        ),
        (
            {"/proc/filesystems": "\text4\n\tfuse-overlayfs\n"},
            {},
            "module-overlay",
            Level.WRONG,
            "overlay",
        ),
        (
            {"/proc/sys/net/bridge/bridge-nf-call-iptables": None},
            {},
            "module-br-netfilter",
            Level.WARNING,
            "not loaded",
        ),
        (
            {"/proc/sys/net/bridge/bridge-nf-call-iptables": "0"},
            {},
            "module-br-netfilter",
            Level.WARNING,
            "is 0",
        ),
        ({"/sys/fs/cgroup/cgroup.controllers": None}, {}, "cgroup-v2", Level.WRONG, "no cgroup v2"),
        (
            {"/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io pids"},
            {},
            "cgroup-controllers",
            Level.WRONG,
            "memory",
        ),
        (
            {"/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io pids"},
            {"cgroup__missing_controllers": "warn"},
            "cgroup-controllers",
            Level.WARNING,
            "memory",
        ),
        (
            {"/sys/fs/cgroup/cgroup.controllers": "cpu memory pids"},
            {},
            "cgroup-controllers",
            Level.NOTE,
            "cpu memory pids",
        ),
        (
            {"/run/systemd/system/x": None, "/var/lib/kubelet/config.yaml": "{}"},
            {"cgroup__driver": "systemd"},
            "cgroup-driver",
            Level.WRONG,
            "does not run",
        ),
        (
            {"/var/lib/kubelet/config.yaml": "cgroupDriver: cgroupfs"},
            {"cgroup__driver": "cgroupfs"},
            "cgroup-driver",
            Level.WARNING,
            "cgroupfs",
        ),
        ({"/etc/cni/net.d/10.conflist": None}, {}, "cni-config", Level.WRONG, "in /etc/cni/net.d"),
        ({"/etc/cni/net.d/10.conflist": "{"}, {}, "cni-config", Level.WRONG, "10.conflist"),
        (
            {"/etc/cni/net.d/05.conflist": "{", "/etc/cni/net.d/10.conflist": BRIDGE},
            {},
            "cni-config",
            Level.WRONG,
            "/etc/cni/net.d/05.conflist: the file is not JSON",
        ),
        (
            {"/etc/cni/net.d/05.conf": "", "/etc/cni/net.d/10.conflist": BRIDGE},
            {},
            "cni-config",
            Level.WARNING,
            "/etc/cni/net.d/05.conf is skipped: it is empty",
        ),
        (
            {"/etc/cni/net.d/10.conflist": FLANNEL},
            {},
            "cni-plugins",
            Level.WRONG,
            "flannel in /opt/cni/bin",
        ),
        ({"/proc/sys/net/ipv4/ip_forward": "0"}, {}, "ip-forward", Level.NOTE, "is 0"),
        (
            {
                "/proc/sys/net/ipv4/ip_forward": "0",
                "/etc/cni/net.d/10.conflist": FLANNEL,
                "/opt/cni/bin/flannel": "#!",
            },
            {},
            "ip-forward",
            Level.WARNING,
            "is 0",
        ),
        ({"/usr/sbin/apparmor_parser": None}, {}, "apparmor", Level.WARNING, "apparmor_parser"),
        (
            {"/sys/module/apparmor/parameters/enabled": None},
            {},
            "apparmor",
            Level.NOTE,
            "does not use",
        ),
        (
            {"/sys/fs/selinux/enforce": "1"},
            {},
            "selinux",
            Level.WARNING,
            "enforcing; the policy lacks system_u:system_r:container_t",
        ),
        (
            {"/sys/fs/selinux/enforce": "0"},
            {"selinux__enabled": False},
            "selinux",
            Level.NOTE,
            "permissive, and",
        ),
        (
            {"/proc/sys/fs/inotify/max_user_instances": "128"},
            {},
            "sysctls",
            Level.WARNING,
            "is 128",
        ),
        (
            {"/proc/swaps": "Filename\n/dev/sda2 partition 1 0 -2"},
            {},
            "swap",
            Level.NOTE,
            "/dev/sda2",
        ),
        (
            {KUBELET: None, "/etc/systemd/system/kubelet.service.d/10-kubeadm.conf": None},
            {},
            "kubelet",
            Level.NOTE,
            "no kubelet",
        ),
        ({FLAGS: None}, {}, "kubelet", Level.WRONG, "containerd.sock"),
        (
            {FLAGS: "KUBELET_KUBEADM_ARGS='--container-runtime-endpoint unix:///run/crio.sock'"},
            {},
            "kubelet",
            Level.WRONG,
            "crio.sock",
        ),
        (
            {
                FLAGS: None,
                "/var/lib/kubelet/config.yaml": (
                    "cgroupDriver: systemd\ncontainerRuntimeEndpoint: unix:///x"
                ),
            },
            {},
            "kubelet",
            Level.WRONG,
            "unix:///x",
        ),
        (
            {"/var/lib/kubelet/config.yaml": "a: ["},
            {"cgroup__driver": "cgroupfs", "cgroup__missing_controllers": "warn"},
            "kubelet",
            Level.WARNING,
            "not YAML",
        ),
        (
            {"/var/lib/kubelet/config.yaml": "cgroupDriver: cgroupfs"},
            {},
            "kubelet-cgroup-driver",
            Level.WARNING,
            "cgroupfs",
        ),
    ],
)
def test_each_problem_has_a_result(
    tmp_path: Path,
    changes: dict[str, str | None],
    config: dict[str, Any],
    code: str,
    level: Level,
    says: str,
) -> None:
    by_code = results(machine(tmp_path, changes, **config))
    assert code in by_code, by_code
    assert by_code[code].level == level and says in by_code[code].observation, by_code[code]
    if level > Level.NOTE:
        assert by_code[code].remedy
    assert {f.code for f in by_code.values() if f.level == Level.WRONG} <= {code, "cni-plugins"}


def test_a_running_kubelet_takes_precedence_over_its_unit(tmp_path: Path) -> None:
    running = {
        "/proc/77/comm": "kubelet\n",
        "/proc/77/cmdline": (
            "/usr/bin/kubelet\0--container-runtime-endpoint=unix:///old\0"
            "--container-runtime-endpoint\0unix:///new\0"
        ),
    }
    by_code = results(machine(tmp_path, dict(running)))
    assert by_code["kubelet"].observation == "kubelet (pid 77) uses the runtime at unix:///new"


def test_a_kubelet_is_not_checked_before_kubeadm_join(tmp_path: Path) -> None:
    """The unit of kubelet's package names files that `kubeadm join` writes. Until they exist,
    doctor gives only the hint to join, and checks neither the endpoint nor the cgroup driver."""
    drop_in = (
        '[Service]\nEnvironment="A=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf'
        ' --kubeconfig=/etc/kubernetes/kubelet.conf"\n'
        'Environment="B=--config=/var/lib/kubelet/config.yaml"\n'
        "ExecStart=\nExecStart=/usr/bin/kubelet $A $B\n"
    )
    changes = {"/etc/systemd/system/kubelet.service.d/10-kubeadm.conf": drop_in, FLAGS: None}
    waiting = results(machine(tmp_path / "new", {**changes, "/var/lib/kubelet/config.yaml": None}))
    assert (waiting["kubelet"].level, waiting.keys()) == (Level.NOTE, {"kubelet"})
    assert "kubeadm join" in waiting["kubelet"].remedy
    joined = results(machine(tmp_path / "joined", changes))
    assert (
        joined["kubelet"].level == Level.WRONG
        and "containerd.sock" in joined["kubelet"].observation
    )


def test_a_builtin_network_needs_no_configuration(tmp_path: Path) -> None:
    host = machine(
        tmp_path, {"/etc/cni/net.d/10.conflist": None}, network__builtin=["10.85.0.0/16"]
    )
    assert results(host) == {}
    (result,) = results(
        machine(tmp_path / "b", {"/etc/cni/net.d/10.conflist": None}, network__builtin=["x"])
    ).values()
    assert result.code == "cni-config" and "'x'" in result.observation


def test_an_exception_in_a_check_becomes_a_warning(tmp_path: Path) -> None:
    def broken(host: Machine) -> list[CheckResult]:
        raise ZeroDivisionError("odd")

    (result,) = examine.examine(machine(tmp_path), (broken,))
    assert (
        result.code == "doctor"
        and result.level == Level.WARNING
        and "ZeroDivisionError: odd" in result.observation
    )


def test_a_starting_server_logs_only_problems(tmp_path: Path) -> None:
    changes: dict[str, str | None] = {
        "/proc/filesystems": "\text4\n",
        "/proc/sys/fs/inotify/max_user_instances": "128",
        "/proc/swaps": "Filename\n/dev/sda2 partition 1 0 -2",
    }
    problems = examine.problems(machine(tmp_path, changes))
    levels = {text.split(":")[0]: level for level, text in problems}
    assert levels["module-overlay"] == logging.WARNING and levels["sysctls"] == logging.INFO
    assert not {"swap", "kernel-version", "cgroup-v2", "seccomp"} & set(levels)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (Unavailable("the zygote has died"), "cannot examine this machine: the zygote has died"),
        (
            JobResult(1, b"", b"NameError: x\n"),
            "cannot examine this machine (exit code 1): NameError: x",
        ),
    ],
)
async def test_a_server_starts_when_its_machine_cannot_be_examined(
    result: JobResult | Unavailable, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    class OtherZygote:
        async def run(self, function: str, **arguments: Any) -> JobResult:
            if isinstance(result, Unavailable):
                raise result
            return result

    await startup.log_problems(cast(Zygote, OtherZygote()), Config())
    assert [record.getMessage() for record in caplog.records] == [says]


@pytest.mark.parametrize(
    ("store", "why", "why_each", "level", "says"),
    [
        ("auto", "", "", Level.FINE, "mounted"),
        ("auto", "no EROFS", "", Level.NOTE, "cannot be mounted: no EROFS"),
        ("auto", "", "each has its own", Level.NOTE, "if images were mounted, each has its own"),
        ("erofs", "", "each has its own", Level.FINE, "mounted"),
        ("erofs", "no EROFS", "", Level.WRONG, "cannot be mounted: no EROFS"),
        ("unpacked", "no EROFS", "", Level.FINE, "unpacked"),
    ],
)
def test_the_images_check_says_whether_images_are_mounted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    why: str,
    why_each: str,
    level: Level,
    says: str,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(file_systems, "mount_obstacle", lambda folder: why)
    monkeypatch.setattr(file_systems, "sharing_obstacle", lambda: why_each)
    host = machine(tmp_path, images__store=store)
    (result,) = examine.examine(host, (file_systems.images,))
    assert (result.code, result.level) == ("images", level) and says in result.observation
    assert bool(result.effect and result.remedy) == (level > Level.FINE)


def test_an_selinux_policy_for_containers_is_fine(tmp_path: Path) -> None:
    host = machine(tmp_path, {"/sys/fs/selinux/enforce": "0", "/sys/fs/selinux/context": ""})
    (result,) = limits.selinux(host)
    assert (result.level, result.observation) == (
        Level.FINE,
        "permissive, containers have the label system_u:system_r:container_t",
    )


def test_doctor_reports_wrong_hosts_toml_files(tmp_path: Path) -> None:
    """Each result names the wrong hosts.toml or certificate by its path on the machine."""
    folder = "/etc/pyrunc/certs.d"
    files: dict[str, str | None] = {
        f"{folder}/good.example/hosts.toml": "server = 'https://m.example'",
        f"{folder}/wrong.example_5000_/hosts.toml": "server = 5",
        f"{folder}/odd.example/hosts.toml": "sever = 'x'",
        f"{folder}/_default/hosts.toml": "server = 'https://m.example'\nca = 'absent.pem'",
    }
    host = machine(tmp_path, files, registry__config_path=folder)
    default, odd, wrong = registries.registries(host)
    assert (
        default.level == Level.WARNING
        and f"{folder}/_default/absent.pem cannot be used" in default.observation
    )
    assert (
        odd.level == Level.NOTE
        and odd.observation == f"{folder}/odd.example/hosts.toml: sever is unknown and ignored"
    )
    assert wrong.level == Level.WARNING and wrong.observation.startswith(
        f"{folder}/wrong.example_5000_/hosts.toml"
    )
    assert "wrong.example:5000" in wrong.effect
    for name in ("wrong.example_5000_", "odd.example", "_default"):
        (tmp_path / f"{folder}/{name}/hosts.toml".lstrip("/")).unlink()
    [fine] = registries.registries(host)
    assert fine.level == Level.FINE


def test_doctor_reports_two_folders_for_the_same_registry(tmp_path: Path) -> None:
    folder = "/etc/pyrunc/certs.d"
    files: dict[str, str | None] = {
        f"{folder}/{name}/hosts.toml": ""
        for name in ("r.example", "R.example_443_", "r.example_5000_", "_default")
    }
    [result] = registries.registries(machine(tmp_path, files, registry__config_path=folder))
    assert (
        result.observation
        == f"{folder}/r.example and {folder}/R.example_443_ are for the same registry"
    )
