"""What a shim compiles: containers, when they are created; the pause process and execs, when they
are started.

The files in a container's folder and in its sandbox's (`shim.files`) say what is compiled, so
another shim, in place of one that was killed, makes the same again. Nothing here waits for another
process, but for what `fork_first` is for.
"""

from __future__ import annotations

import os

from pyrunc import ipc, jsontext
from pyrunc.abi.mount import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID
from pyrunc.cgroups import naming
from pyrunc.cgroups.group import Cgroup
from pyrunc.compile.container import CreateRequest, compile_container
from pyrunc.compile.descriptors import Descriptors
from pyrunc.compile.exec import ExecRequest, compile_exec, merged
from pyrunc.compile.pause import PauseRequest, compile_pause
from pyrunc.compile.sources import Overlay, clone_bind, open_image_volume, open_overlay, open_root
from pyrunc.container import state as states
from pyrunc.container.state import State, StateFile
from pyrunc.errors import InvalidArgument, WrongState
from pyrunc.kernel.mount import open_mount
from pyrunc.parts import Parts
from pyrunc.shim import messages
from pyrunc.shim.files import LaunchFile, PauseFile
from pyrunc.spec.check import check
from pyrunc.spec.model import IdMap
from pyrunc.spec.parse import parse
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from pyrunc.ipc import Message
    from pyrunc.launch.model import Launch
    from pyrunc.plan.bind_source import BindSource
    from pyrunc.shim.files import Io, OtherRuntime, Place, RestoreFolders
    from pyrunc.spec.model import Hook, Spec

    Prepared = tuple[Message, list[int]]
    """What a fork has made first: fields and descriptors."""

SPECS_AT_MOST = 16
"""Configurations that are kept parsed: containers whose probes run again and again."""


class Compiled:
    """A launch that is ready to be carried out. Owns its descriptors until `close`. `warnings` are
    lines for the shim's log."""

    __slots__ = ("fds", "launch", "parts", "warnings")

    def __init__(
        self, launch: Launch | None, fds: Sequence[int], warnings: Sequence[str], parts: Parts
    ) -> None:
        self.launch, self.fds, self.warnings = launch, list(fds), warnings
        self.parts = parts

    @property
    def cgroup(self) -> Cgroup | None:
        return self.launch.cgroup if self.launch else None

    def close(self) -> None:
        """Close the descriptors, when the process runs or never will. The cgroup stays."""
        if self.cgroup is not None:
            self.cgroup.occupied()
        ipc.close_all(self.fds)
        self.fds = []


class CompiledContainer(Compiled):
    """A container that is created. `state`: what state.json will hold but for the process. One that
    another OCI runtime runs, or CRIU brings back, has no launch: then `runtime` or `restore` says
    which, `attached` names the places of the mounts in `fds`, `pinned` those of what the pod pins.
    """

    __slots__ = (
        "attached", "group", "io", "pinned", "poststart", "poststop", "restore", "restore_cgroup", "runtime", "state",
    )  # fmt: skip

    def __init__(
        self,
        launch: Launch | None,
        fds: Sequence[int],
        warnings: Sequence[str],
        parts: Parts,
        state: Message,
        io: Io,
    ) -> None:
        super().__init__(launch, fds, warnings, parts)
        self.state, self.io = state, io
        self.group = launch.cgroup if launch else None
        self.runtime: OtherRuntime | None = None
        self.restore: RestoreFolders | None = None
        self.restore_cgroup: Message = {}
        self.attached: Sequence[str] = ()
        self.pinned: Mapping[str, str] = {}
        self.poststart: tuple[Hook, ...] = ()
        self.poststop = False

    @property
    def cgroup(self) -> Cgroup | None:
        return self.group


class CompiledPause(Compiled):
    """The pause process. `pins`: detached mounts that the pod shares, by name; `new_network`: it
    makes the network namespace."""

    __slots__ = ("new_network", "pins")

    def __init__(
        self,
        launch: Launch,
        fds: Sequence[int],
        warnings: Sequence[str],
        parts: Parts,
        pins: dict[str, int],
    ) -> None:
        super().__init__(launch, fds, warnings, parts)
        self.pins, self.new_network = pins, False


