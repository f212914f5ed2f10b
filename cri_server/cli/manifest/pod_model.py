"""The supported fields of a Pod manifest, as msgspec types.

A wrong type or a missing field is an error such as `spec.containers[0].image: expected a string`.
`fields` lists the fields that only Kubernetes supports, and `check` has the rules beyond types.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

import msgspec

from pyrunc.errors import InvalidSpec


class Object(msgspec.Struct, rename="camel", kw_only=True):
    """The base of all JSON objects in a manifest. Unknown keys are no error here:
    `fields.problems` reports them."""


class Env(Object):
    name: str
    value: str = ""
    # podIP or podIPs, which are known when the sandbox runs; `config_maps` sets it
    status: Literal["", "podIP", "podIPs"] = msgspec.field(default="", name="@status")


class ContainerPort(Object):
    container_port: int
    name: str = ""
    host_port: int = 0
    host_ip: str = msgspec.field(default="", name="hostIP")
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"


class Quantities(Object):
    cpu: str | int | float | None = None
    memory: str | int | None = None


class Resources(Object):
    limits: Quantities = msgspec.field(default_factory=Quantities)
    requests: Quantities = msgspec.field(default_factory=Quantities)


class VolumeMount(Object):
    name: str
    mount_path: str
    read_only: bool = False
    sub_path: str = ""
    sub_path_expr: str = ""
    mount_propagation: Literal["None", "HostToContainer", "Bidirectional"] = "None"
    recursive_read_only: Literal["Disabled", "IfPossible", "Enabled"] = "Disabled"


class Profile(Object):
    type: Literal["RuntimeDefault", "Unconfined", "Localhost"]
    localhost_profile: str = ""


class ContainerCapabilities(Object):
    add: list[str] = []
    drop: list[str] = []


class Sysctl(Object):
    name: str
    value: str


class PodSecurity(Object):
    run_as_user: int | None = None
    run_as_group: int | None = None
    run_as_non_root: bool = False
    fs_group: int | None = None
    supplemental_groups: list[int] = []
    seccomp_profile: Profile | None = None
    sysctls: list[Sysctl] = []


class ContainerSecurity(Object):
    privileged: bool = False
    run_as_user: int | None = None
    run_as_group: int | None = None
    run_as_non_root: bool | None = None
    read_only_root_filesystem: bool = False
    allow_privilege_escalation: bool = True
    capabilities: ContainerCapabilities = msgspec.field(default_factory=ContainerCapabilities)
    seccomp_profile: Profile | None = None


class ContainerManifest(Object):
    name: str
    image: str
    image_pull_policy: Literal["Always", "IfNotPresent", "Never", ""] = ""
    command: list[str] = []
    args: list[str] = []
    working_dir: str = ""
    env: list[Env] = []
    ports: list[ContainerPort] = []
    resources: Resources = msgspec.field(default_factory=Resources)
    volume_mounts: list[VolumeMount] = []
    security_context: ContainerSecurity = msgspec.field(default_factory=ContainerSecurity)
    restart_policy: Literal["", "Always"] = ""  # Always: the init container is a sidecar
    stdin: bool = False
    stdin_once: bool = False
    tty: bool = False


class HostPath(Object):
    path: str
    type: Literal[
        "",
        "DirectoryOrCreate",
        "Directory",
        "FileOrCreate",
        "File",
        "Socket",
        "CharDevice",
        "BlockDevice",
    ] = ""


class EmptyDir(Object):
    """A volume of type emptyDir, which is a directory in the pod's folder."""


class VolumeFile(Object):
    """A file in a volume that contains a ConfigMap, a Secret or fields of the pod. `content` is
    base64."""

    path: str
    content: bytes
    mode: int


class Volume(Object):
    name: str
    files: list[VolumeFile] | None = msgspec.field(default=None, name="@files")
    host_path: HostPath | None = None
    empty_dir: EmptyDir | None = None


class DnsOption(Object):
    name: str
    value: str = ""


class HostAlias(Object):
    ip: str
    hostnames: list[str] = []


class PodDnsManifest(Object):
    nameservers: list[str] = []
    searches: list[str] = []
    options: list[DnsOption] = []


class PodSpec(Object):
    containers: list[ContainerManifest]
    init_containers: list[ContainerManifest] = []
    volumes: list[Volume] = []
    hostname: str = ""
    host_network: bool = False
    host_pid: bool = msgspec.field(default=False, name="hostPID")
    host_ipc: bool = msgspec.field(default=False, name="hostIPC")
    share_process_namespace: bool = False
    dns_policy: Literal["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"] = (
        "ClusterFirst"
    )
    dns_config: PodDnsManifest | None = None
    host_aliases: list[HostAlias] = []
    security_context: PodSecurity = msgspec.field(default_factory=PodSecurity)
    termination_grace_period_seconds: int = 30


class Metadata(Object):
    name: str
    namespace: str = "default"
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class PodManifest(Object):
    api_version: Literal["v1"]
    kind: Literal["Pod"]
    metadata: Metadata
    spec: PodSpec


_UNITS = {
    **{
        unit: Decimal(10) ** (3 * n)
        for n, unit in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
    },
    **{f"{unit}i": Decimal(1024) ** n for n, unit in enumerate(("K", "M", "G", "T", "P", "E"), 1)},
}
LARGEST = (1 << 63) - 1


def quantity(value: str | int | float, path: str) -> Decimal:
    """Parse a Kubernetes quantity: `100m` is 0.1, `64Mi` is 67108864. The maximum is 2^63 - 1.
    Raises InvalidSpec; `path` is the field in the manifest."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][-+]?[0-9]+)?)([a-zA-Z]*)", str(value).strip())
    try:
        if match and match[2] in _UNITS:
            value_of_unit = Decimal(match[1]) * _UNITS[match[2]]
            if value_of_unit <= LARGEST:
                return value_of_unit
            raise InvalidSpec(path, f"{value!r} is too large")
    except ArithmeticError:
        pass
    raise InvalidSpec(path, f"{value!r} is not a quantity")
