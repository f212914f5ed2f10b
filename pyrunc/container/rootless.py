"""Rootless containers: an ordinary user's runtime becomes root of the container's user namespace.
From then on it works as it does for root.

`create` makes the user namespace or joins the one that the specification names; `exec` joins the
container's. The user namespace is then removed from the specification, because the runtime is
already in it. newuidmap(1) and newgidmap(1) map ids that are not the user's own, if /etc/subuid and
/etc/subgid allow it. Both run in a child that stays outside of the namespace.
"""

from __future__ import annotations

import os

from pyrunc.abi.clone import CLONE_NEWNS, CLONE_NEWUSER
from pyrunc.errors import InvalidSpec, NotFound, PeerError, kernel_errors
from pyrunc.kernel.call import syscall
from pyrunc.kernel.credential import become_root, id_map
from pyrunc.kernel.fd import closing_fd, write_once
from pyrunc.kernel.namespace import open_namespace, setns, unshare
from pyrunc.launch.idmaps import write_maps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.spec.model import IdMap, Linux, Spec

OUTPUT_LIMIT_BYTES = 4096


def enter(spec: Spec) -> Spec:
    """Move this process to the user namespace that `spec` requests, as its root, and to a new mount
    namespace. Return `spec` without the user namespace.

    Raises InvalidSpec for settings that need root of the host, KernelError, and NotFound or
    PeerError when newuidmap is missing or fails.
    """
    linux = spec.linux
    own = (os.geteuid(), os.getegid())
    _refuse(spec)
    user = linux.namespace("user")
    assert user is not None
    if user.path:
        _join(user.path)
    elif _is_own(linux.uid_mappings, os.geteuid()) and _is_own(linux.gid_mappings, os.getegid()):
        _make_with_own_ids(linux)
    else:
        _make_with_granted_ids(linux)
    become_root()
    _keep_files(*own)
    unshare(CLONE_NEWNS)
    return from_inside(spec)


def join(pid: int, spec: Spec) -> Spec:
    """Move this process to the user namespace of the container's process `pid`, as its root. Return
    `spec` without the user namespace. If `spec` has no user namespace, return `spec` and do
    nothing. Raises KernelError."""
    if spec.linux.namespace("user") is None:
        return spec
    own = os.geteuid(), os.getegid()
    # First: the container's other namespaces belong to this one, and only its root may enter them
    # (setns(2)).
    _join(f"/proc/{pid}/ns/user")
    become_root()
    _keep_files(*own)
    return from_inside(spec)


def from_inside(spec: Spec) -> Spec:
    """Return `spec` without its user namespace and id maps, because the runtime is in that
    namespace already."""
    # Otherwise the plan would make a second user namespace inside ours, where the outer ids of its
    # map do not exist.
    rest = tuple(entry for entry in spec.linux.namespaces if entry.type != "user")
    return spec.replace(linux=spec.linux.replace(namespaces=rest, uid_mappings=(), gid_mappings=()))


def _refuse(spec: Spec) -> None:
    linux = spec.linux
    user = linux.namespace("user")
    if user is None:
        raise InvalidSpec("linux.namespaces", "rootless container requires user namespaces")
    for i, mount in enumerate(spec.mounts):
        if (
            mount.uid_mappings
            or mount.gid_mappings
            or "idmap" in mount.options
            or "ridmap" in mount.options
        ):
            raise InvalidSpec(
                f"mounts[{i}]", "an id-mapped mount needs root in the initial user namespace"
            )
    if not user.path:
        _refuse_map("uidMappings", linux.uid_mappings, os.geteuid())
        _refuse_map("gidMappings", linux.gid_mappings, os.getegid())


def _refuse_map(name: str, entries: Sequence[IdMap], own: int) -> None:
    """Raise InvalidSpec if the map `entries` lacks the container's id 0 or the user's own id on the
    host. The runtime needs both; newuidmap checks the other ids.

    `own`: the user's own id; `name`: the map's name in the specification.
    """
    if not any(entry.container_id == 0 and entry.size for entry in entries):
        raise InvalidSpec(
            f"linux.{name}", "rootless container's id 0 must be mapped: it starts as root"
        )
    if not any(entry.host_id <= own < entry.host_id + entry.size for entry in entries):
        raise InvalidSpec(
            f"linux.{name}", f"the user's own id {own} must be mapped, because it owns the files"
        )