def fork_first(
    container_id: str, directory: str, request: messages.CreateContainer, fds: Sequence[int]
) -> Callable[[], Prepared] | None:
    """What a fork of the shim has to do before `container`, as it waits for others: systemd makes
    the cgroup; sources on the host are opened for another runtime and for CRIU. None for nothing.
    Raises Error."""
    file = LaunchFile.read(directory)
    if file.runtime or file.restore:
        return lambda: _open_places(_with_root(container_id, directory, request, fds), file)
    if file.cgroup.driver == "systemd":
        spec = _spec(directory)
        group = naming.place(spec.linux.cgroups_path, container_id, "systemd")
        return lambda: _make_scope(group, spec.linux.resources or {}, spec.annotations)
    return None


def fork_first_for_pause(sandbox_dir: str) -> Callable[[], Prepared] | None:
    """As `fork_first`."""
    file = PauseFile.read(sandbox_dir)
    if file.cgroup.driver != "systemd":
        return None
    group = naming.place(file.cgroups_path, os.path.basename(sandbox_dir), "systemd")
    return lambda: _make_scope(group, {}, {})


def _make_scope(
    group: Cgroup, resources: Mapping[str, Any], annotations: Mapping[str, str]
) -> Prepared:
    """The cgroup, with the process that holds it until the container's is in: that one becomes the
    shim's child."""
    group.create(resources, annotations)
    placeholder = group.release_placeholder()
    return {"cgroup": group.record()}, [] if placeholder is None else [placeholder]


def prepared_group(prepared: Prepared | None) -> Cgroup | None:
    """The cgroup that a fork has made, if it has."""
    if prepared is None or "cgroup" not in prepared[0]:
        return None
    group = Cgroup.from_record(prepared[0]["cgroup"])
    if prepared[1]:
        group.take_placeholder(prepared[1][0])
    return group


def container(
    container_id: str,
    directory: str,
    request: messages.CreateContainer,
    fds: Sequence[int],
    prepared: Prepared | None,
    oom_score_adj: int,
) -> CompiledContainer:
    """Compile the container whose configuration is in `directory`; its cgroup exists from here on.
    `fds`: mounts of images, which stay the caller's; `prepared`: by `fork_first`, whose descriptors
    belong to the result; `oom_score_adj`: of processes whose configuration has none. Raises Error,
    OSError."""
    parts, file = Parts(), LaunchFile.read(directory)
    spec = _with_oom_score(_spec(directory), oom_score_adj)
    # where they find the root, in the container's mounts only
    if spec.hooks.create_container and spec.root:
        os.makedirs(os.path.join(directory, spec.root.path), mode=0o700, exist_ok=True)
    if file.rootfs.volatile:
        _forget_earlier_mount(file.rootfs.work)
    parts.end("read and parse")
    if file.runtime or file.restore:
        assert prepared is not None
        return _with_places(container_id, directory, spec, file, prepared, parts)
    images, sources, source_fds = _outside(request, fds)
    descriptors = Descriptors()
    with Undo() as undo:
        undo.push("descriptors", descriptors.close)
        compiled = compile_container(
            CreateRequest(
                id=container_id,
                bundle=directory,
                spec=spec,
                rootfs=file.rootfs,
                stdio=None,
                nulls=() if file.tty or file.stdin else (0,),
                state_dir=directory,
                cgroup=file.cgroup,
                made_cgroup=prepared_group(prepared),
                pinned=("shm",),
                timed=request.timed,
                images=images,
                sources=sources,
                source_fds=source_fds,
                image_volumes={**(file.image_volumes or {}), **(file.layer_volumes or {})},
            ),
            descriptors,
            undo,
            parts,
        )
        undo.commit()
    launch = compiled.launch
    assert launch.cgroup is not None
    result = CompiledContainer(
        launch,
        _used(launch, descriptors),
        compiled.warnings,
        parts,
        _first_state(container_id, directory, spec, launch.cgroup).to_fields(),
        file.io,
    )
    result.poststart = spec.hooks.poststart
    result.poststop = bool(spec.hooks.poststop) or _outlives_its_processes(spec)
    return result


def _used(launch: Launch, descriptors: Descriptors) -> list[int]:
    """The descriptors that the launch's program uses, and those of its hooks; the others are
    closed."""
    used = []
    for name, number in descriptors.numbers.items():
        if name in launch.lowered.numbers or name.startswith("hook-"):
            used.append(number)
        else:
            os.close(number)
    return used


