"""Fixtures: a throwaway host, and a network service on it whose CNI plugins are in `bin`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cni_plugins.protocol import version
from cri_server.network.configuration import builtin_network
from cri_server.network.model import NetworkResult, PodNetwork
from cri_server.network.names import remove as remove_name
from cri_server.network.service import NetworkService
from cri_server.zygote.client import Zygote
from tests.kernel.cni.harness import Host, Pod, all_elements, link_names, new_host
from tests.support.zygotes import start_zygote

RESULT = (
    '{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"\'"$CNI_NETNS"\'"}],'
    '"ips":[{"address":"10.9.9.9/24","interface":0}]}'
)
ADD_ONLY = '[ "$CNI_COMMAND" = ADD ] || exit 0'


@dataclass
class Node:
    """A network service and its folders. `restart` replaces the service as a restart of the server
    does."""

    folder: Path
    host: Host
    zygote: Zygote
    timeout_s: float = 20.0
    network: NetworkService = field(init=False)

    def __post_init__(self) -> None:
        for name in ("conf", "bin"):
            (self.folder / name).mkdir()
        self.network = self._new()

    def _new(self) -> NetworkService:
        return NetworkService(
            str(self.folder / "conf"),
            str(self.folder / "bin"),
            str(self.folder / "state"),
            self.zygote,
            netns_dir=str(self.folder / "netns"),
            default=builtin_network(
                str(self.folder / "leases"), bridge="cni0", subnets=("10.85.0.0/16", "fd85::/64")
            ),
            timeout_s=self.timeout_s,
        )

    def restart(self, **changes: Any) -> None:
        self.network.close()
        for name, value in changes.items():
            setattr(self, name, value)
        self.network = self._new()

    def configure(
        self,
        *plugins: dict[str, Any],
        name: str = "net",
        file: str = "10-net.conflist",
        **changes: Any,
    ) -> None:
        content = {"cniVersion": "1.1.0", "name": name, "plugins": list(plugins), **changes}
        (self.folder / "conf" / file).write_text(json.dumps(content))

    def bridge(self, **changes: Any) -> dict[str, Any]:
        ipam = {
            "type": "host-local",
            "dataDir": str(self.folder / "leases"),
            "ranges": [[{"subnet": "10.88.0.0/16"}]],
        }
        return {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": True,
            "ipam": ipam,
            **changes,
        }

    def plugin(self, name: str, script: str) -> Path:
        """Write a CNI plugin as a shell script; what it writes to $LOG is read by `log`."""
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\nLOG={self.folder}/log\n{script}\n")
        path.chmod(0o755)
        return path

    def name_of(self, pod: Pod) -> str:
        """Return the path that names the network namespace of a pod while it is attached."""
        return str(self.folder / "netns" / pod.id)

    def names(self) -> set[str]:
        return {path.name for path in self.folder.glob("netns/*")}

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    async def attach(self, pod: Pod, *, durable: bool = True, **changes: Any) -> NetworkResult:
        fields = {"name": "web", "namespace": "default", "uid": "u-1", **changes}
        network = PodNetwork(sandbox_id=pod.id, netns_path=pod.path, **fields)
        return await self.network.attach(network, durable=durable)

    async def check(self, sandbox_id: str) -> None:
        """Run CHECK of the CNI plugins that attached the pod. Raises PeerError for the first damage
        that one finds."""
        attachment, runner = await self.network._load(sandbox_id), self.network._plugins
        assert attachment is not None and attachment.result is not None
        network = attachment.network
        # CNI has CHECK from 0.4.0 on, and `disableCheck` turns it off.
        if version.at_least(network.cni_version, "0.4.0") and not network.disable_check:
            call = runner._call("CHECK", attachment, attachment.netns_path)
            await runner._run_steps(call, runner._steps(attachment, attachment.result), network)

    def recorded(self) -> set[str]:
        folder = self.folder / "state"
        return {path.stem for path in folder.glob("*.json")}

    def leases(self) -> set[str]:
        return {
            p.name for p in self.folder.glob("leases/*/*") if p.name[0].isdigit() or ":" in p.name
        }


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with new_host(str(tmp_path)) as throwaway:
        yield throwaway


@pytest_asyncio.fixture
async def node(tmp_path: Path, host: Host) -> AsyncIterator[Node]:
    zygote = await start_zygote(["cni_plugins.jobs"])
    node = Node(tmp_path, host, zygote)
    try:
        yield node
    finally:
        node.network.close()
        await zygote.close()
        for name in node.names():
            remove_name(str(tmp_path / "netns" / name))


def clean(node: Node) -> bool:
    veths = {name for name in link_names() if name.startswith("veth")}
    left = node.leases() or node.recorded() or node.names()
    return not veths and not all_elements() and not left


async def until(true: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)
