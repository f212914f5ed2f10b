"""Finds out where each value of a container comes from: the container's request, the pod's request,
the image, the server's configuration, or a default.

Compares the requests and the image's configuration with the container's runtime spec. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cri_server.api import api_pb2 as api

REQUEST, POD, IMAGE, DEFAULT = "request", "pod", "image", "default"
OF_THE_POD = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/shm")
HIDDEN = "(not shown)"
LIMITS = {
    "memory": ("limit", "memory_limit_in_bytes"),
    "cpu": ("quota", "cpu_quota"),
}


class Origin(NamedTuple):
    """A line of the report: the name of a value, the value as text, and its origin."""

    item: str
    value: str
    origin: str


def origins(
    config: api.ContainerConfig,
    pod: api.PodSandboxConfig,
    image: Mapping[str, Any],
    spec: Mapping[str, Any],
) -> list[Origin]:
    """Return the lines of the report: where each value of a container comes from.

    - `config`, `pod`: the requests that created the container and the pod.
    - `image`: the object `config` of the image's configuration.
    - `spec`: the container's runtime spec."""
    process = spec.get("process") or {}
    linux = spec.get("linux") or {}
    return [
        *_arguments(config, process),
        *_environment(config, image),
        _cwd(config, image, process),
        _user(config, image, process),
        _hostname(pod, spec),
        *_security(config, process, spec, linux),
        *_mounts(config, image, spec),
        *_namespaces(linux),
        *_resources(config, linux),
        Origin(
            "limits of processes",
            f"{len(process.get('rlimits') or ())}",
            "server: [containers] rlimits, or its own",
        ),
        _cgroup(pod, linux),
    ]


def _cgroup(pod: api.PodSandboxConfig, linux: Mapping[str, Any]) -> Origin:
    origin = f"{POD}: cgroup_parent" if pod.linux.cgroup_parent else "server: [cgroup]"
    return Origin("cgroup", str(linux.get("cgroupsPath", "")), origin)


def _arguments(config: api.ContainerConfig, process: Mapping[str, Any]) -> Iterator[Origin]:
    """Yield the report's lines for the container's arguments. If the request has a command, no
    argument comes from the image (CRI, `ContainerConfig.command`)."""
    args = list(map(str, process.get("args") or ()))
    first = len(config.command)
    for number, word in enumerate(args):
        if config.command:
            origin = f"{REQUEST}: command" if number < first else f"{REQUEST}: args"
        else:
            own = number >= len(args) - len(config.args)
            origin = f"{REQUEST}: args" if own else f"{IMAGE}: Entrypoint or Cmd"
        yield Origin(f"argument {number}", word, origin)


def _environment(config: api.ContainerConfig, image: Mapping[str, Any]) -> Iterator[Origin]:
    """Yield the report's lines for the environment variables. Values that come from the container's
    request are shown as HIDDEN, because they may be secrets."""
    by_name = {}
    for line in image.get("Env") or ():
        name, _, value = str(line).partition("=")
        by_name[name] = Origin(f"env {name}", value, f"{IMAGE}: Env")
    for each in config.envs:
        before = " (instead of the image's)" if each.key in by_name else ""
        by_name[each.key] = Origin(f"env {each.key}", HIDDEN, f"{REQUEST}: envs{before}")
    yield from by_name.values()


def _cwd(
    config: api.ContainerConfig, image: Mapping[str, Any], process: Mapping[str, Any]
) -> Origin:
    origin = DEFAULT
    if config.working_dir:
        origin = f"{REQUEST}: working_dir"
    elif image.get("WorkingDir"):
        origin = f"{IMAGE}: WorkingDir"
    return Origin("folder", str(process.get("cwd", "/")), origin)


def _user(
    config: api.ContainerConfig, image: Mapping[str, Any], process: Mapping[str, Any]
) -> Origin:
    context, user = config.linux.security_context, process.get("user") or {}
    origin = DEFAULT
    if context.HasField("run_as_user") or context.run_as_username:
        origin = f"{REQUEST}: run_as_user"
    elif image.get("User"):
        origin = f"{IMAGE}: User"
    return Origin("user", f"{user.get('uid', 0)}:{user.get('gid', 0)}", origin)


