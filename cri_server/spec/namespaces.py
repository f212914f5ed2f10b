"""Decides from CRI's namespace modes which namespaces a container joins, makes, or shares with the
host."""

from __future__ import annotations

from cri_server.api import api_pb2 as api
from cri_server.store.model import copy
from pyrunc.errors import InvalidArgument

Entries = list[dict[str, str]]


def entries(
    options: api.NamespaceOption, pause_pid: int, target_pid: int, *, privileged: bool
) -> Entries:
    """Return the OCI list `linux.namespaces` of a container. The container joins the pod's
    namespaces through the pause process `pause_pid`.

    `target_pid`: the process whose pid namespace the container joins in mode TARGET, else 0.
    """
    result: Entries = [{"type": "mount"}]
    # A privileged container manages the node's cgroups (KEP-2254; containerd and CRI-O agree).
    if not privileged:
        result.append({"type": "cgroup"})
    if options.network == api.POD:
        result.append({"type": "network", "path": f"/proc/{pause_pid}/ns/net"})
        result.append({"type": "uts", "path": f"/proc/{pause_pid}/ns/uts"})
    for kind, mode in (("ipc", options.ipc), ("pid", options.pid)):
        if mode == api.CONTAINER:
            result.append({"type": kind})
        elif mode in (api.POD, api.TARGET):
            owner = pause_pid if mode == api.POD else target_pid
            result.append({"type": kind, "path": f"/proc/{owner}/ns/{kind}"})
    if has_user_namespace(options):
        result.append({"type": "user", "path": f"/proc/{pause_pid}/ns/user"})
    return result


def check_sandbox(options: api.NamespaceOption) -> None:
    """Check a sandbox's namespace modes. Raises InvalidArgument."""
    _check_modes(options)
    if options.pid == api.TARGET:
        raise InvalidArgument("namespace_options.pid must be POD, CONTAINER or NODE")


def _check_modes(options: api.NamespaceOption) -> None:
    """Check the network, IPC and pid modes, and the user namespace if there is one. Raises
    InvalidArgument."""
    if options.network not in (api.POD, api.NODE):
        raise InvalidArgument("namespace_options.network must be POD or NODE")
    if options.ipc not in (api.POD, api.NODE, api.CONTAINER):
        raise InvalidArgument("namespace_options.ipc must be POD, CONTAINER or NODE")
    if options.pid not in (api.POD, api.CONTAINER, api.NODE, api.TARGET):
        raise InvalidArgument(f"namespace_options.pid: unknown mode {options.pid}")
    if options.HasField("userns_options"):
        check_user_namespace(options.userns_options)


def check_container(options: api.NamespaceOption, sandbox: api.NamespaceOption) -> None:
    """Check a container's namespace modes, and that its user namespace is the sandbox's. Raises
    InvalidArgument."""
    _check_modes(options)
    if options.pid == api.TARGET and not options.target_id:
        raise InvalidArgument("namespace_options.pid is TARGET without target_id")
    if id_maps(options) != id_maps(sandbox):
        raise InvalidArgument("namespace_options.userns_options must be the sandbox's")


def effective(options: api.NamespaceOption, sandbox: api.NamespaceOption) -> api.NamespaceOption:
    """Return a container's effective namespace modes. The network mode is the sandbox's. A pid or
    IPC mode of POD becomes NODE if the sandbox has NODE: POD is protobuf's default, so it does not
    contradict the sandbox."""
    result = copy(options)
    result.network = sandbox.network
    if options.pid == api.POD and sandbox.pid == api.NODE:
        result.pid = api.NODE
    if options.ipc == api.POD and sandbox.ipc == api.NODE:
        result.ipc = api.NODE
    return result


def check_user_namespace(options: api.UserNamespace) -> None:
    """Check a user namespace. The mode must be NODE without mappings, or POD with one uid range and
    one gid range that begin at id 0. Raises InvalidArgument."""
    where = "namespace_options.userns_options"
    if options.mode == api.NODE:
        if options.uids or options.gids:
            raise InvalidArgument(f"{where}: mode NODE takes no mappings")
        return
    if options.mode != api.POD:
        raise InvalidArgument(f"{where}: mode must be POD or NODE")
    for name, mappings in (("uids", options.uids), ("gids", options.gids)):
        if len(mappings) != 1:
            raise InvalidArgument(
                f"{where}.{name}: exactly one mapping is supported, not {len(mappings)}"
            )
        mapping = mappings[0]
        if mapping.length < 1 or mapping.container_id != 0:
            raise InvalidArgument(
                f"{where}.{name}: the mapping must begin at container id 0 and have a length of"
                " at least 1"
            )
        # 4294967295 is (uid_t)-1, which setresuid(2) and chown(2) take for "no change".
        if mapping.host_id + mapping.length > 2**32 - 1:
            raise InvalidArgument(f"{where}.{name}: the mapping ends above the highest id")


def has_user_namespace(options: api.NamespaceOption) -> bool:
    """Return whether the pod has a user namespace."""
    return options.HasField("userns_options") and options.userns_options.mode == api.POD


def id_maps(options: api.NamespaceOption) -> dict[str, list[dict[str, int]]]:
    """Return OCI's `uidMappings` and `gidMappings` of a pod with a user namespace; empty without
    one."""
    if not has_user_namespace(options):
        return {}
    users = options.userns_options
    return {
        key: [{"containerID": m.container_id, "hostID": m.host_id, "size": m.length} for m in maps]
        for key, maps in (("uidMappings", users.uids), ("gidMappings", users.gids))
    }


def root_of(options: api.NamespaceOption) -> tuple[int, int]:
    """Return the host's uid and gid to which the root user in the pod is mapped."""
    maps = id_maps(options)
    return (maps["uidMappings"][0]["hostID"], maps["gidMappings"][0]["hostID"]) if maps else (0, 0)