def _keep_files(uid: int, gid: int) -> None:
    """Set the ids for file access (setfsuid(2), setfsgid(2)) to the user's own, so that new files
    belong to the user. Otherwise they would belong to root of the namespace, which may be another
    host id, and the user's next command could not read them. execve(2) resets these ids."""
    for call, own, file in (
        ("setfsgid", gid, "/proc/self/gid_map"),
        ("setfsuid", uid, "/proc/self/uid_map"),
    ):
        inner = _inner_id(own, file)
        if inner:
            syscall(call, str(inner), inner)


def _inner_id(own: int, file: str) -> int | None:
    for first, outside, count in id_map(file):
        if outside <= own < outside + count:
            return first + own - outside
    return None


def _is_own(entries: Sequence[IdMap], own: int) -> bool:
    """Return whether the map `entries` contains only one host id, the user's own id `own`. A user
    may write such a map without newuidmap (user_namespaces(7))."""
    return [(entry.host_id, entry.size) for entry in entries] == [(own, 1)]


def _join(path: str) -> None:
    with closing_fd(open_namespace(path, "user")) as number:
        setns(number, CLONE_NEWUSER)


def _make_with_own_ids(linux: Linux) -> None:
    """Move this process to a new user namespace, and write its id maps, which contain only the
    user's own ids. Raises KernelError."""
    unshare(CLONE_NEWUSER)
    # Without CAP_SETGID outside, the kernel accepts a gid_map only if setgroups(2) is forbidden.
    # With setgroups(2) the user could leave a group that keeps its members out of files
    # (CVE-2014-8989).
    with kernel_errors("write", "setgroups"):
        write_once("/proc/self/setgroups", b"deny")
    write_maps(os.getpid(), linux.uid_mappings, linux.gid_mappings)


def _make_with_granted_ids(linux: Linux) -> None:
    commands = [
        _command("newuidmap", linux.uid_mappings),
        _command("newgidmap", linux.gid_mappings),
    ]
    output = os.memfd_create("output", os.MFD_CLOEXEC)
    read_end, write_end = os.pipe()
    # Forked before the namespace is made: newuidmap must run outside of it. It checks that the
    # process in the namespace belongs to the user who runs newuidmap.
    helper = os.fork()
    if helper == 0:
        os.close(write_end)
        _map_after_unshare(read_end, output, commands)
    os.close(read_end)
    try:
        unshare(CLONE_NEWUSER)
        os.write(write_end, b"!")
    finally:
        os.close(write_end)
        code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
        output_text = os.pread(output, OUTPUT_LIMIT_BYTES, 0).decode("utf-8", "replace").strip()
        os.close(output)
    if code == 127:
        raise NotFound(
            "newuidmap or newgidmap is not in $PATH: several ids cannot be mapped without them"
        )
    if code:
        raise PeerError(f"newuidmap or newgidmap failed: {output_text or f'exit code {code}'}")


def _command(program: str, entries: Sequence[IdMap]) -> list[str]:
    numbers = [str(n) for e in entries for n in (e.container_id, e.host_id, e.size)]
    return [program, str(os.getpid()), *numbers]


def _map_after_unshare(read_end: int, output: int, commands: Sequence[list[str]]) -> None:
    """Wait until the parent has entered its new user namespace and written a byte to the pipe
    `read_end`. Then run the commands that write the namespace's maps, with the memfd `output` as
    their stdout and stderr, and exit.

    The exit code is 0, or that of the first command that fails, or 127 for a missing command. It is
    1 if the parent closes the pipe without a byte.
    """
    code = 1
    try:
        # Nothing to read: the parent died or could not make the namespace.
        if os.read(read_end, 1):
            actions = [(os.POSIX_SPAWN_DUP2, output, number) for number in (1, 2)]
            for command in commands:
                pid = os.posix_spawnp(command[0], command, os.environ, file_actions=actions)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if code:
                    break
    except FileNotFoundError:
        code = 127
    finally:
        os._exit(code)
