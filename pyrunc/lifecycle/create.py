"""`create`: a container comes to be, up to its program's first instruction or to the wait for `start`.

The caller's process is its parent (CLONE_PARENT through the launcher), so it is reaped like any child. Everything that the
container needs from outside is a descriptor made here: the root as a detached mount, clones of bind sources, namespaces, the
cgroup. Nothing is mounted on the host, and on failure nothing is left.
"""

from __future__ import annotations

import os
from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_STREAM
from _socket import socket as _Socket
from errno import E2BIG, EINVAL, ENAMETOOLONG, EPERM

from pyrunc.abi.file import AT_EMPTY_PATH, AT_FDCWD, AT_RECURSIVE
from pyrunc.abi.mount import MOUNT_ATTR_RDONLY, MS_PRIVATE, OPEN_TREE_CLONE
from pyrunc.errors import InvalidArgument, InvalidSpec, KernelError, Unsupported
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel.namespace import open_namespace
from pyrunc.lifecycle import birth, facts, findings
from pyrunc.lifecycle.copyup import open_copy
from pyrunc.lifecycle.idmaps import open_user_namespace, write_maps
from pyrunc.plan import build as plans
from pyrunc.plan.lower import lower
from pyrunc.plan.model import LoadFilter
from pyrunc.plan.mounts import Options, copies_up, is_bind, is_tree
from pyrunc.plan.namespaces import KERNEL_NAMES
from pyrunc.program.launch import LAUNCHER
from pyrunc.spec.check import check, check_namespaces
from pyrunc.spec.model import Linux, Namespace
from pyrunc.spec.value import Value
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.lifecycle.birth import Born
    from pyrunc.plan.model import Findings, Plan
    from pyrunc.spec.model import IdMap, Mount, Process, Spec

    Parts = Mapping[str, Callable[[Born], object]]

START_SOCKET = "start.sock"
OUR_MOUNTS = "pyrunc:"
_NO_MOUNTS: Mapping[str, int] = {}


class Directory(Value):
    """The container's root is a directory of the host, with what is mounted in it."""

    path: str


class Overlay(Value):
    """The container's root is an overlay; `lower` top first. Without `upper` it is read-only."""

    lower: tuple[str, ...]
    upper: str = ""
    work: str = ""
    volatile: bool = False


class CgroupChoice(Value):
    """How the cgroup is made: `driver` cgroupfs or systemd; `missing_controllers` error or warn."""

    driver: str = "cgroupfs"
    missing_controllers: str = "error"


class CreateRequest(Value):
    """What `create` needs.

    `stdio` stay the caller's. `mount_fds`: a mount whose source is `pyrunc:NAME` is a clone of that detached mount.
    `start_immediately`: return when the program was executed; else it waits on `<state_dir>/start.sock`. `parts`: the
    caller's part at sync points (`plan.build.SYNC_POINTS`), called with the `Born` process. `preserve_fds`: numbers of the
    caller that become 3, 4, …. `cgroup` None: stay in the caller's. `mount_namespace`: path of the one to which a `holder`
    attached the mounts of `mount_fds`, for kernels that cannot clone them detached.
    """

    id: str
    bundle: str
    spec: Spec
    rootfs: Directory | Overlay
    stdio: tuple[int, int, int] = (0, 1, 2)
    state_dir: str = ""
    cgroup: CgroupChoice | None = CgroupChoice()
    mount_fds: Mapping[str, int] = _NO_MOUNTS
    mount_namespace: str = ""
    start_immediately: bool = True
    parts: Mapping[str, Callable[[Born], object]] = {}
    preserve_fds: tuple[int, ...] = ()
    keyring: bool = True
    restrict_oom_score_adj: bool = False
    seccomp_store: str | None = None


class Created(Value):
    """A container's process. The descriptors are the caller's now; `cgroup` is where it lives."""

    pid: int
    pidfd: int
    start_time: int
    console_fd: int | None
    cgroup: Cgroup | None
    warnings: tuple[str, ...]