def _outlives_its_processes(spec: Spec) -> bool:
    """Whether resctrl has something of the container alone."""
    if spec.linux.intel_rdt is None:
        return False
    from pyrunc.launch.rdt import outlives

    return outlives(spec.linux.intel_rdt)


def _outside(
    request: messages.CreateContainer, fds: Sequence[int]
) -> tuple[dict[str, int], Mapping[str, BindSource], dict[str, int]]:
    """What came along: mounts of images, sources of binds, descriptors of some of these."""
    images = dict(zip(request.images, fds, strict=False))
    return (
        images,
        request.sources or {},
        dict(zip(request.opened, fds[len(images) :], strict=False)),
    )


def _with_root(
    container_id: str, directory: str, request: messages.CreateContainer, fds: Sequence[int]
) -> CreateRequest:
    """Of a container without a launch, for what its mounts are opened from."""
    images, sources, source_fds = _outside(request, fds)
    return CreateRequest(
        id=container_id,
        bundle=directory,
        spec=_spec(directory),
        rootfs=LaunchFile.read(directory).rootfs,
        images=images,
        sources=sources,
        source_fds=source_fds,
    )


def _open_places(request: CreateRequest, file: LaunchFile) -> Prepared:
    """The mounts that are attached where the specification says, before another runtime or CRIU is
    run."""
    check(request.spec)
    linux = request.spec.linux
    opened: list[int] = []
    attached = ["rootfs"]
    try:
        with Descriptors() as descriptors:
            open_root(request, descriptors)
            opened.append(os.dup(descriptors.numbers["root"]))
            for place in file.places:
                if place.pinned is not None:
                    continue
                if place.source:
                    opened.append(_clone_source(place, request))
                elif place.image is not None:
                    opened.append(
                        open_image_volume(place.image, linux, request.images, descriptors)
                    )
                else:
                    opened.append(open_overlay(Overlay(place.lower), linux, descriptors))
                attached.append(place.place)
    except BaseException:
        ipc.close_all(opened)
        raise
    return {"attached": attached}, opened


def _with_places(
    container_id: str,
    directory: str,
    spec: Spec,
    file: LaunchFile,
    prepared: Prepared,
    parts: Parts,
) -> CompiledContainer:
    """A container without a launch: another runtime's, or one that CRIU brings back."""
    fields, fds = prepared
    group = naming.place(spec.linux.cgroups_path, container_id, file.cgroup.driver)
    state = _first_state(container_id, directory, spec, group).to_fields()
    result = CompiledContainer(None, fds, (), parts, state, file.io)
    result.runtime, result.restore = file.other_runtime, file.restore
    result.restore_cgroup = file.cgroup.to_fields()
    result.poststop = bool(spec.hooks.poststop)
    result.group = group
    result.attached = fields["attached"]
    result.pinned = {place.place: place.pinned for place in file.places if place.pinned is not None}
    return result


def _clone_source(place: Place, request: CreateRequest) -> int:
    """A clone of a source on the host. Its place becomes what that is: a folder, or a file. Raises
    KernelError, OSError, InvalidArgument (the source did not come along)."""
    path = f"{request.bundle}/{place.place}"
    source, number = request.sources.get(place.source), request.source_fds.get(place.source)
    if source is None or number is None:
        raise InvalidArgument(f"no descriptor of {place.source} came along")
    if source.is_directory:
        os.makedirs(path, mode=0o700, exist_ok=True)
    else:
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    mount = next(mount for mount in request.spec.mounts if mount.source == path)
    return clone_bind(mount.replace(source=place.source), number)


def _forget_earlier_mount(work: str) -> None:
    """The container's overlay may have been mounted by an earlier launch that was never carried
    out. A volatile overlay is refused a second time, for what was written might be torn (Linux,
    Documentation/filesystems/overlayfs.rst, "Volatile mount"): here nothing was."""
    mark = f"{work}/work/incompat/volatile"
    for path in (f"{mark}/dirty", mark):
        try:
            os.rmdir(path)
        except NotADirectoryError:
            os.unlink(path)
        except FileNotFoundError:
            pass


