"""The types of the arguments and results of `NetworkService`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PortMapping:
    """A port of the host that is forwarded to a port of the pod. `protocol` is tcp, udp or sctp; an
    empty `host_ip` means all addresses of the host."""

    host_port: int
    container_port: int
    protocol: str = "tcp"
    host_ip: str = ""


@dataclass(frozen=True, slots=True)
class PodNetwork:
    """The properties of a pod that `NetworkService.attach` needs.

    - `netns_path`: the present path of its network namespace (`/proc/<shim>/fd/<n>`). Plugins get
      the path of the namespace's bind mount in `netns_dir` instead.
    - `port_mappings`: mappings with host port 0 are ignored.
    - `dns`: the pod's DNS configuration from kubelet, as the value of the capability `dns`.
    - `annotations`: limits of the bandwidth are in `kubernetes.io/{ingress,egress}-bandwidth`.
    - `cgroup_path`: the pod's cgroup in kubelet's form (capability cgroupPath).
    """

    sandbox_id: str
    name: str
    namespace: str
    uid: str
    netns_path: str
    port_mappings: tuple[PortMapping, ...] = ()
    dns: dict[str, list[str]] | None = None
    annotations: dict[str, str] = field(default_factory=dict)
    cgroup_path: str = ""


@dataclass(frozen=True, slots=True)
class NetworkResult:
    """The network of an attached pod.

    - `ips`: its addresses without prefix length, the primary one first; never empty.
    - `raw`: the chain's CNI result in the configuration's cniVersion, for `PodSandboxStatus` with
      `verbose`.
    - `netns_path`: the path of the network namespace that plugins got as CNI_NETNS.
    """

    ips: tuple[str, ...]
    raw: dict[str, Any]
    netns_path: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """The CRI condition `NetworkReady`; reason and message are empty when it is true."""

    ready: bool
    reason: str = ""
    message: str = ""
