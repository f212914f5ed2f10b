"""Container Device Interface: reads, from CDI files, how a container's spec must be edited for a
device with a name such as `vendor.com/gpu=0`.

The administrator's files are in /etc/cdi and /run/cdi; a later folder overrides an earlier one. The
files are read again for each container that names a device, because drivers write them at any time.
A file is ignored unless it is a regular file of limited size that only root can write
(CVE-2026-53492).
https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cri_server import typed
from cri_server.spec.sources import device_facts
from pyrunc.errors import InvalidArgument
from pyrunc.kernel.fd import closing_fd

log = logging.getLogger(__name__)

ANNOTATIONS = "cdi.k8s.io/"
SIZE_LIMIT_BYTES = 4 << 20
YAML_LIMIT_BYTES, ALIASES_LIMIT, DEPTH_LIMIT = 256 << 10, 100, 32  # PyYAML's parser is slow
NAME = re.compile(r"([A-Za-z][\w.-]*/[A-Za-z][\w-]*)=([A-Za-z0-9][\w.:-]*)")
HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")


class CdiObject(msgspec.Struct, rename="camel", kw_only=True):
    """A JSON object of a CDI file. Unknown keys are ignored, as the specification requires."""


class CdiDeviceNode(CdiObject):
    path: str
    host_path: str = ""
    type: str = ""
    major: int | None = None
    minor: int | None = None
    file_mode: int | None = None
    permissions: str = "rwm"
    uid: int | None = None
    gid: int | None = None


class CdiMount(CdiObject):
    host_path: str
    container_path: str
    options: list[str] = []
    type: str = ""


class CdiHook(CdiObject):
    hook_name: str
    path: str
    args: list[str] = []
    env: list[str] = []
    timeout: int | None = None


class CdiEdits(CdiObject):
    env: list[str] = []
    device_nodes: list[CdiDeviceNode] = []
    mounts: list[CdiMount] = []
    hooks: list[CdiHook] = []
    additional_gids: list[int] = msgspec.field(default_factory=list, name="additionalGids")


class CdiDevice(CdiObject):
    name: str
    container_edits: CdiEdits = msgspec.field(default_factory=CdiEdits)


class Specification(CdiObject):
    cdi_version: str
    kind: str
    devices: list[CdiDevice]
    container_edits: CdiEdits = msgspec.field(default_factory=CdiEdits)


def names(devices: Iterable[str], annotations: Mapping[str, str]) -> list[str]:
    """Return the names of the CDI devices that a container requests, without duplicates. Raises
    InvalidArgument for a malformed name."""
    requested = list(devices)
    for key, value in annotations.items():
        if key.startswith(ANNOTATIONS):
            requested += [name.strip() for name in value.split(",")]
    for name in requested:
        if not NAME.fullmatch(name):
            raise InvalidArgument(f"CDI device {name[:80]!r} is not VENDOR/CLASS=NAME")
    return list(dict.fromkeys(requested))


def resolve(requested: Sequence[str], folders: Sequence[str]) -> list[CdiEdits]:
    """Return the edits to apply for the requested devices. The edits that a CDI file has for all
    its devices are included once, before those of its first requested device. Raises
    InvalidArgument for an unknown device."""
    devices: dict[str, tuple[Specification, CdiDevice]] = {}
    for folder in folders:
        devices.update(_devices(folder))
    edits: list[CdiEdits] = []
    applied: set[int] = set()
    for name in requested:
        if name not in devices:
            raise InvalidArgument(f"unresolvable CDI device {name!r}")
        specification, device = devices[name]
        if id(specification) not in applied:
            applied.add(id(specification))
            edits.append(specification.container_edits)
        edits.append(device.container_edits)
    return edits


def _devices(folder: str) -> dict[str, tuple[Specification, CdiDevice]]:
    """Read the CDI files of one folder; return their devices by full name, each with its file. A
    name that occurs twice is left out."""
    devices: dict[str, tuple[Specification, CdiDevice]] = {}
    duplicates: set[str] = set()
    try:
        files = sorted(name for name in os.listdir(folder) if name.endswith((".json", ".yaml")))
    except OSError:
        return devices
    for file in files:
        try:
            specification = _read(Path(folder, file))
        except (OSError, ValueError, RecursionError) as error:
            log.warning("CDI file %s/%s is ignored: %s", folder, file, " ".join(str(error).split()))
            continue
        for device in specification.devices:
            name = f"{specification.kind}={device.name}"
            if name in devices:
                duplicates.add(name)
            devices[name] = (specification, device)
    return {name: value for name, value in devices.items() if name not in duplicates}


def _read(path: Path) -> Specification:
    # O_NONBLOCK: a FIFO without a writer would hold the thread (fifo(7)).
    with closing_fd(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as descriptor:
        file_stat = os.fstat(descriptor)
        if (
            not stat.S_ISREG(file_stat.st_mode)
            or file_stat.st_uid != 0
            or file_stat.st_mode & 0o022
        ):
            raise ValueError("must be a regular file that only root can write")
        limit = SIZE_LIMIT_BYTES if path.suffix == ".json" else YAML_LIMIT_BYTES
        if file_stat.st_size > limit:
            raise ValueError(f"larger than {limit} bytes")
        content = os.read(descriptor, SIZE_LIMIT_BYTES)
    if path.suffix == ".json":
        return typed.decode(content, Specification)
    return typed.convert(_yaml(content), Specification)


def _yaml(content: bytes) -> Any:
    """Parse a CDI file in YAML. Raises ValueError for invalid YAML, for more than `ALIASES_LIMIT`
    aliases, and for more than `DEPTH_LIMIT` nested levels."""
    import yaml  # takes 20 ms to import, and few servers need it

    class CdiLoader(yaml.SafeLoader):
        """Loads YAML without custom tags, and limits aliases and depth. Nested aliases would
        multiply the nodes that later code visits; deep nesting would slow the scanner down."""

        aliases = depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            if self.depth > DEPTH_LIMIT:
                raise yaml.YAMLError(f"nested more than {DEPTH_LIMIT} deep")
            if self.check_event(yaml.AliasEvent):
                self.aliases += 1
                if self.aliases > ALIASES_LIMIT:
                    raise yaml.YAMLError(f"more than {ALIASES_LIMIT} aliases")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        return yaml.load(content, CdiLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from None


def apply(spec: dict[str, Any], edits: Sequence[CdiEdits]) -> None:
    """Apply CDI edits to an OCI spec. Raises InvalidArgument for an invalid device node or hook."""
    process, linux = spec["process"], spec["linux"]
    variables = {line.partition("=")[0]: line for line in process["env"]}
    gids = dict.fromkeys(process["user"]["additionalGids"])
    devices = {device["path"]: device for device in linux.get("devices", ())}
    for edit in edits:
        for line in edit.env:
            name = line.partition("=")[0]
            variables.pop(name, None)  # the variable moves to the end
            variables[name] = line
        gids.update(dict.fromkeys(edit.additional_gids))
        for node in edit.device_nodes:
            devices.pop(node.path, None)
            devices[node.path] = _device(node)
            rule = device_rule(devices[node.path], node.permissions or "rwm")
            linux["resources"]["devices"].append(rule)
        for mount in edit.mounts:
            spec["mounts"].append(
                {
                    "destination": mount.container_path,
                    "source": mount.host_path,
                    "type": mount.type or "bind",
                    "options": mount.options or ["rbind", "rprivate", "ro"],
                }
            )
        for hook in edit.hooks:
            _add_hook(spec, hook)
    process["env"], process["user"]["additionalGids"] = list(variables.values()), list(gids)
    if devices:
        linux["devices"] = list(devices.values())


def _device(node: CdiDeviceNode) -> dict[str, Any]:
    device: dict[str, Any] = {"path": node.path}
    if not node.type or node.major is None or node.minor is None:
        device |= device_facts(node.host_path or node.path).to_oci()
    else:
        device |= {"type": node.type, "major": node.major, "minor": node.minor}
    for key, value in (("fileMode", node.file_mode), ("uid", node.uid), ("gid", node.gid)):
        if value is not None:
            device[key] = value
    return device


def device_rule(device: Mapping[str, Any], access: str) -> dict[str, Any]:
    """Return the cgroup rule that permits `access` (letters of `rwm`) to an OCI device."""
    number = {key: device[key] for key in ("type", "major", "minor")}
    return {"allow": True, **number, "access": access}


def _add_hook(spec: dict[str, Any], hook: CdiHook) -> None:
    if hook.hook_name not in HOOKS:
        raise InvalidArgument(f"CDI hook {hook.hook_name!r}: OCI has no such kind of hook")
    if not hook.path.startswith("/"):
        raise InvalidArgument(f"CDI hook {hook.hook_name}: path {hook.path!r} is not absolute")
    entry: dict[str, Any] = {"path": hook.path, "args": hook.args, "env": hook.env}
    if hook.timeout is not None:
        entry["timeout"] = hook.timeout
    spec.setdefault("hooks", {}).setdefault(hook.hook_name, []).append(entry)