def create(request: CreateRequest) -> Created:
    """Make the container. Raises InvalidSpec, KernelError (worded with the plan's line), NotFound for a missing program.

    The start socket and the cgroup are removed again on failure, the process is killed and reaped.
    """
    spec = request.spec
    check(spec)
    with Undo() as undo, Descriptors() as descriptors:
        load_filter = _load_filter(spec.linux.seccomp, request.seccomp_store)
        _open_namespaces(spec.linux, descriptors)
        _open_root(request, descriptors)
        inside = findings.inside(spec)
        _open_sources(request, descriptors, inside)
        if spec.linux.sysctl:
            descriptors.take("proc", kernel_mount.open_mount("proc"))
        found = findings.look(spec, descriptors.numbers, request.stdio, inside)
        cgroup, warnings = _open_cgroup(
            request.id, spec.linux, spec.annotations, request.cgroup, descriptors, undo
        )
        if not request.start_immediately:
            descriptors.take("start", _open_start_socket(request.state_dir, undo))
        if spec.hooks.start_container:
            descriptors.take("hook-state", os.memfd_create("hook-state", os.MFD_CLOEXEC))
        parts = _parts(spec.linux, spec.process, _with_hooks(request, descriptors))
        plan = _plan(request, found, load_filter, cgroup is not None, parts)
        findings.give_stdio(spec, request.stdio)
        born = birth.bear(
            lower(plan),
            descriptors.numbers,
            undo,
            stdio=request.stdio,
            args=spec.process.args if spec.process else ("",),
            parts=parts,
            extra={3 + i: number for i, number in enumerate(request.preserve_fds)},
        )
        if cgroup is not None:
            cgroup.occupied()
        undo.commit()
    return Created(
        born.pid, born.pidfd, born.start_time, born.console_fd, cgroup, (*warnings, *plan.warnings)
    )


def preview(request: CreateRequest) -> Plan:
    """The plan that `create` would carry out now. Nothing is made: the detached mounts that are looked at go away again."""
    spec = request.spec
    check(spec)
    with Descriptors() as descriptors:
        _open_namespaces(spec.linux, descriptors)
        _open_root(request, descriptors)
        inside = findings.inside(spec)
        _open_sources(request, descriptors, inside)
        found = findings.look(spec, descriptors.numbers, request.stdio, inside)
        load_filter = _load_filter(spec.linux.seccomp, request.seccomp_store)
        parts = _parts(spec.linux, spec.process, _with_hooks(request, descriptors))
        return _plan(request, found, load_filter, request.cgroup is not None, parts)


class Descriptors:
    """Named descriptors that a program inherits; all are closed at the end, for it has copies."""

    __slots__ = ("numbers",)

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def take(self, name: str, number: int) -> int:
        self.numbers[name] = number
        return number

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *error: object) -> None:
        for number in self.numbers.values():
            os.close(number)


def _plan(
    request: CreateRequest,
    found: Findings,
    load_filter: LoadFilter | None,
    in_cgroup: bool,
    parts: Parts,
) -> Plan:
    return plans.build(
        request.spec,
        facts.host(),
        found,
        load_filter=load_filter,
        cgroup=in_cgroup,
        sync=parts,
        await_start=not request.start_immediately,
        keyring=f"_ses.{request.id}" if request.keyring else "",
        restrict_oom_score_adj=request.restrict_oom_score_adj,
        preserve=len(request.preserve_fds),
        root_place=_hook_folder(request) if request.spec.hooks.create_container else "/",
    )


def _hook_folder(request: CreateRequest) -> str:
    """Where createContainer hooks find the container's root: the bundle's folder of it, which must exist."""
    root = request.spec.root
    path = os.path.abspath(os.path.join(request.bundle, root.path if root else ""))
    if not os.path.isdir(path):
        raise InvalidSpec("hooks.createContainer", f"need root.path to be a directory, {path} is none")
    return path


