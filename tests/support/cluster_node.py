"""One node of a cluster: a network namespace with an uplink, in which pyrunc's server and kubelet
run. If several nodes share the machine, each also has a mount namespace, in which the folders of
the others are empty.

Nodes are plugged into a `Switch`, a namespace with a bridge. The machine itself is plugged in as
well, so that tests reach nodes by their addresses.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.support import ledger
from tests.support.keeper import end_keeper
from tests.support.processes import Program, installed, wait_until

# from the range for benchmarks (RFC 2544), which no machine uses
NODE_IP, OUTSIDE_IP = "198.18.77.1", "198.18.77.254"
REGISTRY, LOCKED_REGISTRY = f"{NODE_IP}:5002", "127.0.0.1:5001"
POD_SUBNETS = ("10.244.0.0/24", "fd77:244::/64")
"""The first node's, of the ranges that the controller manager shares out."""
DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")  # kubelet has no option for this path


def bridge_network(leases: Path, subnets: Iterable[str] = POD_SUBNETS[:1]) -> dict[str, Any]:
    """Return the CNI configuration of a single node: a bridge with `subnets`, or with kubelet's pod
    CIDRs if `subnets` is empty."""
    # Other nodes do not reach this bridge. Its default is IPv4 only, as for the other servers in
    # benchmarks.
    ranges = [[{"subnet": subnet}] for subnet in subnets]
    ipam = {"type": "host-local", "dataDir": str(leases), **({"ranges": ranges} if ranges else {})}
    bridge = {
        "type": "bridge",
        "bridge": "kube0",
        "isDefaultGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": ipam,
        "capabilities": {"ipRanges": not ranges},
    }
    plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
    return {"cniVersion": "1.1.0", "name": "kube", "plugins": plugins}


class Switch:
    """A network namespace with a bridge, to which this machine is connected as `OUTSIDE_IP`."""

    def __init__(self, name: str) -> None:
        self.name, self._outside = f"{name}-switch", f"{name[:12]}-up"

    def make(self) -> None:
        """Make the namespace, and a veth pair that connects this machine to its bridge."""
        _run("ip netns add", self.name)
        _run("ip -n", self.name, "link add nodes type bridge")
        _run("ip -n", self.name, "link set nodes up")
        _run("ip link add", self._outside, "type veth peer name outside netns", self.name)
        # This end is up before any node is connected.
        self._connect("outside")
        _run(f"ip addr add {OUTSIDE_IP}/24 dev", self._outside)
        _run("ip link set", self._outside, "up")

    def remove(self) -> None:
        """Remove the namespace with all its network devices."""
        subprocess.run(["ip", "link", "del", self._outside], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)

    def plug(self, namespace: str, port: str, address: str, address6: str) -> None:
        """Connect `namespace` to the bridge by a device `uplink` with its addresses and a default
        route."""
        _run("ip -n", self.name, "link add", port, "type veth peer name uplink netns", namespace)
        self._connect(port)
        _run("ip -n", namespace, f"addr add {address}/24 dev uplink")
        _run("ip -n", namespace, f"addr add {address6}/64 dev uplink nodad")
        _run("ip -n", namespace, "link set uplink up")
        _run("ip -n", namespace, f"route add default via {OUTSIDE_IP}")

    def _connect(self, port: str) -> None:
        _run("ip -n", self.name, "link set", port, "master nodes")
        _run("ip -n", self.name, "link set", port, "up")


