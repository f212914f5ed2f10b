"""Parses JSON objects into the values of `model`. Errors name the JSON path
(`mounts[3].destination: …`).

Unknown properties are ignored, null is the same as absent, and a number is never a boolean. This
module checks only types and ranges; `check` compares the fields with each other.
"""

from __future__ import annotations

from pyrunc.errors import InvalidSpec
from pyrunc.spec.model import (
    Capabilities,
    ConsoleSize,
    CpuAffinity,
    Device,
    Hook,
    Hooks,
    IdMap,
    IoPriority,
    Linux,
    MemoryPolicy,
    Mount,
    Namespace,
    Personality,
    Process,
    Rlimit,
    Root,
    Scheduler,
    Spec,
    TimeOffset,
    User,
)
from pyrunc.spec.shape import FLAG, INTEL_RDT, RESOURCES, SECCOMP, TEXT, shaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any, TypeVar

    Object = dict[str, Any]
    T = TypeVar("T")

UINT32 = 0xFFFFFFFF
UINT64 = 0xFFFFFFFFFFFFFFFF
INT64 = 0x7FFFFFFFFFFFFFFF
# The kernel has 12 bits for a major and 20 for a minor number (linux/kdev_t.h), and mknod(2) drops
# higher bits: another device would be created.
MAJOR = 0xFFF
MINOR = 0xFFFFF


def parse(document: object) -> Spec:
    """Parse the specification in a decoded `config.json`. Raises InvalidSpec."""
    if type(document) is not dict:
        raise InvalidSpec("", "the configuration must be a JSON object")
    version, linux = _version(document), _object(document, "linux", "", _linux) or Linux()
    if linux.resources:
        linux = linux.replace(resources=resources_of(version, linux.resources))
    return Spec(
        version,
        _object(document, "root", "", _root),
        _object(document, "process", "", parse_process),
        _text(document, "hostname", ""),
        _text(document, "domainname", ""),
        _objects(document, "mounts", "", _mount),
        _object(document, "hooks", "", _hooks) or Hooks(),
        _texts_by_name(document, "annotations", ""),
        linux,
    )


