"""A Pod manifest as people write it: read, checked with the path of what is wrong, and what we do not do named.

The types say what is understood. Any other key of the manifest is listed for the user; a wrong type or a missing field is an
error such as `spec.containers[0].image: expected a string`.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml

from pyrunc.errors import InvalidSpec

Port = int


class Object(msgspec.Struct, rename="camel", kw_only=True):
    """A JSON object of the manifest; unknown keys are reported by `unsupported`, not here."""


class KeyValue(Object):
    name: str
    value: str = ""


class ContainerPort(Object):
    container_port: Port
    name: str = ""
    host_port: Port = 0
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


class Profile(Object):
    type: Literal["RuntimeDefault", "Unconfined", "Localhost"]
    localhost_profile: str = ""


class Capabilities(Object):
    add: list[str] = []
    drop: list[str] = []


class Sysctl(Object):
    name: str
    value: str


class PodSecurity(Object):
    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None
    supplemental_groups: list[int] = []
    seccomp_profile: Profile | None = None
    sysctls: list[Sysctl] = []


class ContainerSecurity(Object):
    privileged: bool = False
    run_as_user: int | None = None
    run_as_group: int | None = None
    read_only_root_filesystem: bool = False
    allow_privilege_escalation: bool = True
    capabilities: Capabilities = msgspec.field(default_factory=Capabilities)
    seccomp_profile: Profile | None = None


class Container(Object):
    name: str
    image: str
    image_pull_policy: Literal["Always", "IfNotPresent", "Never", ""] = ""
    command: list[str] = []
    args: list[str] = []
    working_dir: str = ""
    env: list[KeyValue] = []
    ports: list[ContainerPort] = []
    resources: Resources = msgspec.field(default_factory=Resources)
    volume_mounts: list[VolumeMount] = []
    security_context: ContainerSecurity = msgspec.field(default_factory=ContainerSecurity)
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
    medium: str = ""


class Volume(Object):
    name: str
    host_path: HostPath | None = None
    empty_dir: EmptyDir | None = None


class DnsOption(Object):
    name: str
    value: str = ""


class Dns(Object):
    nameservers: list[str] = []
    searches: list[str] = []
    options: list[DnsOption] = []


class Spec(Object):
    containers: list[Container]
    init_containers: list[Container] = []
    volumes: list[Volume] = []
    hostname: str = ""
    host_network: bool = False
    host_pid: bool = msgspec.field(default=False, name="hostPID")
    host_ipc: bool = msgspec.field(default=False, name="hostIPC")
    share_process_namespace: bool = False
    dns_policy: Literal["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"] = "Default"
    dns_config: Dns | None = None
    security_context: PodSecurity = msgspec.field(default_factory=PodSecurity)
    restart_policy: Literal["Always", "OnFailure", "Never"] = "Always"
    termination_grace_period_seconds: int = 30


class Metadata(Object):
    name: str
    namespace: str = "default"
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Pod(Object):
    api_version: Literal["v1"]
    kind: Literal["Pod"]
    metadata: Metadata
    spec: Spec


def read(path: Path) -> tuple[Pod, list[str]]:
    """The pod of a YAML or JSON file, and the paths of what it says that we do not do. Raises InvalidSpec."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpec(str(path), f"cannot be read: {error}") from None
    return parse(text)


def parse(text: str) -> tuple[Pod, list[str]]:
    """As `read`, from text."""
    try:
        documents = [d for d in yaml.safe_load_all(text) if d is not None]
    except yaml.YAMLError as error:
        raise InvalidSpec("", f"not YAML: {_one_line(error)}") from None
    except RecursionError:
        raise InvalidSpec("", "not YAML: nested too deeply") from None
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise InvalidSpec("", f"expected one Pod, found {len(documents)} documents")
    document = documents[0]
    try:
        pod = msgspec.convert(document, Pod)
    except msgspec.ValidationError as error:
        raise _worded(error) from None
    _check(pod)
    return pod, unsupported(document, Pod)


def unsupported(value: Any, kind: Any, path: str = "") -> list[str]:
    """The paths of keys in `value` that the type `kind` has no field for."""
    kind = _plain(kind)
    if get_origin(kind) is list and isinstance(value, list):
        (item,) = get_args(kind)
        return [line for i, v in enumerate(value) for line in unsupported(v, item, f"{path}[{i}]")]
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict)):
        return []
    hints = get_type_hints(kind)
    known = {f.encode_name: hints[f.name] for f in msgspec.structs.fields(kind)}
    found = []
    for key, item in value.items():
        place = f"{path}.{key}".lstrip(".")
        found += unsupported(item, known[key], place) if key in known else [place]
    return found


