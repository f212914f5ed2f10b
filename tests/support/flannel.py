"""Builds real flannel from its Go modules into the cache, and installs and runs it on a cluster's
nodes.

`python -m tests.support.flannel` builds it and prints its folder. Its CNI plugin delegates to
pyrunc's `bridge` and `host-local`. The plugin comes from the last containernetworking
release that had it, because flannel's own module is not on the module proxy.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

from tests.support import toolchain
from tests.support.cluster import Cluster
from tests.support.cluster_control import POD_RANGE, POD_RANGE6
from tests.support.cluster_node import Node
from tests.support.processes import Program

FLANNEL = "v0.28.4"
PLUGIN = "v0.9.1"
_TENCENT = "v1.3.103"  # the module proxy lacks the version that flannel requires


def programs() -> Path:
    """Return the folder with `flanneld` and the CNI plugin `flannel`."""
    out = toolchain.cache() / "flannel" / f"{FLANNEL}-plugin-{PLUGIN}"
    if not (out / "flanneld").exists():
        _build_daemon(out)
    if not (out / "flannel").exists():
        module = "github.com/containernetworking/plugins"
        requirement = f"{module}@{PLUGIN}"
        toolchain.build_module(
            "flannel-plugin", requirement, [f"{module}/plugins/meta/flannel"], out
        )
    return out


def _build_daemon(out: Path) -> None:
    module = "github.com/flannel-io/flannel"
    requirements = (
        f"{module}@{FLANNEL}"
        f" github.com/tencentcloud/tencentcloud-sdk-go/tencentcloud/common@{_TENCENT}"
    )
    program = out / "daemon"
    # cgo: one of flannel's backends is C.
    toolchain.build_module("flannel", requirements, [module], program, cgo=True)
    # `go build` calls flanneld `flannel`.
    (program / "flannel").rename(out / "flanneld")
    program.rmdir()


def daemon_settings(backend: str) -> dict[str, Any]:
    """Return flanneld's configuration, for IPv4."""
    return {
        "Network": POD_RANGE,
        "EnableIPv4": True,
        "EnableNFTables": True,
        "Backend": {"Type": backend},
    }


def pod_network(folder: Path) -> dict[str, Any]:
    """Return the CNI configuration of flannel's own manifest, with paths below the node's
    `folder`."""
    plugin = {
        "type": "flannel",
        "subnetFile": f"{folder}/flannel/subnet.env",
        "dataDir": f"{folder}/flannel/cni",
        "ipam": {"dataDir": f"{folder}/leases"},
        "delegate": {"hairpinMode": True, "isDefaultGateway": True},
    }
    plugins = [plugin, {"type": "portmap", "capabilities": {"portMappings": True}}]
    return {"cniVersion": "0.3.1", "name": "cbr0", "plugins": plugins}


class Flannel:
    """flannel with one backend (`vxlan` or `host-gw`) for IPv4 and IPv6 on all nodes of a
    cluster, as its DaemonSet would run it.
    """

    def __init__(self, cluster: Cluster, backend: str) -> None:
        self.cluster, self.backend, self._programs = cluster, backend, programs()
        self.daemons = {
            node.host: Program("flanneld", node.folder / "log") for node in cluster.nodes
        }
        cluster.programs |= {f"{host}: flanneld": daemon for host, daemon in self.daemons.items()}

    def install(self, node: Node) -> None:
        """Write the plugin's executable and the daemon's configuration."""
        executables, own = node.folder / "cni-bin", node.folder / "flannel"
        for folder in (executables, own):
            folder.mkdir(parents=True)
        # The plugin finds pyrunc's plugins where the server has installed them.
        shutil.copy(self._programs / "flannel", executables)
        settings = {**daemon_settings(self.backend), "IPv6Network": POD_RANGE6, "EnableIPv6": True}
        (own / "net-conf.json").write_text(json.dumps(settings))

    def start(self) -> None:
        """Start the daemons when their nodes have pod CIDRs, write the nodes' CNI configuration,
        and wait until the nodes are Ready."""
        for node in self.cluster.nodes:
            has_range = functools.partial(self.cluster.pod_range, node)
            self.cluster.wait_for(f"{node.host}'s range", has_range, 60)
            self.start_daemon(node)
        for node in self.cluster.nodes:
            written = node.folder / "flannel" / "subnet.env"
            self.cluster.wait_for(f"flannel's range on {node.host}: {written}", written.exists, 60)
            node.write_network(pod_network(node.folder))
        self.cluster.await_nodes()

    def start_daemon(self, node: Node) -> None:
        """Start flanneld in the node's namespaces."""
        own = node.folder / "flannel"
        self.daemons[node.host].start(
            node.inside(
                f"{self._programs}/flanneld",
                "--kube-subnet-mgr",
                "--kubeconfig-file",
                str(self.cluster.control.node_kubeconfig(node)),
                "--net-config-path",
                f"{own}/net-conf.json",
                "--subnet-file",
                f"{own}/subnet.env",
                "--iface",
                "uplink",
                "--ip-masq",
            ),
            environment={"NODE_NAME": node.host},
        )

    def stop(self) -> None:
        """End the daemons; their network devices and routes stay on the nodes."""
        for daemon in self.daemons.values():
            daemon.stop()


if __name__ == "__main__":
    print(programs())
