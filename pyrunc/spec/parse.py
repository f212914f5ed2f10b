"""Parses JSON objects into the values of `model`; errors name the JSON path
(`mounts[3].destination: …`).

Unknown properties are ignored, null is the same as absent, and a number is never a boolean. Only
the shape is checked here (types, ranges, words of a closed list); `check` has what fields demand of
each other.
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
from pyrunc.spec.shape import NOT_PLAIN, RESOURCES, SECCOMP, is_plain, shaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    Object = dict[str, Any]
    T = TypeVar("T")

UINT32 = 0xFFFFFFFF
UINT64 = 0xFFFFFFFFFFFFFFFF
INT64 = 0x7FFFFFFFFFFFFFFF


def parse(document: object) -> Spec:
    """Parse the specification in a decoded `config.json`. Raises InvalidSpec."""
    if type(document) is not dict:
        raise InvalidSpec("", "the configuration must be a JSON object")
    return Spec(
        _version(document),
        _object(document, "root", "", _root),
        _object(document, "process", "", parse_process),
        _text(document, "hostname", ""),
        _text(document, "domainname", ""),
        _objects(document, "mounts", "", _mount),
        _object(document, "hooks", "", _hooks) or Hooks(),
        _texts_by_name(document, "annotations", ""),
        _object(document, "linux", "", _linux) or Linux(),
    )


def parse_process(o: Object, path: str = "process") -> Process:
    """Parse a `process` object, of a configuration or of an exec request."""
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
    """Return `ociVersion`: any 1.x, since minor versions only add (runtime-spec, versioning)."""
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
        # Without the largest: setresuid(2) reads 2^32-1 as "leave it", and the process would stay
        # root (the class of CVE-2024-40635).
        _number(o, "uid", path, 0, UINT32 - 1, 0),
        _number(o, "gid", path, 0, UINT32 - 1, 0),
        _number(o, "umask", path, 0, 0o777, None),
        _numbers(o, "additionalGids", path, 0, UINT32 - 1),
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
        {
            name: _time_offset(v, f"{path}.timeOffsets.{name}")
            for name, v in _named(o, "timeOffsets", path)
        },
        _objects(o, "devices", path, _device),
        {
            name: _text(v, "name", f"{path}.netDevices.{name}") or name
            for name, v in _named(o, "netDevices", path)
        },
        _text(o, "cgroupsPath", path),
        _shaped(o, "resources", path, RESOURCES),
        _raw(o, "intelRdt", path),
        _object(o, "memoryPolicy", path, _memory_policy),
        _texts_by_name(o, "sysctl", path),
        _shaped(o, "seccomp", path, SECCOMP),
        _text(o, "rootfsPropagation", path),
        _texts(o, "maskedPaths", path),
        _texts(o, "readonlyPaths", path),
        _text(o, "mountLabel", path),
        _object(o, "personality", path, _personality),
    )


def _namespace(o: Object, path: str) -> Namespace:
    return Namespace(_text(o, "type", path, required=True), _text(o, "path", path))


def _time_offset(o: Object, path: str) -> TimeOffset:
    return TimeOffset(
        _number(o, "secs", path, -INT64, INT64, 0), _number(o, "nanosecs", path, 0, 999_999_999, 0)
    )


def _device(o: Object, path: str) -> Device:
    return Device(
        _text(o, "path", path, required=True),
        _text(o, "type", path, required=True),
        _number(o, "major", path, 0, UINT32, 0),
        _number(o, "minor", path, 0, UINT32, 0),
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


def _text(o: Object, key: str, path: str, required: bool = False) -> str:
    value = o.get(key)
    if value is None:
        if required:
            raise InvalidSpec(_at(path, key), "is required")
        return ""
    return _checked_text(value, path, key)


def _checked_text(value: object, path: str, key: str) -> str:
    if type(value) is not str:
        raise InvalidSpec(_at(path, key), "must be a string")
    if not is_plain(value):
        raise InvalidSpec(_at(path, key), NOT_PLAIN)
    return value


def _texts(o: Object, key: str, path: str) -> tuple[str, ...]:
    values = o.get(key)
    if values is None:
        return ()
    if type(values) is not list:
        raise InvalidSpec(_at(path, key), "must be a list")
    for i, value in enumerate(values):
        if type(value) is not str or not is_plain(value):
            _checked_text(value, path, f"{key}[{i}]")
    return tuple(values)


def _texts_by_name(o: Object, key: str, path: str) -> dict[str, str]:
    values = _raw(o, key, path)
    if not values:
        return {}
    return {
        _checked_text(n, path, key): _checked_text(v, _at(path, key), n) for n, v in values.items()
    }


def _named(o: Object, key: str, path: str) -> list[tuple[str, Object]]:
    values = _raw(o, key, path)
    if not values:
        return []
    for name, value in values.items():
        if type(value) is not dict:
            raise InvalidSpec(f"{_at(path, key)}.{name}", "must be an object")
    return list(values.items())


def _flag(o: Object, key: str, path: str) -> bool:
    value = o.get(key)
    if value is None:
        return False
    if type(value) is not bool:
        raise InvalidSpec(_at(path, key), "must be true or false")
    return value


def _number(
    o: Object, key: str, path: str, low: int, high: int, default: Any, required: bool = False
) -> Any:
    value = o.get(key)
    if value is None:
        if required:
            raise InvalidSpec(_at(path, key), "is required")
        return default
    return _checked_number(value, low, high, path, key)


def _checked_number(value: object, low: int, high: int, path: str, key: str) -> int:
    # Not isinstance, because a bool is an int in Python.
    if type(value) is not int:
        raise InvalidSpec(_at(path, key), "must be an integer")
    if not low <= value <= high:
        raise InvalidSpec(_at(path, key), f"{value} is not between {low} and {high}")
    return value


def _numbers(o: Object, key: str, path: str, low: int, high: int) -> tuple[int, ...]:
    values = o.get(key)
    if values is None:
        return ()
    if type(values) is not list:
        raise InvalidSpec(_at(path, key), "must be a list")
    return tuple([_checked_number(v, low, high, path, f"{key}[{i}]") for i, v in enumerate(values)])


def _raw(o: Object, key: str, path: str) -> Object | None:
    value = o.get(key)
    if value is not None and type(value) is not dict:
        raise InvalidSpec(_at(path, key), "must be an object")
    return value


def _shaped(o: Object, key: str, path: str, shape: object) -> Object | None:
    value = o.get(key)
    if value is None:
        return None
    result: Object = shaped(value, shape, _at(path, key))
    return result


def _object(o: Object, key: str, path: str, read: Callable[[Object, str], T]) -> T | None:
    value = o.get(key)
    if value is None:
        return None
    if type(value) is not dict:
        raise InvalidSpec(_at(path, key), "must be an object")
    return read(value, _at(path, key))


def _objects(o: Object, key: str, path: str, read: Callable[[Object, str], T]) -> tuple[T, ...]:
    values = o.get(key)
    if values is None:
        return ()
    if type(values) is not list:
        raise InvalidSpec(_at(path, key), "must be a list")
    base = _at(path, key)
    items = []
    for i, value in enumerate(values):
        if type(value) is not dict:
            raise InvalidSpec(f"{base}[{i}]", "must be an object")
        items.append(read(value, f"{base}[{i}]"))
    return tuple(items)
