"""Which namespaces a container joins, makes or leaves to the host, by CRI's four modes."""

from __future__ import annotations

from cri_server.api import api_pb2 as api
from pyrunc.errors import InvalidArgument

Entries = list[dict[str, str]]


def entries(
    options: api.NamespaceOption, pause_pid: int, target_pid: int, *, privileged: bool
) -> Entries:
    """The OCI list `linux.namespaces`. The pod's namespaces are those of its pause process.

    `target_pid` is the process whose pid namespace mode TARGET joins, 0 otherwise.
    """
    result: Entries = [{"type": "mount"}]
    if not privileged:
        result.append({"type": "cgroup"})
    if options.network == api.POD:
        result.append({"type": "network", "path": f"/proc/{pause_pid}/ns/net"})
        result.append({"type": "uts", "path": f"/proc/{pause_pid}/ns/uts"})
    result += _ipc(options.ipc, pause_pid)
    result += _pid(options.pid, pause_pid, target_pid)
    if has_user_namespace(options):
        result.append({"type": "user", "path": f"/proc/{pause_pid}/ns/user"})
    return result


def _ipc(mode: int, pause_pid: int) -> Entries:
    if mode == api.POD:
        return [{"type": "ipc", "path": f"/proc/{pause_pid}/ns/ipc"}]
    return [{"type": "ipc"}] if mode == api.CONTAINER else []


def _pid(mode: int, pause_pid: int, target_pid: int) -> Entries:
    if mode == api.CONTAINER:
        return [{"type": "pid"}]
    if mode == api.POD:
        return [{"type": "pid", "path": f"/proc/{pause_pid}/ns/pid"}]
    if mode == api.TARGET:
        return [{"type": "pid", "path": f"/proc/{target_pid}/ns/pid"}]
    return []


def check_sandbox(options: api.NamespaceOption) -> None:
    """Refuse modes that a sandbox cannot have. Raises InvalidArgument."""
    if options.network not in (api.POD, api.NODE):
        raise InvalidArgument("namespace_options.network must be POD or NODE")
    if options.ipc not in (api.POD, api.NODE, api.CONTAINER):
        raise InvalidArgument("namespace_options.ipc must be POD, CONTAINER or NODE")
    if options.pid not in (api.POD, api.CONTAINER, api.NODE):
        raise InvalidArgument("namespace_options.pid must be POD, CONTAINER or NODE")
    if options.HasField("userns_options"):
        check_user_namespace(options.userns_options)


def check_container(options: api.NamespaceOption, sandbox: api.NamespaceOption) -> None:
    """A container shares the users of its sandbox. Raises InvalidArgument."""
    if options.network not in (api.POD, api.NODE):
        raise InvalidArgument("namespace_options.network must be POD or NODE")
    if options.ipc not in (api.POD, api.NODE, api.CONTAINER):
        raise InvalidArgument("namespace_options.ipc must be POD, CONTAINER or NODE")
    if options.pid not in (api.POD, api.CONTAINER, api.NODE, api.TARGET):
        raise InvalidArgument(f"namespace_options.pid: unknown mode {options.pid}")
    if options.pid == api.TARGET and not options.target_id:
        raise InvalidArgument("namespace_options.pid is TARGET without target_id")
    if options.HasField("userns_options"):
        check_user_namespace(options.userns_options)
    if _mapped(options) != _mapped(sandbox):
        raise InvalidArgument("namespace_options.userns_options must be the sandbox's")


def effective(options: api.NamespaceOption, sandbox: api.NamespaceOption) -> api.NamespaceOption:
    """What a container's modes come to: POD in a pod that lives in the host's namespace means the
    host's.

    POD is also what a caller gets who says nothing, so it is no contradiction. The network is
    always the sandbox's.
    """
    result = api.NamespaceOption()
    result.CopyFrom(options)
    result.network = sandbox.network
    if options.pid == api.POD and sandbox.pid == api.NODE:
        result.pid = api.NODE
    if options.ipc == api.POD and sandbox.ipc == api.NODE:
        result.ipc = api.NODE
    return result


def check_user_namespace(asked: api.UserNamespace) -> None:
    """CRI allows NODE without mappings, or POD with exactly one range for users and one for groups,
    from id 0."""
    where = "namespace_options.userns_options"
    if asked.mode == api.NODE:
        if asked.uids or asked.gids:
            raise InvalidArgument(f"{where}: mode NODE takes no mappings")
        return
    if asked.mode != api.POD:
        raise InvalidArgument(f"{where}: mode must be POD or NODE")
    for name, mappings in (("uids", asked.uids), ("gids", asked.gids)):
        if len(mappings) != 1:
            raise InvalidArgument(
                f"{where}.{name}: exactly one mapping is supported, not {len(mappings)}"
            )
        mapping = mappings[0]
        if mapping.length < 1 or mapping.container_id != 0:
            raise InvalidArgument(
                f"{where}.{name}: the mapping must begin at container id 0 and hold an id"
            )
        if mapping.host_id + mapping.length > 2**32 - 1:
            raise InvalidArgument(f"{where}.{name}: the mapping ends above the highest id")


def has_user_namespace(options: api.NamespaceOption) -> bool:
    """Whether the pod asked for users of its own."""
    return options.HasField("userns_options") and options.userns_options.mode == api.POD


def id_maps(options: api.NamespaceOption) -> dict[str, list[dict[str, int]]]:
    """OCI's `uidMappings` and `gidMappings` of a pod with users of its own; empty without."""
    if not has_user_namespace(options):
        return {}
    users = options.userns_options
    return {
        key: [{"containerID": m.container_id, "hostID": m.host_id, "size": m.length} for m in maps]
        for key, maps in (("uidMappings", users.uids), ("gidMappings", users.gids))
    }


def root_of(options: api.NamespaceOption) -> tuple[int, int]:
    """What the pod's root is on the host: uid and gid."""
    maps = id_maps(options)
    return (maps["uidMappings"][0]["hostID"], maps["gidMappings"][0]["hostID"]) if maps else (0, 0)


def _mapped(options: api.NamespaceOption) -> tuple[tuple[int, int, int], ...]:
    if not has_user_namespace(options):
        return ()
    users = options.userns_options
    return tuple((m.host_id, m.container_id, m.length) for m in (*users.uids, *users.gids))