def _with_hooks(request: CreateRequest, descriptors: Descriptors) -> Parts:
    """The caller's parts, after the hooks of create; a caller with a part at `mounted` runs the runtime's hooks itself."""
    spec, wanted = request.spec, request.parts
    hooks = spec.hooks
    if (spec.linux.seccomp or {}).get("listenerPath") and "listener" not in wanted:
        wanted = {**wanted, "listener": _hand_out_listener(request)}
    if not (hooks.prestart or hooks.create_runtime or hooks.create_container or hooks.start_container):
        return wanted
    from pyrunc.lifecycle import inside
    from pyrunc.lifecycle.hooks import run

    def runtime(born: Born) -> None:
        told = inside.state(request.id, spec, request.bundle, "creating", born.pid)
        run(hooks.prestart, "prestart", told)
        run(hooks.create_runtime, "createRuntime", told)

    def container(born: Born) -> None:
        pid = inside.inner_pid(born.pid)
        told = inside.state(request.id, spec, request.bundle, "creating", pid)
        run(
            hooks.create_container, "createContainer", told, inside.spawner(born, spec, _hook_folder(request))
        )

    def prepare_start(born: Born) -> None:
        pid = inside.inner_pid(born.pid)
        told = inside.state(request.id, spec, request.bundle, "created", pid)
        inside.write_state(descriptors.numbers["hook-state"], told)

    parts = dict(wanted)
    if (hooks.prestart or hooks.create_runtime) and "mounted" not in wanted:
        parts["mounted"] = runtime
    if hooks.create_container:
        parts["before-pivot"] = birth.in_turn(container, wanted.get("before-pivot"))
    if hooks.start_container:
        parts["born"] = birth.in_turn(wanted.get("born"), prepare_start)
    return parts


def _hand_out_listener(request: CreateRequest) -> Callable[[Born], object]:
    """The filter's notifications go to whoever waits on listenerPath; without that the process would wait for an answer."""
    from pyrunc.lifecycle import inside, listener

    def part(born: Born) -> None:
        told = inside.state(request.id, request.spec, request.bundle, "creating", born.pid)
        listener.send(born, request.spec, told)

    return part


def _parts(linux: Linux, process: Process | None, wanted: Parts) -> Parts:
    """The caller's parts, after those that a user namespace makes necessary: maps at birth, limits at the end."""
    user = linux.namespace("user")
    if user is None:
        return wanted
    parts = dict(wanted)
    if not user.path:
        parts["born"] = birth.in_turn(
            lambda born: write_maps(born.pid, linux.uid_mappings, linux.gid_mappings), wanted.get("born")
        )
    if process is not None and process.rlimits:
        parts["before-identity"] = birth.in_turn(
            lambda born: set_limits(born.pid, process), wanted.get("before-identity")
        )
    return parts


def set_limits(pid: int, process: Process) -> None:
    """The limits of a process in a user namespace, where it may not raise them itself."""
    from pyrunc.kernel.limit import prlimit

    for limit in process.rlimits:
        prlimit(pid, limit.type, limit.soft, limit.hard)


