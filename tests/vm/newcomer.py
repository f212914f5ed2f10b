"""Plays a newcomer who has only docs/ and runs the commands of a page."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import documents, guest_disk, images, kubeadm
from tests.support.guest import SERVICES, Guest
from tests.support.guest_control import GuestControlPlane
from tests.support.kubeadm import Cluster
from tests.support.processes import wait_until
from tests.vm.conftest import Boots

PATIENCE_S = 400.0  # for emulated, shared processors
NODE = "guest"
READY = "kubectl get nodes -o 'jsonpath={.items[*].status.conditions[?(@.type==\"Ready\")].status}'"
# Packages' records and caches, logs, files of the tests, and files that kubelet makes and `kubeadm
# reset` keeps.
NOT_COUNTED = (
    "/var/lib/dpkg",
    "/var/lib/apt",
    "/var/cache",
    "/var/log",
    "/root",
    "/tmp",
    "/var/tmp",
    "/mnt",
    "/var/lib/systemd/timers",
    "/var/lib/kubelet",
    "/etc/kubernetes",
    "/usr/libexec/kubernetes",
)
FACTS = "-type d -printf '%p/ %M %U:%G\\n' -o -printf '%p %M %U:%G %s %l\\n'"
# Files of this boot by their names (kubelet leaves tables of the families ip and ip6), objects of
# the kernel with our name, and units that systemd knows.
BOOT = (
    "find /run -name '*pyrunc*'; ls /sys/class/net; nft list tables | grep -v -E '^table (ip|ip6)"
    " '; findmnt -rn -o TARGET,FSTYPE; pgrep -a pyrunc; pgrep -a pause; ls /run/netns 2>/dev/null;"
    " find /sys/fs/cgroup -name '*pyrunc*'; systemctl list-units --all --plain --no-legend"
    " '*pyrunc*' | cut -d' ' -f1"
)
# The answer that a person would give apt.
ANSWERS = "echo 'APT::Get::Assume-Yes \"true\";' >/etc/apt/apt.conf.d/99yes; mkdir -p /root/later"
CLOCK = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "clock"},
    "spec": {
        "selector": {"matchLabels": {"app": "clock"}},
        "template": {
            "metadata": {"labels": {"app": "clock"}},
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "containers": [
                    {
                        "name": "main",
                        "image": "busybox",
                        "imagePullPolicy": "Never",
                        "command": [
                            "sh",
                            "-c",
                            "n=0; while true; do n=$((n+1)); echo $n; sleep 1; done",
                        ],
                    }
                ],
            },
        },
    },
}


@dataclass(frozen=True)
class Clock:
    """A pod of the Deployment CLOCK. `identity`: (id of its container, number of restarts, start
    time of its process); `count`: the last line of its log."""

    pod: str
    identity: tuple[str, int, str]
    count: int


class Newcomer:
    """Runs the commands of the docs on a guest and on the control plane of its cluster."""

    def __init__(self, guest: Guest, cluster: Cluster) -> None:
        self.guest, self.cluster = guest, cluster
        self.profile = "cd /root"

    def types(self, block: str, *, timeout_s: float = 900, **words: str) -> str:
        """Run a block of shell commands of the docs in /root of the guest; return their output.
        Raises RuntimeError when one fails. `words`: values for the block's capital words."""
        script = f"{self.profile}\nset -e\n{documents.filled(block, **words)}"
        done = self.guest.ssh(script, timeout_s=timeout_s)
        return (done.stdout + done.stderr).decode(errors="replace")

    def types_on_the_control_plane(self, block: str, **words: str) -> str:
        """Run a block of shell commands of the docs on the control plane; return their output."""
        return self.cluster.run(documents.filled(block, **words))

    def joins(self, block: str, command: str) -> str:
        """Run `block`, which joins the cluster, with the token and the hash in `command`, the
        output of `kubeadm token create`."""
        token = re.search(r"--token (\S+)", command)
        digest = re.search(r"--discovery-token-ca-cert-hash (\S+)", command)
        assert token and digest, command
        return self.types(block, CONTROL_PLANE=SERVICES, TOKEN=token[1], HASH=digest[1])

    def until(self, question: str, answer: str, what: str) -> str:
        """Repeat the command `question` on the control plane until its output contains `answer`."""
        output = [""]

        def ask() -> bool:
            output[0] = self.cluster.run(question)
            return answer in output[0]

        if not wait_until(ask, PATIENCE_S, 2):
            journal = self.guest.ssh(
                "journalctl --no-pager -o cat -n 60 -u kubelet -u pyrunc-cri", check=False
            )
            events = self.cluster.run("kubectl get events -A")
            raise AssertionError(
                f"{what}: not within {PATIENCE_S:.0f} s:"
                f" {output[0]}\n{events}\n{journal.stdout.decode()}"
            )
        return output[0]

    def runs_clock(self) -> None:
        """Make the Deployment CLOCK and wait for its pod."""
        manifest = self.cluster.folder / "clock.json"
        manifest.write_text(json.dumps(CLOCK))
        self.cluster.run(f"kubectl apply -f {manifest}")
        self.rolled_out()

    def restarts_clock(self) -> None:
        """Replace the pod of CLOCK, and wait for the end of the old one."""
        self.cluster.run("kubectl rollout restart deployment clock")
        self.rolled_out()

    def rolled_out(self) -> None:
        """Wait until the Deployment has exactly one pod, which runs and has the newest template."""
        output = self.cluster.run(
            f"kubectl rollout status deployment clock --timeout={PATIENCE_S:.0f}s || kubectl get"
            " events"
        )
        assert "successfully rolled out" in output, output
        self.until(
            "kubectl get pods -l app=clock -o name | wc -l", "1", "the end of the pod before"
        )

    def pod(self) -> dict[str, Any]:
        """Return the Deployment's only pod."""
        pods = json.loads(self.cluster.run("kubectl get pods -l app=clock -o json"))["items"]
        assert len(pods) == 1, pods
        return dict(pods[0])

    def clock(self) -> Clock:
        """Return the pod of CLOCK as our server runs it now."""
        pod = self.pod()
        name, (status,) = pod["metadata"]["name"], pod["status"]["containerStatuses"]
        output = self.types(
            f"pyrunc-cri exec {name} cat /proc/1/stat; pyrunc-cri logs --tail 1 {name}"
        ).split("\n")
        identity = status["containerID"], int(status["restartCount"]), output[0].split()[21]
        return Clock(name, identity, int(output[1]))

    def left(self, *not_counted: str) -> set[str]:
        """Return the files on the disk except below NOT_COUNTED and `not_counted`, and the kernel
        objects, processes and units of this boot that have our name or come from pods."""
        skipped = " -o ".join(f"-path {path}" for path in (*NOT_COUNTED, *not_counted))
        disk = f"find / -xdev \\( {skipped} \\) -prune -o {FACTS}"
        return set(
            self.guest.ssh(f"{disk}; {{ {BOOT}; }} 2>/dev/null | sort -u; true")
            .stdout.decode()
            .splitlines()
        )


@contextlib.contextmanager
def at_a_new_machine(boots: Boots, folder: Path, disks: Sequence[Path] = ()) -> Iterator[Newcomer]:
    """Provide a newly booted guest with Kubernetes' packages and the additional `disks`. Its
    cluster's control plane keeps its files below `folder`. The guest is powered off afterwards."""
    control = GuestControlPlane(folder, boots.api_port, joining=True)
    boots.stop()
    try:
        guest = boots.guest("trixie", [guest_disk.kubernetes(), guest_disk.kubeadm(), *disks])
        control.start()
        cluster = Cluster(control)
        cluster.prepare()
        kubeadm.install_packages(guest)
        guest.ssh(ANSWERS)
        push(guest, images.busybox(), "/root/busybox.tar")
        yield Newcomer(guest, cluster)
    finally:
        control.stop()
        boots.stop()


def push(guest: Guest, file: Path, target: str) -> None:
    guest.ssh(f"mkdir -p $(dirname {target}) && cat > {target}", stdin=file.read_bytes())
