"""A machine for `k3s server`, with the flannel plugin and the reference CNI plugins."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

from tests.support import flannel, images, k3s, session, toolchain
from tests.support.kubectl import Kubectl
from tests.support.machine import Machine
from tests.support.processes import Program, wait_until

# /run holds flannel's subnet and k3s' sockets, /var/log the logs of pods, of which a kubelet
# removes those that it does not know.
WRITTEN = ("/etc", "/opt", "/run", "/usr/libexec", "/var/lib", "/var/log")
PLUGINS = "/var/lib/rancher/k3s/data/current/bin"
PATIENCE_S = 240.0
# Components that pull images from registries outside.
DISABLED = ("coredns", "local-storage", "metrics-server", "servicelb", "traefik")
# Settings that a hybrid host needs of kubelet, and those with which it starts pods on a nearly full
# disk.
KUBELET = (
    "cgroups-per-qos=false",
    "enforce-node-allocatable=",
    "eviction-hard=memory.available<50Mi",
)


class K3sMachine(Machine, Kubectl):
    """A machine with `k3s server`; its `kubectl` is k3s' own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, session.name("k3s"), WRITTEN, [PLUGINS, k3s.programs()])
        self.node.own_network = False
        self.k3s = Program("k3s", folder / "log")

    def up(self, configuration: str) -> None:
        """Make the namespaces, install the plugins, run the shell commands `configuration`, and
        start our server."""
        archive = images.busybox()
        self.begin()
        self._install_plugins()
        self.types(configuration)
        self.serve([archive], {})

    def _install_plugins(self) -> None:
        # k3s' releases make their plugins from these, but are not available as a Go module.
        plugins = [*toolchain.reference_plugins().iterdir(), flannel.programs() / "flannel"]
        self.types(f"mkdir -p {PLUGINS}; cp {shlex.join(map(str, plugins))} {PLUGINS}")

    def start_k3s(self, command: str) -> None:
        """Start k3s with the options of `command`, from docs/install.md, and those that this
        machine needs."""
        words = [
            *shlex.split(command),
            "--node-name",
            self.node.host,
            "--node-ip",
            self.node.address,
            "--flannel-iface",
            "uplink",
            "--flannel-cni-conf",
            str(self._network()),
            "--disable",
            ",".join(DISABLED),
            *(word for argument in KUBELET for word in ("--kubelet-arg", argument)),
        ]
        self.k3s.start(self.inside(*words))

    def _network(self) -> Path:
        """Write a CNI configuration like k3s' own, and return its path."""
        file = self.folder / "flannel.conflist"
        flannel_plugin = {
            "type": "flannel",
            "delegate": {"hairpinMode": True, "forceAddress": True, "isDefaultGateway": True},
        }
        plugins = [flannel_plugin, {"type": "portmap", "capabilities": {"portMappings": True}}]
        # k3s' own has a newer `cniVersion`, which this flannel plugin does not understand.
        file.write_text(json.dumps({"name": "cbr0", "cniVersion": "0.3.1", "plugins": plugins}))
        return file

    def kubectl_command(self) -> list[str]:
        """Return k3s' own command line for kubectl, which finds its configuration itself."""
        return self.inside("kubectl")

    def until(self, what: str, condition: Callable[[], object]) -> None:
        """Wait until `condition` is true; the error has the last output of the programs."""
        if (
            not wait_until(lambda: not self.k3s.pid or condition(), PATIENCE_S, 1)
            or not self.k3s.pid
        ):
            raise AssertionError(f"{what}: no\n{self.k3s.tail(60)}\n{self.node.server.tail(20)}")

    def down(self) -> None:
        """End everything; only files remain."""
        self.k3s.stop(signal.SIGTERM, 30)
        self.node.stop()