def _open_root(request: CreateRequest, descriptors: Descriptors) -> None:
    """The root as a detached mount, which the container attaches in its own mount namespace."""
    rootfs = request.rootfs
    if isinstance(rootfs, Overlay):
        descriptors.take("root", _open_overlay(rootfs, request.spec.linux, descriptors))
        return
    path = os.path.join(request.bundle, rootfs.path)
    if not os.path.isdir(path):
        raise InvalidSpec("root.path", f"{path} is not a directory")
    if request.spec.linux.namespace("mount") is None:
        descriptors.take("root", os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    else:
        descriptors.take("root", kernel_mount.open_tree(AT_FDCWD, path, OPEN_TREE_CLONE | AT_RECURSIVE))


def _open_overlay(rootfs: Overlay, linux: Linux, descriptors: Descriptors) -> int:
    """The overlay, detached. In a user namespace the lower layers are mapped, so that files of root are its root's.

    The upper and work folders are not: overlayfs writes to them as the mounter, whose id a map would not have (the mount
    would silently be read-only), so they must belong to the namespace's root.
    """
    options = (("volatile", None),) if rootfs.volatile and rootfs.upper else ()
    upper, work = rootfs.upper or None, rootfs.work or None
    if linux.namespace("user") is not None:
        return _open_mapped_overlay(rootfs, linux, descriptors, options)
    if len(rootfs.lower) == 1 and not upper:  # overlayfs wants two layers, or one to write to
        return _open_read_only(rootfs.lower[0])
    try:
        return kernel_mount.open_overlay(rootfs.lower, upper, work, options=options)
    except KernelError as error:
        if error.errno not in (EINVAL, E2BIG, ENAMETOOLONG) or facts.host().clones_detached:
            raise
    from pyrunc.lifecycle import detached  # brings contextlib, 3 ms

    return detached.open_overlay(rootfs.lower, rootfs.upper, rootfs.work, volatile=bool(options))


def _open_mapped_overlay(
    rootfs: Overlay, linux: Linux, descriptors: Descriptors, options: tuple[tuple[str, None], ...]
) -> int:
    owner = _user_namespace(linux.uid_mappings, linux.gid_mappings, linux, descriptors)
    layers: list[int] = []
    try:
        for path in rootfs.lower:
            layers.append(_open_read_only(path))
            _map(layers[-1], owner, path, recursive=False)
        if len(layers) == 1 and not rootfs.upper:
            return layers.pop()
        _give_to_root(rootfs, linux)
        if facts.host().clones_detached:
            upper, work = rootfs.upper or None, rootfs.work or None
            return kernel_mount.open_overlay(layers, upper, work, options=options)
        from pyrunc.lifecycle import detached

        volatile = bool(options)
        return detached.open_overlay(
            rootfs.lower, rootfs.upper, rootfs.work, volatile=volatile, mapped=layers
        )
    finally:
        for layer in layers:
            os.close(layer)


def _open_read_only(path: str) -> int:
    """A detached clone of the mount with this folder, read-only and nobody's peer."""
    tree = kernel_mount.open_tree(AT_FDCWD, path, OPEN_TREE_CLONE)
    try:
        kernel_mount.mount_setattr(tree, attr_set=MOUNT_ATTR_RDONLY, propagation=MS_PRIVATE)
    except BaseException:
        os.close(tree)
        raise
    return tree


def overlay_of(mount: Mount) -> Overlay:
    """The layers that the options of a mount of type overlay name."""
    options = dict(Options(mount.options).data)
    lower = (options.get("lowerdir") or "").replace("\\:", "\0").split(":")
    layers = tuple(path.replace("\0", ":") for path in lower if path)
    return Overlay(layers, options.get("upperdir") or "", options.get("workdir") or "", "volatile" in options)


def _give_to_root(rootfs: Overlay, linux: Linux) -> None:
    """The container's root owns what it writes into."""
    uid = findings.host_id(0, linux.uid_mappings)
    gid = findings.host_id(0, linux.gid_mappings)
    for path in (rootfs.upper, rootfs.work):
        if path:
            os.chown(path, uid, gid)


def _user_namespace(
    uids: tuple[IdMap, ...], gids: tuple[IdMap, ...], linux: Linux, descriptors: Descriptors
) -> int:
    """A user namespace with this map: the container's when it is joined and the map is no other, else one made for it."""
    joined = descriptors.numbers.get("namespace:user")
    if joined is not None and (not uids or (uids, gids) == (linux.uid_mappings, linux.gid_mappings)):
        return joined
    name = f"map:{uids}{gids}"
    if name not in descriptors.numbers:
        descriptors.take(name, open_user_namespace(uids, gids))
    return descriptors.numbers[name]


def _map(tree: int, owner: int, what: str, *, recursive: bool) -> None:
    try:
        kernel_mount.idmap(tree, owner, recursive=recursive)
    except KernelError as error:
        note = "the filesystem may not support idmapped mounts" if error.errno == EINVAL else ""
        raise KernelError("idmap", f"'{what}'", error.errno, note) from None


def _open_sources(request: CreateRequest, descriptors: Descriptors, inside: Mapping[int, bool]) -> None:
    """Detached clones of what is bound into the container, made with our rights and in our namespaces, but for those made `inside`."""
    linux = request.spec.linux
    for i, mount in enumerate(request.spec.mounts):
        if not is_tree(mount) or i in inside:
            continue
        if copies_up(mount):
            number = open_copy(mount, descriptors.numbers["root"])
        elif not is_bind(mount):
            number = _open_overlay(overlay_of(mount), linux, descriptors)
        elif mount.source.startswith(OUR_MOUNTS):
            number = _open_clone(mount.source, request, f"mounts[{i}].source")
        else:
            flags = OPEN_TREE_CLONE | (AT_RECURSIVE if "rbind" in mount.options else 0)
            source = os.path.join(request.bundle, mount.source)
            try:
                number = kernel_mount.open_tree(AT_FDCWD, source, flags)
            except KernelError as error:
                raise KernelError("bind", f"'{source}' on '{mount.destination}'", error.errno) from None
        descriptors.take(f"tree:{i}", number)
        if mount.uid_mappings or "idmap" in mount.options or "ridmap" in mount.options:
            uids = mount.uid_mappings or linux.uid_mappings
            gids = mount.gid_mappings or linux.gid_mappings
            owner = _user_namespace(uids, gids, linux, descriptors)
            _map(number, owner, mount.source, recursive="ridmap" in mount.options)


def _open_clone(source: str, request: CreateRequest, path: str) -> int:
    """A clone of a mount that the caller holds without it being attached anywhere (before Linux 6.15: in the holder)."""
    name = source[len(OUR_MOUNTS) :]
    mount = request.mount_fds.get(name)
    if mount is None:
        raise InvalidSpec(path, f"there is no mount called {name!r}")
    try:
        return kernel_mount.open_tree(mount, "", OPEN_TREE_CLONE | AT_RECURSIVE | AT_EMPTY_PATH)
    except KernelError as error:
        if error.errno != EINVAL:
            raise
    if not request.mount_namespace:
        raise Unsupported(f"{source}: this kernel cannot clone a detached mount (Linux 6.15 can)")
    from pyrunc.lifecycle import detached

    return detached.open_clone_of(mount, request.mount_namespace)


def _open_namespaces(linux: Linux, descriptors: Descriptors) -> None:
    """The namespaces that are given by path, each checked to be of its kind."""
    for entry in linux.namespaces:
        if entry.path:
            number = open_namespace(entry.path, KERNEL_NAMES[entry.type])
            descriptors.take(f"namespace:{entry.type}", number)


def _open_cgroup(
    container_id: str,
    linux: Linux,
    annotations: Mapping[str, str],
    choice: CgroupChoice | None,
    descriptors: Descriptors,
    undo: Undo,
    *,
    filter_devices: bool = True,
) -> tuple[Cgroup | None, list[str]]:
    """The container's cgroup with its limits in force before the first process enters: clone puts it in.

    Without device rules all but the default nodes are refused: else CAP_MKNOD would open the host's disks.
    """
    if choice is None:
        return None, []
    from pyrunc.cgroups.naming import place

    resources = linux.resources or {}
    cgroup = place(linux.cgroups_path, container_id, choice.driver)
    cgroup.create(resources, annotations)
    undo.push(f"cgroup {cgroup.path}", cgroup.remove)
    warnings = cgroup.apply(resources, choice.missing_controllers) if resources else []
    if filter_devices:
        _filter_devices(cgroup, resources.get("devices") or ())
    descriptors.take("cgroup", cgroup.open_directory())
    return cgroup, warnings


def _filter_devices(cgroup: Cgroup, rules: Sequence[Mapping[str, Any]]) -> None:
    """Where our root is only a user namespace's, bpf(2) is forbidden, and so is making devices."""
    try:
        cgroup.set_devices(rules)
    except KernelError as error:
        if error.errno != EPERM or not facts.host().in_user_namespace:
            raise


def _open_start_socket(state_dir: str, undo: Undo) -> int:
    """The listening socket on which the container waits for `start`; paths may be longer than an address."""
    folder = os.open(state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listening = _Socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
        try:
            listening.bind(f"/proc/self/fd/{folder}/{START_SOCKET}")
            undo.push("start socket", os.unlink, f"{state_dir}/{START_SOCKET}")
            listening.listen(1)
            return listening.detach()
        except OSError as error:
            listening.close()
            raise KernelError("bind", f"'{state_dir}/{START_SOCKET}'", error.errno or 0) from None
    finally:
        os.close(folder)


def _load_filter(seccomp: Mapping[str, Any] | None, store: str | None) -> LoadFilter | None:
    if not seccomp:
        return None
    from pyrunc.seccomp.compiler import compile as compile_filter

    made = compile_filter(seccomp, store=store)
    return None if made is None else LoadFilter(made.program, made.flags, made.notifies)


class HolderRequest(Value):
    """A pod's pause process.

    `namespaces`: type (`network`, `ipc`, `uts`, `pid`, `user`) -> `new`, an absolute path to join, or `host` or `none` for
    the caller's. The mount namespace is always its own. A new user namespace needs the mappings, and owns the others.
    `mounts`: folder in it -> a detached mount that containers will get clones of; attached only where the kernel needs it.
    """

    id: str
    namespaces: Mapping[str, str]
    hostname: str = ""
    sysctls: Mapping[str, str] = {}
    cgroups_path: str = ""
    cgroup: CgroupChoice | None = CgroupChoice()
    oom_score_adj: int | None = None
    seccomp: Mapping[str, Any] | None = None
    stdio: tuple[int, int, int] | None = None
    uid: int = 65535
    gid: int = 65535
    parts: Mapping[str, Callable[[Born], object]] = {}
    uid_mappings: tuple[IdMap, ...] = ()
    gid_mappings: tuple[IdMap, ...] = ()
    mounts: Mapping[str, int] = _NO_MOUNTS


class Held(Value):
    """The holder. `pidfd` is the caller's now."""

    pid: int
    pidfd: int
    start_time: int
    cgroup: Cgroup | None
    warnings: tuple[str, ...]


def holder(request: HolderRequest) -> Held:
    """Start the pause process that holds a pod's namespaces: an empty read-only root, no capabilities, no new privileges."""
    linux = Linux(
        namespaces=tuple(_holder_namespaces(request.namespaces)),
        sysctl=request.sysctls,
        cgroups_path=request.cgroups_path,
        uid_mappings=request.uid_mappings,
        gid_mappings=request.gid_mappings,
    )
    check_namespaces(linux)
    parts = _parts(linux, None, request.parts)
    with Undo() as undo, Descriptors() as descriptors:
        load_filter = _load_filter(request.seccomp, None)
        _open_namespaces(linux, descriptors)
        if linux.sysctl:
            descriptors.take("proc", kernel_mount.open_mount("proc"))
        descriptors.take("pause", _open_pause())
        places = () if facts.host().clones_detached else tuple(request.mounts)
        for place in places:
            descriptors.take(f"mount:{place}", os.dup(request.mounts[place]))
        cgroup, warnings = _open_cgroup(
            request.id, linux, {}, request.cgroup, descriptors, undo, filter_devices=False
        )
        plan = plans.build_holder(
            linux,
            facts.host(),
            hostname=request.hostname,
            uid=request.uid,
            gid=request.gid,
            load_filter=load_filter,
            oom_score_adj=request.oom_score_adj,
            mounts=places,
            cgroup=cgroup is not None,
            sync=parts,
        )
        stdio = request.stdio
        if stdio is None:
            null = descriptors.take("null", os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
            stdio = (null, null, null)
        born = birth.bear(lower(plan), descriptors.numbers, undo, stdio=stdio, args=("pause",), parts=parts)
        if cgroup is not None:
            cgroup.occupied()
        undo.commit()
    return Held(born.pid, born.pidfd, born.start_time, cgroup, tuple(warnings))


def _holder_namespaces(chosen: Mapping[str, str]) -> list[Namespace]:
    entries = [Namespace("mount")]
    for kind, how in chosen.items():
        if kind not in KERNEL_NAMES or kind == "mount":
            raise InvalidArgument(f"a holder has no {kind} namespace of its own choice")
        if how == "new":
            entries.append(Namespace(kind))
        elif how.startswith("/"):
            entries.append(Namespace(kind, how))
        elif how not in ("host", "none"):
            raise InvalidArgument(f"namespace {kind}: {how!r} is not new, host, none or a path")
    return entries


_pause: int | None = None


def _open_pause() -> int:
    """A copy of the descriptor of the sealed pause program, made once per process like the launcher's."""
    global _pause
    if _pause is None:
        from pyrunc.kernel.fd import open_sealed_executable

        with open(os.path.join(os.path.dirname(LAUNCHER), "pause"), "rb", buffering=0) as file:
            _pause = open_sealed_executable("pyrunc:pause", file.readall() or b"")
    return os.dup(_pause)
