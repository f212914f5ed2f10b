"""Tests shared and host namespaces, and the security context."""

from __future__ import annotations

import os

from tests.kube.pods import Kube, pod, shell
from tests.support.cluster import NODE_IP

DEFAULT_CAPABILITIES = "00000000a80425fb"


def test_a_pod_can_use_the_host_network(kube: Kube) -> None:
    created = kube.run(pod("p", hostNetwork=True))
    assert created["status"]["podIP"] == NODE_IP
    assert "uplink" in kube.sh("p", "ls /sys/class/net")
    assert kube.sh("p", "hostname") == os.uname().nodename


def test_containers_can_share_a_process_namespace(kube: Kube) -> None:
    kube.run(
        pod(
            "p",
            {"command": ["sleep", "1111"]},
            {"command": ["sleep", "2222"]},
            shareProcessNamespace=True,
        )
    )
    listing = kube.sh("p", "ps -o pid,args")
    assert "sleep 1111" in listing
    assert "sleep 2222" in listing
    assert "pause" in kube.sh("p", "cat /proc/1/cmdline")
    kube.run(pod("q", {"command": ["sleep", "1111"]}, {"command": ["sleep", "2222"]}))
    assert "sleep 2222" not in kube.sh("q", "ps -o pid,args")


def test_a_pod_has_its_user_groups_and_fs_group(kube: Kube) -> None:
    context = {
        "runAsUser": 1000,
        "runAsGroup": 3000,
        "fsGroup": 2000,
        "supplementalGroups": [4000],
        "runAsNonRoot": True,
    }
    mounts = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    kube.run(
        pod(
            "p",
            shell("sleep 3600", **mounts),
            securityContext=context,
            volumes=[{"name": "v", "emptyDir": {}}],
        )
    )
    assert kube.sh("p", "id -u; id -g; id -G") == "1000\n3000\n3000 2000 4000" or set(
        kube.sh("p", "id -G").split()
    ) == {"3000", "2000", "4000"}
    assert kube.sh("p", "stat -c %g /v; touch /v/x; stat -c %u:%g /v/x") == "2000\n1000:2000"


def test_containers_have_their_requested_capabilities(kube: Kube) -> None:
    drop = shell("sleep 3600", securityContext={"capabilities": {"drop": ["ALL"]}})
    add = shell(
        "sleep 3600", securityContext={"capabilities": {"add": ["NET_ADMIN"], "drop": ["CHOWN"]}}
    )
    kube.run(pod("p", {"command": ["sleep", "3600"]}, drop, add))
    bounding = "sed -n 's/^CapBnd:\\t//p' /proc/self/status"
    assert kube.sh("p", bounding) == DEFAULT_CAPABILITIES
    assert kube.sh("p", bounding, container="c2") == "0" * 16
    assert (
        int(kube.sh("p", bounding, container="c3"), 16)
        == (int(DEFAULT_CAPABILITIES, 16) | 1 << 12) & ~1
    )
    assert (
        kube.exec(
            "p", "ip", "link", "add", "x0", "type", "bridge", container="c3", check=False
        ).returncode
        == 0
    )


def test_a_root_can_be_read_only_and_a_container_privileged(kube: Kube) -> None:
    readonly = shell("sleep 3600", securityContext={"readOnlyRootFilesystem": True})
    privileged = shell("sleep 3600", securityContext={"privileged": True})
    kube.run(pod("p", readonly, privileged))
    assert "Read-only file system" in kube.exec("p", "touch", "/x", check=False).stderr
    assert kube.sh("p", "sed -n 's/^Seccomp:\\t//p' /proc/self/status", container="c2") == "0"
    assert int(kube.sh("p", "sed -n 's/^CapEff:\\t//p' /proc/self/status", container="c2"), 16) & (
        1 << 21
    )
    assert kube.sh("p", "mount -t tmpfs t /tmp && echo mounted", container="c2") == "mounted"


def test_seccomp_and_no_new_privileges_are_applied(kube: Kube) -> None:
    confined = shell(
        "sleep 3600",
        securityContext={
            "seccompProfile": {"type": "RuntimeDefault"},
            "allowPrivilegeEscalation": False,
        },
    )
    unconfined = shell("sleep 3600", securityContext={"seccompProfile": {"type": "Unconfined"}})
    kube.run(pod("p", confined, unconfined))
    status = "sed -n 's/^\\(Seccomp\\|NoNewPrivs\\):\\t//p' /proc/self/status"
    assert kube.sh("p", status).split() == ["1", "2"]
    assert kube.sh("p", status, container="c2").split() == ["0", "0"]
    assert kube.exec("p", "unshare", "-m", "true", check=False).returncode != 0


def test_default_paths_are_masked_and_read_only(kube: Kube) -> None:
    kube.run(pod("p"))
    assert kube.sh("p", "cat /proc/kcore | wc -c; cat /proc/keys | wc -c") == "0\n0"
    assert kube.exec("p", "sh", "-c", "echo h >/proc/sysrq-trigger", check=False).returncode != 0
    assert (
        kube.exec("p", "sh", "-c", "echo 1 >/proc/sys/vm/drop_caches", check=False).returncode != 0
    )


def test_a_pod_has_its_sysctls(kube: Kube) -> None:
    context = {"sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "80"}]}
    kube.run(pod("p", securityContext=context))
    assert kube.sh("p", "cat /proc/sys/net/ipv4/ip_unprivileged_port_start") == "80"