def _plain(kind: Any) -> Any:
    """`X | None` -> X."""
    options = [a for a in get_args(kind) if a is not type(None)]
    return options[0] if get_origin(kind) not in (list, dict, None) and len(options) == 1 else kind


def _worded(error: msgspec.ValidationError) -> InvalidSpec:
    text, _, place = str(error).partition(" - at ")
    path = place.strip("`").removeprefix("$").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(.*)`", text)
    if missing:
        return InvalidSpec(f"{path}.{missing[1]}".lstrip("."), "is required")
    return InvalidSpec(path, text[:1].lower() + text[1:])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check(pod: Pod) -> None:
    """What types cannot say."""
    if not pod.spec.containers:
        raise InvalidSpec("spec.containers", "is empty")
    volumes = {v.name for v in pod.spec.volumes}
    for i, volume in enumerate(pod.spec.volumes):
        if (volume.host_path is None) == (volume.empty_dir is None):
            raise InvalidSpec(f"spec.volumes[{i}]", "one of hostPath and emptyDir is supported")
        if volume.host_path is not None:
            _check_host_path(volume.host_path.path, f"spec.volumes[{i}].hostPath.path")
    names: set[str] = set()
    for group, containers in (
        ("initContainers", pod.spec.init_containers),
        ("containers", pod.spec.containers),
    ):
        for i, container in enumerate(containers):
            path = f"spec.{group}[{i}]"
            if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", container.name):
                raise InvalidSpec(f"{path}.name", f"{container.name!r} is not a container's name")
            if container.name in names:
                raise InvalidSpec(f"{path}.name", f"{container.name!r} is used twice")
            names.add(container.name)
            _check_container(container, path, volumes)
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", pod.metadata.name):
        raise InvalidSpec("metadata.name", f"{pod.metadata.name!r} is not a pod's name")


def _check_container(container: Container, path: str, volumes: set[str]) -> None:
    if not container.image:
        raise InvalidSpec(f"{path}.image", "is empty")
    for i, mount in enumerate(container.volume_mounts):
        if mount.name not in volumes:
            raise InvalidSpec(f"{path}.volumeMounts[{i}].name", f"there is no volume {mount.name!r}")
        if not mount.mount_path.startswith("/"):
            raise InvalidSpec(f"{path}.volumeMounts[{i}].mountPath", "is not absolute")
        if mount.sub_path and mount.sub_path_expr:
            raise InvalidSpec(f"{path}.volumeMounts[{i}]", "has both subPath and subPathExpr")
        check_sub_path(mount.sub_path, f"{path}.volumeMounts[{i}].subPath")
        check_sub_path(mount.sub_path_expr, f"{path}.volumeMounts[{i}].subPathExpr")
    for i, port in enumerate(container.ports):
        for key, value in (("containerPort", port.container_port), ("hostPort", port.host_port)):
            if not 0 <= value <= 65535:
                raise InvalidSpec(f"{path}.ports[{i}].{key}", f"{value} is not a port")
    for group, values in (("limits", container.resources.limits), ("requests", container.resources.requests)):
        for key, text in (("cpu", values.cpu), ("memory", values.memory)):
            if text is not None:
                quantity(text, f"{path}.resources.{group}.{key}")


def _check_host_path(text: str, path: str) -> None:
    if not text.startswith("/"):
        raise InvalidSpec(path, f"{text!r} is not absolute")
    if ".." in text.split("/"):
        raise InvalidSpec(path, f"{text!r} contains '..'")


def check_sub_path(text: str, path: str) -> None:
    """A path beneath a volume. Raises InvalidSpec."""
    if text.startswith("/"):
        raise InvalidSpec(path, f"{text!r} is not relative")
    if ".." in text.split("/"):
        raise InvalidSpec(path, f"{text!r} contains '..'")


_UNITS = {
    "": 1,
    "m": Decimal("0.001"),
    **{unit: 1000**n for n, unit in enumerate(("k", "M", "G", "T", "P"), 1)},
    **{f"{unit}i": 1024**n for n, unit in enumerate(("K", "M", "G", "T", "P"), 1)},
}


def quantity(value: str | int | float, path: str) -> Decimal:
    """`100m` -> 0.1, `64Mi` -> 67108864. Raises InvalidSpec."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][0-9]+)?)([a-zA-Z]*)", str(value).strip())
    try:
        if match and match[2] in _UNITS:
            return Decimal(match[1]) * Decimal(_UNITS[match[2]])
    except InvalidOperation:
        pass
    raise InvalidSpec(path, f"{value!r} is not a quantity")