def _hostname(pod: api.PodSandboxConfig, spec: Mapping[str, Any]) -> Origin:
    shared = pod.linux.security_context.namespace_options.network == api.NODE
    if shared:
        return Origin("hostname", "the host's", f"{POD}: namespace_options")
    value = str(spec.get("hostname") or pod.hostname)
    return Origin("hostname", value or "of the pod", f"{POD}: hostname" if pod.hostname else POD)


def _security(
    config: api.ContainerConfig,
    process: Mapping[str, Any],
    spec: Mapping[str, Any],
    linux: Mapping[str, Any],
) -> Iterator[Origin]:
    context = config.linux.security_context
    effective = (process.get("capabilities") or {}).get("effective") or ()
    changes = [f"+{name}" for name in context.capabilities.add_capabilities]
    changes += [f"-{name}" for name in context.capabilities.drop_capabilities]
    origin = f"{DEFAULT}, {REQUEST}: {' '.join(changes)}" if changes else DEFAULT
    origin = f"{REQUEST}: privileged" if context.privileged else origin
    yield Origin("capabilities", f"{len(effective)}", origin)
    if context.HasField("seccomp"):
        profile = api.SecurityProfile.ProfileType.Name(context.seccomp.profile_type)
        yield Origin("seccomp", profile, f"{REQUEST}: seccomp")
    else:
        profile = "RuntimeDefault" if linux.get("seccomp") else "Unconfined"
        yield Origin("seccomp", profile, DEFAULT)
    yield _flag("read-only root", (spec.get("root") or {}).get("readonly"), "readonly_rootfs")
    yield _flag("no new privileges", process.get("noNewPrivileges"), "no_new_privs")


def _flag(item: str, value: object, field: str) -> Origin:
    """Return the report's line for the flag `item`. Its origin is the field `field` of the
    container's request if the flag is set, else the default."""
    return Origin(item, "true" if value else "false", f"{REQUEST}: {field}" if value else DEFAULT)


def _mounts(
    config: api.ContainerConfig, image: Mapping[str, Any], spec: Mapping[str, Any]
) -> Iterator[Origin]:
    requested = {mount.container_path.rstrip("/") or "/": mount for mount in config.mounts}
    volumes = {str(path).rstrip("/") or "/" for path in image.get("Volumes") or ()}
    for mount in spec.get("mounts") or ():
        place = str(mount.get("destination", ""))
        request = requested.get(place.rstrip("/") or "/")
        origin = DEFAULT
        if request is not None:
            origin = f"{REQUEST}: mounts"
        elif place in volumes:
            origin = f"{IMAGE}: Volumes"
        elif place in OF_THE_POD:
            origin = POD
        source = (
            request.host_path or request.image.image
            if request is not None
            else str(mount.get("type") or "bind")
        )
        yield Origin(f"mount {place}", source, origin)


def _namespaces(linux: Mapping[str, Any]) -> Iterator[Origin]:
    own = {entry.get("type"): entry.get("path") for entry in linux.get("namespaces") or ()}
    for kind in ("network", "ipc", "uts", "pid", "user", "cgroup", "mount"):
        item = f"namespace {kind}"
        if kind in own:
            yield Origin(item, str(own[kind] or "its own"), POD if own[kind] else DEFAULT)
        else:
            in_request = kind in ("network", "ipc", "pid")
            origin = f"{REQUEST}: namespace_options" if in_request else DEFAULT
            yield Origin(item, "the host's", origin)


def _resources(config: api.ContainerConfig, linux: Mapping[str, Any]) -> Iterator[Origin]:
    limits = linux.get("resources") or {}
    for group, (key, name) in LIMITS.items():
        value = (limits.get(group) or {}).get(key)
        is_requested = getattr(config.linux.resources, name)
        origin = f"{REQUEST}: resources" if is_requested else DEFAULT
        yield Origin(f"{group} {key}", str(value or "none"), origin)