class Node:
    """A node of a cluster, in namespaces.

    - `number`: 1 for the first node.
    - `name`: the name of the node's network namespace.
    - `host`: the node's name in Kubernetes.
    - `missing_controllers`: the server's setting of this name.
    - `pods_group`: the cgroup of pods for which kubelet names no cgroup, removed when the node is
      stopped; "": the server's default.
    - `own_network`: whether the node has its own folders of CNI; otherwise the server's
      configuration names them.
    """

    cgroup_driver = "cgroupfs"
    # A hybrid host's v2 tree has no controllers. In a guest a missing one is an error.
    missing_controllers = "warn"
    pods_group = ""
    own_network = True

    def __init__(self, folder: Path, name: str = "pyrunc-kube", number: int = 1) -> None:
        self.folder, self.name, self.number = folder, name, number
        self.host = f"node{number}"
        self.address, self.address6 = f"198.18.77.{number}", f"2001:db8:77::{number}"
        self.socket = folder / "cri.sock"
        self.server = Program("pyrunc-cri", folder / "log")
        self.kubelet = Program("kubelet", folder / "log")
        self.mounts = Program("mounts", folder / "log")
        self.switch: Switch | None = None

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs `command` in the node's namespaces."""
        pid = self.mounts.pid
        own = [f"--mount=/proc/{pid}/ns/mnt"] if pid else []
        # nsenter keeps /sys as it is; `ip netns exec` would not.
        return ["nsenter", f"--net=/run/netns/{self.name}", *own, *command]

    def output(self, command: str) -> str:
        """Return the output of a command in the node; it must succeed."""
        return subprocess.run(
            self.inside(*shlex.split(command)), capture_output=True, text=True, check=True
        ).stdout

    # ---- namespaces

    def make_network(self, switch: Switch | None = None) -> None:
        """Make the node's network namespace, and connect it to `switch`, or to a new switch without
        other nodes."""
        if switch is None:
            self.switch = switch = Switch(self.name)
            switch.make()
        _run("ip netns add", self.name)
        _run("ip -n", self.name, "link set lo up")
        switch.plug(self.name, self.host, self.address, self.address6)

    def remove_network(self) -> None:
        """Remove the network namespace, and the switch if `make_network` made it."""
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)
        if self.switch is not None:
            self.switch.remove()

    def make_mounts(self, hidden: Iterable[Path]) -> None:
        """Make a private mount namespace for the node, in which the folders `hidden` are empty."""
        self.folder.mkdir(parents=True, exist_ok=True)
        DEVICE_PLUGINS.mkdir(parents=True, exist_ok=True)
        hide = [f"mount -t tmpfs -o ro,size=4k hidden {shlex.quote(str(path))}" for path in hidden]
        script = " && ".join(
            [
                "mount --make-rshared /",
                *hide,
                # Each node has its own folder of device plugins. Of two kubelets that start at once
                # and share it, the second would find the socket of the first and exit.
                f"mount -t tmpfs -o size=1m,mode=755 device-plugins {DEVICE_PLUGINS}",
                f"echo > {self.folder}/mounted",
                "exec sleep infinity",
            ]
        )
        (self.folder / "mounted").unlink(missing_ok=True)
        self.mounts.start(["unshare", "--mount", "--propagation", "private", "sh", "-c", script])
        if not wait_until((self.folder / "mounted").exists, 10):
            raise RuntimeError(f"no mount namespace for {self.host}: {self.mounts.tail()}")

    # ---- server

    def write_configuration(self, network: Mapping[str, Any] | None = None) -> None:
        """Write the configurations of CNI (none if `network` is empty), the registries and the
        server."""
        self.write_network(bridge_network(self.folder / "leases") if network is None else network)
        for host, mirror in (
            ("docker.io", REGISTRY),
            ("registry.k8s.io", REGISTRY),
            (LOCKED_REGISTRY, LOCKED_REGISTRY),
        ):
            hosts = self.folder / "certs.d" / host / "hosts.toml"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(
                f'server = "http://{mirror}"\n[host."http://{mirror}"]\n  capabilities = ["pull",'
                ' "resolve"]\n'
            )
        parent = f'default_parent = "{self.pods_group}"\n' if self.pods_group else ""
        store = os.environ.get("PYRUNC_TESTS_IMAGE_STORE", "auto")
        (self.folder / "config.toml").write_text(
            f'[images]\nstore = "{store}"\n[cgroup]\nmissing_controllers ='
            f' "{self.missing_controllers}"\n{parent}\n[registry]\nconfig_path ='
            f' "{self.folder}/certs.d"\n'
        )

    def write_network(self, network: Mapping[str, Any]) -> None:
        """Replace the node's CNI configuration atomically."""
        folder = self.folder / "net.d"
        folder.mkdir(parents=True, exist_ok=True)
        if network:
            (folder / "new").write_text(json.dumps(network))
            (folder / "new").rename(folder / "10-kube.conflist")

    def launch_server(
        self, boot_id: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        """Start `pyrunc-cri serve` without waiting. With `boot_id` the server sees this boot id, as
        after a reboot. `environment` is added to the test's environment."""
        command = [
            *installed("pyrunc-cri"),
            "serve",
            "--listen",
            f"unix://{self.socket}",
            "--root",
            f"{self.folder}/root",
            "--state",
            f"{self.folder}/state",
            *(
                (
                    "--cni-conf-dir",
                    f"{self.folder}/net.d",
                    "--cni-bin-dir",
                    f"{self.folder}/cni-bin",
                )
                if self.own_network
                else ()
            ),
            "--cgroup-driver",
            self.cgroup_driver,
            "--config",
            f"{self.folder}/config.toml",
        ]
        if boot_id:
            (self.folder / "boot_id").write_text(boot_id + "\n")
            # In the server's mount namespace this file covers the kernel's.
            bind = (
                f'mount --bind "{self.folder}/boot_id" /proc/sys/kernel/random/boot_id && exec "$@"'
            )
            command = ["unshare", "-m", "--propagation", "slave", "sh", "-c", bind, "sh", *command]
        self.server.start(self.inside(*command), environment=environment)

    def start_server(self, boot_id: str = "", environment: Mapping[str, str] | None = None) -> None:
        """Start the server like `launch_server`; return when it answers."""
        self.launch_server(boot_id, environment)
        # minutes, in an emulated guest
        answered = wait_until(lambda: not self.server.pid or self.answers(), 180)
        if not answered or not self.server.pid:
            raise RuntimeError(f"the CRI server does not answer:\n{self.server.tail()}")

    def stop_server(self) -> None:
        """End the server and its keeper, a process that outlives servers."""
        self.server.stop()
        end_keeper(self.folder / "state")

    def answers(self) -> bool:
        """Return whether the CRI socket answers `Version`."""
        import grpc

        from cri_server.api import api_pb2, api_pb2_grpc

        with grpc.insecure_channel(f"unix://{self.socket}") as channel:
            try:
                runtime = api_pb2_grpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
                runtime.Version(api_pb2.VersionRequest(), timeout=2)
            except grpc.RpcError:
                return False
        return True

    def load(self, archive: Path) -> None:
        """Load an image archive into the server."""
        command = [
            *installed("pyrunc-cri"),
            "--address",
            f"unix://{self.socket}",
            "image",
            "load",
            str(archive),
        ]
        subprocess.run(command, check=True, capture_output=True)

    def kill_everything(self) -> None:
        """Kill server, keeper, shims and all processes of containers, as a reboot does."""
        self.server.stop(signal.SIGKILL)
        end_keeper(self.folder / "state", signal.SIGKILL)
        for record in (self.folder / "state" / "sandboxes").glob("*/shim.json"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
        names = [
            p.name
            for kind in ("sandboxes", "containers")
            for p in (self.folder / "state" / kind).iterdir()
        ]
        for name in sorted(ledger.cgroups(), reverse=True):
            group = Path(name)
            if any(identifier in group.name for identifier in names):
                (group / "cgroup.kill").write_text("1")
                wait_until(lambda g=group: not (g / "cgroup.procs").read_text(), 10)  # type: ignore[misc]
                group.rmdir()

    def remove_everything(self) -> None:
        """Stop and remove every sandbox and container."""
        from tests.support.cri import remove_pods

        remove_pods(self.socket)

    # ---- kubelet

    def start_kubelet(self, program: Path, pki: Path, kubeconfig: Path, **changes: object) -> None:
        """Start kubelet on the server's socket, with `changes` to kubelet's configuration."""
        configuration = {**self._kubelet_configuration(pki), **changes}
        (self.folder / "manifests").mkdir(exist_ok=True)
        (self.folder / "kubelet.yaml").write_text(json.dumps(configuration))
        self.kubelet.start(
            self.inside(
                str(program),
                "--config",
                f"{self.folder}/kubelet.yaml",
                "--kubeconfig",
                str(kubeconfig),
                "--root-dir",
                f"{self.folder}/kubelet",
                "--cert-dir",
                f"{self.folder}/kubelet-pki",
                "--hostname-override",
                self.host,
                "--node-ip",
                self.address,
                "--v",
                os.environ.get("KUBELET_V", "2"),
            )
        )

    def _kubelet_configuration(self, pki: Path) -> dict[str, object]:
        return {
            "kind": "KubeletConfiguration",
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "failSwapOn": False,
            "failCgroupV1": False,
            # This would need controllers in the v2 tree, which a hybrid host keeps on v1.
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "cgroupDriver": "cgroupfs",
            "address": "0.0.0.0",
            "staticPodPath": f"{self.folder}/manifests",
            # A kubelet removes the logs of pods that it does not know.
            "podLogsDir": f"{self.folder}/pod-logs",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": f"{pki}/ca.crt"},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "evictionHard": {
                "imagefs.available": "1%",
                "nodefs.available": "1%",
                "memory.available": "50Mi",
            },
            # kubelet collects no images, however full the disk of this machine is.
            "imageGCHighThresholdPercent": 100,
            "makeIPTablesUtilChains": False,
            "clusterDNS": ["10.96.0.10"],
            "clusterDomain": "cluster.local",
            "imageMinimumGCAge": "1s",
            "syncFrequency": "10s",
            "logging": {"flushFrequency": "1s"},
            # no collector listens: its calls carry the trace's id
            "tracing": {"endpoint": "127.0.0.1:9", "samplingRatePerMillion": 1000000},
        }

    # ---- the end

    def stop(self) -> None:
        """End server, pods and mounts, and leave only files. kubelet must have ended before."""
        if self.server.pid:
            if self.answers():
                self.remove_everything()
            self.stop_server()
        self._remove_pods_group()
        self._unmount_kubelet()
        self.mounts.stop(signal.SIGKILL)
        self.remove_network()

    def _remove_pods_group(self) -> None:
        """Remove the parent cgroup of all pods, which the server leaves."""
        if self.pods_group:
            # If it is not empty it stays, and the ledger reports it.
            with contextlib.suppress(OSError):
                os.rmdir(ledger.cgroup_root() + self.pods_group)

    def _unmount_kubelet(self) -> None:
        """Unmount the tmpfs volumes that kubelet leaves when it ends."""
        prefix = f"{self.folder}/"
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in sorted((p for p in points if p.startswith(prefix)), reverse=True):
            subprocess.run(["umount", "-l", point], check=False)


def _run(*words: str) -> None:
    """Run a command; an argument may hold several words, separated by spaces."""
    subprocess.run(" ".join(words).split(), check=True)