def resources_of(version: str, resources: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert `linux.resources` to runtime-spec 1.3. `version`: the `ociVersion` of the
    configuration. Before 1.3, a pids limit of 0 means no limit; it becomes -1."""
    # podman before 5.4.1 writes 0 for `--pids-limit -1`; runc before 1.4 and crun set no limit.
    if int(version.split(".")[1]) < 3 and (resources.get("pids") or {}).get("limit") == 0:
        return {**resources, "pids": {"limit": -1}}
    return resources


def parse_process(o: Object, path: str = "process") -> Process:
    """Parse a `process` object of a configuration or of an exec request. Raises InvalidSpec."""
    return Process(
        _texts(o, "args", path),
        _text(o, "cwd", path),
        _texts(o, "env", path),
        _object(o, "user", path, _user) or User(),
        _flag(o, "terminal", path),
        _object(o, "consoleSize", path, _console_size),
        _object(o, "capabilities", path, _capabilities),
        _objects(o, "rlimits", path, _rlimit),
        _flag(o, "noNewPrivileges", path),
        _text(o, "apparmorProfile", path),
        _text(o, "selinuxLabel", path),
        _number(o, "oomScoreAdj", path, -1000, 1000, None),
        _object(o, "scheduler", path, _scheduler),
        _object(o, "ioPriority", path, _io_priority),
        _object(o, "execCPUAffinity", path, _affinity),
    )


def _version(document: Object) -> str:
    """Return `ociVersion`. Accepts any 1.x, because a minor version only adds fields (runtime-spec,
    versioning)."""
    version = _text(document, "ociVersion", "", required=True)
    # Development versions of the specification are "1.3.0-dev" or "1.2.0+dev".
    core = version.split("-", 1)[0].split("+", 1)[0]
    numbers = core.split(".")
    if len(numbers) != 3 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise InvalidSpec("ociVersion", f"{version!r} is not a semantic version")
    if numbers[0] != "1":
        raise InvalidSpec("ociVersion", f"version {version} is not supported, only 1.x is")
    return version


def _root(o: Object, path: str) -> Root:
    return Root(_text(o, "path", path, required=True), _flag(o, "readonly", path))


def _mount(o: Object, path: str) -> Mount:
    return Mount(
        _text(o, "destination", path, required=True),
        _text(o, "type", path),
        _text(o, "source", path),
        _texts(o, "options", path),
        _objects(o, "uidMappings", path, _id_map),
        _objects(o, "gidMappings", path, _id_map),
    )


def _id_map(o: Object, path: str) -> IdMap:
    entry = IdMap(
        _number(o, "containerID", path, 0, UINT32, 0),
        _number(o, "hostID", path, 0, UINT32, 0),
        _number(o, "size", path, 1, UINT32, None, required=True),
    )
    # The last id, 2^32-1, stands for "unchanged" in setresuid(2) and chown(2), and cannot be
    # mapped.
    if entry.container_id + entry.size > UINT32 or entry.host_id + entry.size > UINT32:
        raise InvalidSpec(path, "the range ends beyond the largest id")
    return entry


def _user(o: Object, path: str) -> User:
    return User(
        # 2^32-1 is refused: setresuid(2) reads it as "leave it", and the process would stay root
        # (the class of CVE-2024-40635).
        _number(o, "uid", path, 0, UINT32 - 1, 0),
        _number(o, "gid", path, 0, UINT32 - 1, 0),
        _number(o, "umask", path, 0, 0o777, None),
        tuple(_field(o, "additionalGids", path, [(0, UINT32 - 1)], ())),
    )


def _console_size(o: Object, path: str) -> ConsoleSize:
    return ConsoleSize(
        _number(o, "height", path, 0, 65535, 0), _number(o, "width", path, 0, 65535, 0)
    )


def _capabilities(o: Object, path: str) -> Capabilities:
    return Capabilities(
        _texts(o, "bounding", path),
        _texts(o, "effective", path),
        _texts(o, "inheritable", path),
        _texts(o, "permitted", path),
        _texts(o, "ambient", path),
    )


def _rlimit(o: Object, path: str) -> Rlimit:
    return Rlimit(
        _text(o, "type", path, required=True),
        _number(o, "soft", path, 0, UINT64, None, required=True),
        _number(o, "hard", path, 0, UINT64, None, required=True),
    )


def _scheduler(o: Object, path: str) -> Scheduler:
    return Scheduler(
        _text(o, "policy", path, required=True),
        _number(o, "nice", path, -(1 << 31), (1 << 31) - 1, 0),
        _number(o, "priority", path, -(1 << 31), (1 << 31) - 1, 0),
        _texts(o, "flags", path),
        _number(o, "runtime", path, 0, UINT64, 0),
        _number(o, "deadline", path, 0, UINT64, 0),
        _number(o, "period", path, 0, UINT64, 0),
    )


def _io_priority(o: Object, path: str) -> IoPriority:
    return IoPriority(
        _text(o, "class", path, required=True),
        _number(o, "priority", path, -(1 << 31), (1 << 31) - 1, 0),
    )


def _affinity(o: Object, path: str) -> CpuAffinity:
    return CpuAffinity(_text(o, "initial", path), _text(o, "final", path))


def _hooks(o: Object, path: str) -> Hooks:
    return Hooks(
        _objects(o, "prestart", path, _hook),
        _objects(o, "createRuntime", path, _hook),
        _objects(o, "createContainer", path, _hook),
        _objects(o, "startContainer", path, _hook),
        _objects(o, "poststart", path, _hook),
        _objects(o, "poststop", path, _hook),
    )


def _hook(o: Object, path: str) -> Hook:
    return Hook(
        _text(o, "path", path, required=True),
        _texts(o, "args", path),
        _texts(o, "env", path) if o.get("env") is not None else None,
        _number(o, "timeout", path, -INT64, INT64, None),
    )


def _linux(o: Object, path: str) -> Linux:
    return Linux(
        _objects(o, "namespaces", path, _namespace),
        _objects(o, "uidMappings", path, _id_map),
        _objects(o, "gidMappings", path, _id_map),
        _objects_by_name(o, "timeOffsets", path, _time_offset),
        _objects(o, "devices", path, _device),
        {
            name: new_name or name
            for name, new_name in _objects_by_name(o, "netDevices", path, _link_name).items()
        },
        _text(o, "cgroupsPath", path),
        _field(o, "resources", path, RESOURCES),
        _field(o, "intelRdt", path, INTEL_RDT),
        _object(o, "memoryPolicy", path, _memory_policy),
        _texts_by_name(o, "sysctl", path),
        _seccomp(o, path),
        _text(o, "rootfsPropagation", path),
        _texts(o, "maskedPaths", path),
        _texts(o, "readonlyPaths", path),
        _text(o, "mountLabel", path),
        _object(o, "personality", path, _personality),
    )


_last_seccomp: tuple[Any, Any] = None, None
"""The last seccomp profile: its JSON object and the parsed profile."""


def _seccomp(o: Object, path: str) -> Any:
    """Parse the seccomp profile. If it equals the last one, return the same object: nearly all
    containers of a node have the same profile, and it takes 46 KiB of memory."""
    global _last_seccomp
    profile = o.get("seccomp")
    if profile is None or profile != _last_seccomp[0]:
        _last_seccomp = profile, _field(o, "seccomp", path, SECCOMP)
    return _last_seccomp[1]


def _namespace(o: Object, path: str) -> Namespace:
    return Namespace(_text(o, "type", path, required=True), _text(o, "path", path))


def _link_name(o: Object, path: str) -> str:
    return _text(o, "name", path)


def _time_offset(o: Object, path: str) -> TimeOffset:
    return TimeOffset(
        _number(o, "secs", path, -INT64, INT64, 0), _number(o, "nanosecs", path, 0, 999_999_999, 0)
    )


def _device(o: Object, path: str) -> Device:
    return Device(
        _text(o, "path", path, required=True),
        _text(o, "type", path, required=True),
        _number(o, "major", path, 0, MAJOR, 0),
        _number(o, "minor", path, 0, MINOR, 0),
        _number(o, "fileMode", path, 0, UINT32, None),
        _number(o, "uid", path, 0, UINT32 - 1, 0),
        _number(o, "gid", path, 0, UINT32 - 1, 0),
    )


def _memory_policy(o: Object, path: str) -> MemoryPolicy:
    return MemoryPolicy(
        _text(o, "mode", path, required=True), _text(o, "nodes", path), _texts(o, "flags", path)
    )


def _personality(o: Object, path: str) -> Personality:
    return Personality(_text(o, "domain", path, required=True), _texts(o, "flags", path))


# The JSON types. `path` is the path of the object, `key` the property.


def _at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _field(
    o: Object, key: str, path: str, shape: object, default: Any = None, required: bool = False
) -> Any:
    """Check the property `key` of `o` against `shape` and return it, or `default` when it is
    absent. Raises InvalidSpec with the JSON path of the property."""
    value = o.get(key)
    if value is not None:
        return shaped(value, shape, _at(path, key))
    if required:
        raise InvalidSpec(_at(path, key), "is required")
    return default


def _text(o: Object, key: str, path: str, required: bool = False) -> str:
    text: str = _field(o, key, path, TEXT, "", required)
    return text


def _texts(o: Object, key: str, path: str) -> tuple[str, ...]:
    return tuple(_field(o, key, path, [TEXT], ()))


def _texts_by_name(o: Object, key: str, path: str) -> dict[str, str]:
    return {name: shaped(value, TEXT, at) for name, value, at in _items(o, key, path)}


def _flag(o: Object, key: str, path: str) -> bool:
    flag: bool = _field(o, key, path, FLAG, False)
    return flag


def _number(
    o: Object, key: str, path: str, low: int, high: int, default: Any, required: bool = False
) -> Any:
    return _field(o, key, path, (low, high), default, required)


def _object(o: Object, key: str, path: str, read: Callable[[Object, str], T]) -> T | None:
    value = o.get(key)
    return None if value is None else read(_checked_object(value, _at(path, key)), _at(path, key))


def _objects(o: Object, key: str, path: str, read: Callable[[Object, str], T]) -> tuple[T, ...]:
    values, base = o.get(key), _at(path, key)
    if values is None:
        return ()
    if type(values) is not list:
        raise InvalidSpec(base, "must be a list")
    paths = [f"{base}[{i}]" for i in range(len(values))]
    pairs = zip(values, paths, strict=True)
    return tuple([read(_checked_object(value, at), at) for value, at in pairs])


def _objects_by_name(
    o: Object, key: str, path: str, read: Callable[[Object, str], T]
) -> dict[str, T]:
    items = _items(o, key, path)
    return {name: read(_checked_object(value, at), at) for name, value, at in items}


def _items(o: Object, key: str, path: str) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, JSON path of the value) for each item of the object at `key`. The caller
    must check the value, which may be null."""
    values, base = o.get(key), _at(path, key)
    if values is not None:
        for name, value in _checked_object(values, base).items():
            yield shaped(name, TEXT, base), value, f"{base}.{name}"


def _checked_object(value: object, path: str) -> Object:
    if type(value) is not dict:
        raise InvalidSpec(path, "must be an object")
    return value
