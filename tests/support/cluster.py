"""A real one-node Kubernetes on our CRI server: etcd, API server, controller manager, scheduler, kubelet, in a network
namespace of its own, with two registries on its loopback.

As a program (`make kube`): `python -m tests.support.cluster up|down FOLDER`. The node's address is 198.18.77.1, reached from
this namespace over a veth pair; docker.io and registry.k8s.io are mirrored to the registry on 127.0.0.1:5000 by
`hosts.toml`, and 127.0.0.1:5001 demands a password.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import ledger, toolchain
from tests.support.processes import Program, installed, wait_until

NODE_IP, OUTSIDE_IP = (
    "198.18.77.1",
    "198.18.77.2",
)  # of the range for benchmarks (RFC 2544), which no machine has
REGISTRY, LOCKED_REGISTRY = "127.0.0.1:5000", "127.0.0.1:5001"
USER, PASSWORD = "puller", "s3cret-of-the-test"
POD_SUBNET = "10.244.0.0/24"
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")


class Node:
    """A network namespace with an uplink, and our server in it.

    A hybrid host has no controllers in its v2 tree, so a missing one is a warning there; in the guest it is an error.
    """

    cgroup_driver = "cgroupfs"
    missing_controllers = "warn"

    def __init__(self, folder: Path, name: str = "pyrunc-kube") -> None:
        self.folder, self.name = folder, name
        self.socket = folder / "cri.sock"
        self.server = Program("pyrunc-cri", folder / "log")

    def inside(self, *command: str) -> list[str]:
        """`command` run in the node's network namespace; nsenter leaves /sys as it is, `ip netns exec` would not."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *command]

    def make_network(self) -> None:
        """The namespace, its loopback, and a veth pair to here."""
        link = f"{self.name[:10]}-up"
        for command in (
            ["ip", "netns", "add", self.name],
            ["ip", "-n", self.name, "link", "set", "lo", "up"],
            ["ip", "link", "add", link, "type", "veth", "peer", "name", "uplink", "netns", self.name],
            ["ip", "addr", "add", f"{OUTSIDE_IP}/30", "dev", link],
            ["ip", "link", "set", link, "up"],
            ["ip", "-n", self.name, "addr", "add", f"{NODE_IP}/30", "dev", "uplink"],
            ["ip", "-n", self.name, "link", "set", "uplink", "up"],
            ["ip", "-n", self.name, "route", "add", "default", "via", OUTSIDE_IP],
        ):
            subprocess.run(command, check=True)

    def remove_network(self) -> None:
        """Take back `make_network`; the links go with the namespace."""
        subprocess.run(["ip", "link", "del", f"{self.name[:10]}-up"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)

    def write_configuration(self) -> None:
        """CNI, registries and the server's own file."""
        conf = self.folder / "net.d"
        conf.mkdir(parents=True, exist_ok=True)
        bridge = {
            "type": "bridge", "bridge": "kube0", "isDefaultGateway": True, "ipMasq": True, "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": POD_SUBNET}]], "dataDir": str(self.folder / "leases")},
        }  # fmt: skip
        plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
        (conf / "10-kube.conflist").write_text(
            json.dumps({"cniVersion": "1.0.0", "name": "kube", "plugins": plugins})
        )
        for host, mirror in (
            ("docker.io", REGISTRY),
            ("registry.k8s.io", REGISTRY),
            (LOCKED_REGISTRY, LOCKED_REGISTRY),
        ):
            hosts = self.folder / "certs.d" / host / "hosts.toml"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(
                f'server = "http://{mirror}"\n[host."http://{mirror}"]\n  capabilities = ["pull", "resolve"]\n'
            )
        (self.folder / "config.toml").write_text(
            f'[cgroup]\nmissing_controllers = "{self.missing_controllers}"\n\n[registry]\nconfig_path = "{self.folder}/certs.d"\n'
        )

    def start_server(self, boot_id: str = "") -> None:
        """Start `pyrunc-cri serve`; it answers when this returns. With `boot_id` it believes in another boot of the machine:
        it runs in a mount namespace where the kernel's file reads so.
        """
        command = [
            *installed("pyrunc-cri"), "serve", "--listen", f"unix://{self.socket}", "--root", f"{self.folder}/root", "--state", f"{self.folder}/state",
            "--cni-conf-dir", f"{self.folder}/net.d", "--cni-bin-dir", f"{self.folder}/cni-bin",
            "--cgroup-driver", self.cgroup_driver, "--config", f"{self.folder}/config.toml",
        ]  # fmt: skip
        if boot_id:
            (self.folder / "boot_id").write_text(boot_id + "\n")
            bind = f'mount --bind "{self.folder}/boot_id" /proc/sys/kernel/random/boot_id && exec "$@"'
            command = ["unshare", "-m", "--propagation", "slave", "sh", "-c", bind, "sh", *command]
        self.server.start(self.inside(*command))
        wait_until(lambda: not self.server.pid or self.answers(), 60)
        if not self.server.pid or not self.answers():
            raise RuntimeError(f"the CRI server does not answer:\n{self.server.tail()}")

    def answers(self) -> bool:
        """Whether the CRI socket answers `Version`."""
        import grpc

        from cri_server.api import api_pb2, api_pb2_grpc

        with grpc.insecure_channel(f"unix://{self.socket}") as channel:
            try:
                api_pb2_grpc.RuntimeServiceStub(channel).Version(api_pb2.VersionRequest(), timeout=2)
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
        """What a reboot does: no shim and no process of a container is left."""
        self.server.stop(signal.SIGKILL)
        for record in (self.folder / "state" / "sandboxes").glob("*/shim.json"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
        names = [
            p.name for kind in ("sandboxes", "containers") for p in (self.folder / "state" / kind).iterdir()
        ]
        for name in sorted(ledger.cgroups(), reverse=True):
            group = Path(name)
            if any(identifier in group.name for identifier in names):
                (group / "cgroup.kill").write_text("1")
                wait_until(lambda g=group: not (g / "cgroup.procs").read_text(), 10)  # type: ignore[misc]
                group.rmdir()

    def remove_everything(self) -> None:
        """Stop and remove every sandbox and container through CRI, as an administrator would with crictl."""
        import grpc

        from cri_server.api import api_pb2, api_pb2_grpc

        with grpc.insecure_channel(f"unix://{self.socket}") as channel:
            runtime = api_pb2_grpc.RuntimeServiceStub(channel)
            for sandbox in runtime.ListPodSandbox(api_pb2.ListPodSandboxRequest()).items:
                runtime.StopPodSandbox(api_pb2.StopPodSandboxRequest(pod_sandbox_id=sandbox.id), timeout=60)
                runtime.RemovePodSandbox(
                    api_pb2.RemovePodSandboxRequest(pod_sandbox_id=sandbox.id), timeout=60
                )


class Cluster:
    """The control plane and kubelet on one node. `folder` holds everything; `kubeconfig` is usable from outside the node."""

    def __init__(self, folder: Path, name: str = "pyrunc-kube") -> None:
        self.folder = folder
        self.node = Node(folder, name)
        self.kubeconfig = folder / "kubeconfig"
        self.programs = {
            n: Program(n, folder / "log") for n in (*CONTROL_PLANE, "registry", "locked-registry")
        }

    def up(self, images: Sequence[Path] = (), locked_images: Sequence[Path] = ()) -> None:
        """Start it all; the node is Ready when this returns."""
        self.bin = toolchain.kubernetes()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.node.make_network()
        self.node.write_configuration()
        self._start_registries(images, locked_images)
        self.node.start_server()
        self._make_certificates()
        self._start_control_plane()
        self.start_kubelet()
        self._wait_for("node Ready", self._node_is_ready, 120)

    def down(self) -> None:
        """End it all and leave nothing: pods, kubelet's mounts, programs, the network namespace, the folder's sockets."""
        for name in reversed(CONTROL_PLANE):
            self.programs[name].stop()
        if self.node.server.pid:
            if self.node.answers():
                self.node.remove_everything()
            self.node.server.stop()
        for name in ("registry", "locked-registry"):
            self.programs[name].stop()
        self._unmount_kubelet()
        self.node.remove_network()

    def kubectl(
        self, *arguments: str, check: bool = True, timeout_s: float = 120, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl; on failure the error shows what it printed."""
        command = [str(toolchain.kubernetes() / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)  # type: ignore[call-overload]
        if check and done.returncode:
            raise AssertionError(
                f"kubectl {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done  # type: ignore[no-any-return]

    def start_kubelet(self) -> None:
        """Start kubelet against our socket; used again after a test killed it."""
        self.programs["kubelet"].start(
            self.node.inside(
                f"{self.bin}/kubelet", "--config", f"{self.folder}/kubelet.yaml", "--kubeconfig", str(self.folder / "node.kubeconfig"),
                "--root-dir", f"{self.folder}/kubelet", "--cert-dir", f"{self.folder}/kubelet-pki", "--hostname-override", "node1", "--node-ip", NODE_IP, "--v", os.environ.get("KUBELET_V", "2"),
            )
        )  # fmt: skip

    def restart_kubelet(self, **changes: object) -> None:
        """Kill kubelet and start it with `changes` to its configuration."""
        self.programs["kubelet"].stop(signal.SIGKILL)
        (self.folder / "kubelet.yaml").write_text(json.dumps({**self._kubelet_configuration(), **changes}))
        self.start_kubelet()

    def _start_registries(self, images: Sequence[Path], locked_images: Sequence[Path]) -> None:
        for name, address, served, more in (
            ("registry", REGISTRY, images, []),
            ("locked-registry", LOCKED_REGISTRY, locked_images, ["--auth", f"{USER}:{PASSWORD}"]),
        ):
            self.programs[name].start(
                self.node.inside(
                    sys.executable, "-m", "tests.support.registry", "--port", address.rpartition(":")[2],
                    "--root", f"{self.folder}/{name}", *more, *map(str, served),
                ),
                environment={"PYTHONPATH": str(Path(__file__).parents[2])},
            )  # fmt: skip

    def _make_certificates(self) -> None:
        pki = self.folder / "pki"
        pki.mkdir(exist_ok=True)
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        _openssl(
            "req",
            "-x509",
            *key,
            "-keyout",
            f"{pki}/ca.key",
            "-out",
            f"{pki}/ca.crt",
            "-days",
            "365",
            "-subj",
            "/CN=ca",
        )
        names = f"subjectAltName=IP:127.0.0.1,IP:10.96.0.1,IP:{NODE_IP},DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:node1"
        (pki / "names").write_text(names)
        for name, subject in (
            ("apiserver", "/CN=kube-apiserver"),
            ("admin", "/O=system:masters/CN=admin"),
            ("node", "/O=system:masters/CN=system:node:node1"),
        ):
            _openssl(
                "req", *key, "-keyout", f"{pki}/{name}.key", "-out", f"{pki}/{name}.csr", "-subj", subject
            )
            _openssl(
                "x509", "-req", "-in", f"{pki}/{name}.csr", "-CA", f"{pki}/ca.crt", "-CAkey", f"{pki}/ca.key", "-CAcreateserial",
                "-days", "365", "-out", f"{pki}/{name}.crt", "-extfile", f"{pki}/names",
            )  # fmt: skip
        _openssl("genrsa", "-out", f"{pki}/sa.key", "2048")
        _openssl("rsa", "-in", f"{pki}/sa.key", "-pubout", "-out", f"{pki}/sa.pub")
        self._write_kubeconfig(self.folder / "node.kubeconfig", "node", "127.0.0.1")
        self._write_kubeconfig(self.kubeconfig, "admin", NODE_IP)

    def _write_kubeconfig(self, path: Path, user: str, address: str) -> None:
        pki = self.folder / "pki"
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "pyrunc",
            "clusters": [{"name": "pyrunc", "cluster": {"server": f"https://{address}:6443", "certificate-authority": f"{pki}/ca.crt"}}],
            "users": [{"name": user, "user": {"client-certificate": f"{pki}/{user}.crt", "client-key": f"{pki}/{user}.key"}}],
            "contexts": [{"name": "pyrunc", "context": {"cluster": "pyrunc", "user": user}}],
        }  # fmt: skip
        path.write_text(json.dumps(config, indent=1))

    def _start_control_plane(self) -> None:
        pki, folder = self.folder / "pki", self.folder
        etcd = "http://127.0.0.1:2379"
        peer = "http://127.0.0.1:2380"
        self._start(
            "etcd", "--data-dir", f"{folder}/etcd", "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
            "--unsafe-no-fsync", "--log-level", "warn",
        )  # fmt: skip
        self._start(
            "kube-apiserver", "--etcd-servers", etcd, "--bind-address", "0.0.0.0", "--advertise-address", NODE_IP, "--secure-port", "6443",
            "--tls-cert-file", f"{pki}/apiserver.crt", "--tls-private-key-file", f"{pki}/apiserver.key", "--client-ca-file", f"{pki}/ca.crt",
            "--service-account-key-file", f"{pki}/sa.pub", "--service-account-signing-key-file", f"{pki}/sa.key",
            "--service-account-issuer", "https://kubernetes.default.svc", "--service-cluster-ip-range", "10.96.0.0/16",
            "--authorization-mode", "RBAC", "--allow-privileged=true", "--endpoint-reconciler-type", "none",
            "--kubelet-client-certificate", f"{pki}/admin.crt", "--kubelet-client-key", f"{pki}/admin.key",
            "--kubelet-preferred-address-types", "InternalIP,Hostname",
        )  # fmt: skip
        self._wait_for(
            "API server", lambda: self.kubectl("get", "--raw", "/readyz", check=False).returncode == 0, 90
        )
        self._start(
            "kube-controller-manager", "--kubeconfig", f"{folder}/node.kubeconfig", "--service-account-private-key-file", f"{pki}/sa.key",
            "--root-ca-file", f"{pki}/ca.crt", "--use-service-account-credentials", "--leader-elect=false",
        )  # fmt: skip
        self._start("kube-scheduler", "--kubeconfig", f"{folder}/node.kubeconfig", "--leader-elect=false")
        (folder / "kubelet.yaml").write_text(json.dumps(self._kubelet_configuration()))

    def _kubelet_configuration(self) -> dict[str, object]:
        """cgroupsPerQOS needs controllers in the v2 tree, which a hybrid host keeps on v1."""
        return {
            "kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "failSwapOn": False, "failCgroupV1": False, "cgroupsPerQOS": False, "enforceNodeAllocatable": [], "cgroupDriver": "cgroupfs",
            "address": "0.0.0.0", "staticPodPath": f"{self.folder}/manifests",
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}, "x509": {"clientCAFile": f"{self.folder}/pki/ca.crt"}},
            "authorization": {"mode": "AlwaysAllow"}, "containerRuntimeEndpoint": f"unix://{self.node.socket}",
            "evictionHard": {"imagefs.available": "1%", "nodefs.available": "1%", "memory.available": "50Mi"},
            "makeIPTablesUtilChains": False, "clusterDNS": ["10.96.0.10"], "clusterDomain": "cluster.local",
            "imageMinimumGCAge": "1s", "syncFrequency": "10s",
            "logging": {"flushFrequency": "1s"},
        }  # fmt: skip

    def _start(self, name: str, *arguments: str) -> None:
        self.programs[name].start(self.node.inside(f"{self.bin}/{name}", *arguments))

    def _node_is_ready(self) -> bool:
        answer = self.kubectl(
            "get",
            "node",
            "node1",
            "-o",
            "jsonpath={.status.conditions[?(@.type=='Ready')].status}",
            check=False,
        )
        return answer.stdout == "True"

    def _wait_for(self, what: str, condition: object, timeout_s: float) -> None:
        if not wait_until(condition, timeout_s, 0.25):  # type: ignore[arg-type]
            logs = "\n".join(
                f"--- {name}\n{p.tail(15)}"
                for name, p in {**self.programs, "server": self.node.server}.items()
            )
            raise RuntimeError(f"{what}: not there after {timeout_s:.0f} s\n{logs}")

    def _unmount_kubelet(self) -> None:
        """kubelet leaves its tmpfs volumes mounted when it ends."""
        prefix = f"{self.folder}/"
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in sorted((p for p in points if p.startswith(prefix)), reverse=True):
            subprocess.run(["umount", "-l", point], check=False)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def main(arguments: list[str]) -> None:
    """`up FOLDER` makes images and a cluster, and says how to use it; `down FOLDER` takes all of it back."""
    if len(arguments) != 2 or arguments[0] not in ("up", "down"):
        sys.exit("usage: python -m tests.support.cluster up|down FOLDER")
    folder = Path(arguments[1]).absolute()
    cluster = Cluster(folder)
    if arguments[0] == "down":
        cluster.down()
        shutil.rmtree(folder, ignore_errors=True)
        return
    from tests.support import images
    from tests.support import nginx as nginx_image

    signal.signal(signal.SIGINT, signal.default_int_handler)
    busybox, nginx = images.busybox(), nginx_image.archive()
    try:
        cluster.up([busybox, nginx], [busybox])
    except BaseException:
        cluster.down()
        raise
    kubectl = toolchain.kubernetes() / "kubectl"
    print(f"The node is Ready. Try:\n  export KUBECONFIG={cluster.kubeconfig}\n  {kubectl} apply -f pod.yaml")
    print(
        f"  {kubectl} create deploy nginx --image=nginx --replicas=3\n  {kubectl} get pods -o wide\nEnd it with: make kube-down"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
