"""Container Device Interface: names such as `vendor.com/gpu=0` -> what their specification files
add to a container.

The files are the administrator's (/etc/cdi, /run/cdi; a later folder wins), read anew for every
container that names a device: drivers write them at any time. Only regular files of root's, of a
bounded size, are read (CVE-2026-53492).
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

log = logging.getLogger(__name__)

ANNOTATIONS = "cdi.k8s.io/"
SIZE_LIMIT_BYTES = 4 << 20
YAML_LIMIT_BYTES, ALIASES_LIMIT, DEPTH_LIMIT = 256 << 10, 100, 32  # read by a parser in Python
NAME = re.compile(r"([A-Za-z][\w.-]*/[A-Za-z][\w-]*)=([A-Za-z0-9][\w.:-]*)")
HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")


class Object(msgspec.Struct, rename="camel", kw_only=True):
    """A JSON object of a CDI file; keys that we do not know are ignored, as the specification asks."""


class DeviceNode(Object):
    path: str
    host_path: str = ""
    type: str = ""
    major: int | None = None
    minor: int | None = None
    file_mode: int | None = None
    permissions: str = "rwm"
    uid: int | None = None
    gid: int | None = None


class Mount(Object):
    host_path: str
    container_path: str
    options: list[str] = []
    type: str = ""


class Hook(Object):
    hook_name: str
    path: str
    args: list[str] = []
    env: list[str] = []
    timeout: int | None = None


class Edits(Object):
    env: list[str] = []
    device_nodes: list[DeviceNode] = []
    mounts: list[Mount] = []
    hooks: list[Hook] = []
    additional_gids: list[int] = msgspec.field(default_factory=list, name="additionalGids")


class Device(Object):
    name: str
    container_edits: Edits = msgspec.field(default_factory=Edits)


class Specification(Object):
    cdi_version: str
    kind: str
    devices: list[Device]
    container_edits: Edits = msgspec.field(default_factory=Edits)


def names(devices: Iterable[str], annotations: Mapping[str, str]) -> list[str]:
    """The devices that a container asks for, each once. Raises InvalidArgument for a malformed
    name."""
    wanted = list(devices)
    for key, value in annotations.items():
        if key.startswith(ANNOTATIONS):
            wanted += [name.strip() for name in value.split(",")]
    for name in wanted:
        if not NAME.fullmatch(name):
            raise InvalidArgument(f"CDI device {name[:80]!r} is not VENDOR/CLASS=NAME")
    return list(dict.fromkeys(wanted))


def resolve(wanted: Sequence[str], folders: Sequence[str]) -> list[Edits]:
    """The edits for the devices, each specification's own before its devices'. Raises
    InvalidArgument for an unknown one."""
    found: dict[str, tuple[Specification, Device]] = {}
    for folder in folders:
        found.update(_devices(folder))
    edits: list[Edits] = []
    seen: set[int] = set()
    for name in wanted:
        if name not in found:
            raise InvalidArgument(f"unresolvable CDI device {name!r}")
        specification, device = found[name]
        if id(specification) not in seen:
            seen.add(id(specification))
            edits.append(specification.container_edits)
        edits.append(device.container_edits)
    return edits


def _devices(folder: str) -> dict[str, tuple[Specification, Device]]:
    """What the files of one folder define; a name that two of them define is nobody's."""
    found: dict[str, tuple[Specification, Device]] = {}
    doubled: set[str] = set()
    try:
        files = sorted(name for name in os.listdir(folder) if name.endswith((".json", ".yaml")))
    except OSError:
        return found
    for file in files:
        try:
            specification = _read(Path(folder, file))
        except (OSError, ValueError, RecursionError) as error:
            log.warning("CDI file %s/%s is ignored: %s", folder, file, " ".join(str(error).split()))
            continue
        for device in specification.devices:
            name = f"{specification.kind}={device.name}"
            if name in found:
                doubled.add(name)
            found[name] = (specification, device)
    return {name: value for name, value in found.items() if name not in doubled}


def _read(path: Path) -> Specification:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != 0 or facts.st_mode & 0o022:
            raise ValueError("not a file that only root can write")
        limit = SIZE_LIMIT_BYTES if path.suffix == ".json" else YAML_LIMIT_BYTES
        if facts.st_size > limit:
            raise ValueError(f"larger than {limit} bytes")
        content = os.read(descriptor, SIZE_LIMIT_BYTES)
    finally:
        os.close(descriptor)
    if path.suffix == ".json":
        return typed.decode(content, Specification)
    return typed.convert(_yaml(content), Specification)


def _yaml(content: bytes) -> Any:
    """What the text says. Raises ValueError, RecursionError."""
    import yaml  # 20 ms that most servers never need

    class Loader(yaml.SafeLoader):
        """Refuses more aliases than anybody writes (what one stands for is read again for each, and
        aliases of aliases multiply) and more depth: the scanner's work on a token grows with it."""

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
        return yaml.load(content, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from None


def apply(spec: dict[str, Any], edits: Sequence[Edits]) -> None:
    """Add the edits to an OCI spec. Raises InvalidArgument for a device node or hook that cannot
    be."""
    process, linux = spec["process"], spec["linux"]
    variables = {line.partition("=")[0]: line for line in process["env"]}
    gids = dict.fromkeys(process["user"]["additionalGids"])
    devices = {device["path"]: device for device in linux.get("devices", ())}
    for edit in edits:
        for line in edit.env:
            name = line.partition("=")[0]
            variables.pop(name, None)  # so that it moves to the end
            variables[name] = line
        gids.update(dict.fromkeys(edit.additional_gids))
        for node in edit.device_nodes:
            devices.pop(node.path, None)
            devices[node.path] = _device(node)
            linux["resources"]["devices"].append(_rule(node, devices[node.path]))
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


def _device(node: DeviceNode) -> dict[str, Any]:
    device: dict[str, Any] = {
        "path": node.path,
        "type": node.type,
        "major": node.major,
        "minor": node.minor,
    }
    if not node.type or node.major is None or node.minor is None:
        found = device_facts(node.host_path or node.path)
        device |= {"type": found.type, "major": found.major, "minor": found.minor}
        device |= {"fileMode": found.file_mode, "uid": found.uid, "gid": found.gid}
    for key, value in (("fileMode", node.file_mode), ("uid", node.uid), ("gid", node.gid)):
        if value is not None:
            device[key] = value
    return device


def _rule(node: DeviceNode, device: dict[str, Any]) -> dict[str, Any]:
    facts = {key: device[key] for key in ("type", "major", "minor")}
    return {"allow": True, **facts, "access": node.permissions or "rwm"}


def _add_hook(spec: dict[str, Any], hook: Hook) -> None:
    if hook.hook_name not in HOOKS or not hook.path.startswith("/"):
        raise InvalidArgument(f"CDI hook {hook.hook_name!r} of {hook.path!r}")
    entry: dict[str, Any] = {"path": hook.path, "args": hook.args, "env": hook.env}
    if hook.timeout is not None:
        entry["timeout"] = hook.timeout
    spec.setdefault("hooks", {}).setdefault(hook.hook_name, []).append(entry)