def pause(sandbox_dir: str, prepared: Prepared | None, *, timed: bool = False) -> CompiledPause:
    """Compile the pod's pause process, which pause.json describes; its cgroup exists from here on.
    Raises Error, OSError."""
    file, parts = PauseFile.read(sandbox_dir), Parts()
    pins: dict[str, int] = {}
    descriptors = Descriptors()
    with Undo() as undo:
        undo.push("descriptors", descriptors.close)
        if file.namespaces.get("ipc") == "new":
            pins["shm"] = _open_shm(file.shm_size_bytes, file.shm_owner, file.mount_label)
            undo.push("pinned mounts", os.close, pins["shm"])
            parts.end("/dev/shm")
        compiled = compile_pause(
            PauseRequest(
                id=os.path.basename(sandbox_dir),
                namespaces=file.namespaces,
                hostname=file.hostname,
                sysctls=file.sysctls or {},
                cgroups_path=file.cgroups_path,
                cgroup=file.cgroup,
                made_cgroup=prepared_group(prepared),
                oom_score_adj=file.oom_score_adj,
                seccomp=file.seccomp,
                selinux_label=file.selinux_label,
                program_label=file.program_label,
                uid_mappings=_id_maps(file.uid_mappings),
                gid_mappings=_id_maps(file.gid_mappings),
                mounts={f"/{name}": number for name, number in pins.items()},
                timed=timed,
            ),
            descriptors,
            undo,
            parts,
        )
        undo.commit()
    launch = compiled.launch
    result = CompiledPause(launch, _used(launch, descriptors), compiled.warnings, parts, pins)
    result.new_network = file.namespaces.get("network") == "new"
    return result


def execute(
    directory: str,
    pid: int,
    process: Message,
    pidfd: int,
    oom_score_adj: int,
    *,
    tty: bool,
    timed: bool = False,
) -> Compiled:
    """Compile the OCI process object `process` for the container in `directory` whose first process
    is `pid`, which `pidfd` stands for. Raises Error, OSError."""
    parts = Parts()
    spec, state = _with_oom_score(_spec(directory), oom_score_adj), StateFile.read(directory)
    if state.pid != pid or state.cgroup is None:
        raise WrongState("the container is not running")
    parts.end("read and parse")
    descriptors = Descriptors()
    with Undo() as undo:
        undo.push("descriptors", descriptors.close)
        compiled = compile_exec(
            ExecRequest(
                pid=pid,
                pidfd=pidfd,
                spec=spec,
                process=merged(spec, {**process, "terminal": tty}),
                cgroup=Cgroup.from_record(state.cgroup),
                keyring=state.keyring,
                timed=timed,
            ),
            descriptors,
        )
        undo.commit()
    parts.end("plan and lower")
    return Compiled(compiled.launch, _used(compiled.launch, descriptors), compiled.warnings, parts)


_specs: dict[str, tuple[tuple[int, ...], Spec]] = {}


def _spec(directory: str) -> Spec:
    """The container's configuration, parsed once as long as the file is the same."""
    path = f"{directory}/{messages.CONFIG}"
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        identity = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        cached = _specs.get(path)
        if cached is not None and cached[0] == identity:
            return cached[1]
        spec = parse(jsontext.loads(file.readall() or b""))
    if len(_specs) >= SPECS_AT_MOST:
        _specs.clear()
    _specs[path] = identity, spec
    return spec


def _with_oom_score(spec: Spec, score: int) -> Spec:
    """The configuration with the server's OOM score where it has none: a process would inherit the
    shim's, which the OOM killer spares."""
    process = spec.process
    if process is None or process.oom_score_adj is not None:
        return spec
    return spec.replace(process=process.replace(oom_score_adj=score))


def _first_state(identifier: str, directory: str, spec: Spec, cgroup: Cgroup) -> StateFile:
    pids = spec.linux.namespace("pid")
    return State(
        directory,
        identifier,
        bundle=directory,
        oci_version=spec.version,
        annotations=dict(spec.annotations),
        created=states.now(),
        private_pids=pids is not None and not pids.path,
        keyring=f"_ses.{identifier}",
        cgroup=cgroup.record(),
    ).record()


def _open_shm(size_bytes: int, owner: Sequence[int], label: str) -> int:
    uid, gid = owner
    options = [("mode", "1777"), ("size", str(size_bytes)), ("uid", str(uid)), ("gid", str(gid))]
    if label:
        options.append(("context", label))
    attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC
    return open_mount("tmpfs", options, attributes=attributes, source="shm")


def _id_maps(entries: Sequence[Mapping[str, int]]) -> tuple[IdMap, ...]:
    """OCI's `{containerID, hostID, size}` objects."""
    return tuple(IdMap(entry["containerID"], entry["hostID"], entry["size"]) for entry in entries)
