"""One compiler: an errand of a zygote that stays, and makes launches, one at a time. What it makes is carried out by a shim.

A process that has parsed, planned and lowered before does it again in a millisecond or two; a fresh fork needs ten, most of them
page faults. Host paths of mounts are not looked up here: their storage may not answer. The server has opened them.

Request {"id": n, "call": name, …} -> {"id": n, "ok": fields} + descriptors, or {"id": n, "error": …}, as between server and shim.

The calls and their answers are the records of `compiler.messages`.
"""

from __future__ import annotations

import os
import select
import sys
from _socket import socket

from pyrunc import ipc, jsontext
from pyrunc.abi.mount import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID
from pyrunc.cgroups import naming, scope
from pyrunc.cgroups.group import Cgroup
from pyrunc.compile.container import CreateRequest, compile_container
from pyrunc.compile.descriptors import Descriptors
from pyrunc.compile.exec import ExecRequest, compile_exec, merged
from pyrunc.compile.pause import PauseRequest, compile_pause
from pyrunc.compile.sources import Overlay, clone_bind, open_image_volume, open_overlay, open_root
from pyrunc.compiler.files import HolderFile, LaunchFile
from pyrunc.compiler.messages import (
    CompileContainer,
    CompiledContainer,
    CompiledExec,
    CompiledPause,
    CompileExec,
    CompilePause,
    Restore,
)
from pyrunc.container import state as states
from pyrunc.container.state import State, StateFile
from pyrunc.errors import Error, InvalidArgument, KernelError, WrongState
from pyrunc.kernel import bpf, reaper
from pyrunc.kernel.mount import open_mount
from pyrunc.launch.sealed import plain, seal
from pyrunc.parts import Parts
from pyrunc.spec.check import check
from pyrunc.spec.model import IdMap
from pyrunc.spec.parse import parse
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyrunc.compiler.files import Place
    from pyrunc.ipc import Message
    from pyrunc.records import Record
    from pyrunc.spec.model import Spec

    Answer = tuple[Record, list[int]]

CONFIG = "config.json"
SPECS_AT_MOST = 64


def serve(arguments: Message, fds: list[int]) -> int:
    """Answer what comes from the socket `fds[0]` until it closes."""
    reaper.set_name("pyrunc-compile")
    bpf.keep_programs()
    requests = socket(fileno=fds[0])
    while (received := next_request(requests)) is not None:
        request, given = received
        try:
            answer, made = _answer(request, given)
        except Error as error:
            ipc.send(requests, {"id": request.get("id"), "error": error.to_wire()})
        else:
            try:
                ipc.send(requests, {"id": request.get("id"), "ok": answer.to_fields()}, made)
            finally:
                ipc.close_all(made)
        finally:
            ipc.close_all(given)
    _reap_placeholders(
        until=None
    )  # the zygote kills what an errand leaves, and with them scopes of containers to come
    return 0


def next_request(requests: socket) -> tuple[Message, list[int]] | None:
    """Meanwhile the placeholders of scopes whose processes have come are reaped."""
    _reap_placeholders(requests.fileno())
    return ipc.receive(requests)


def _reap_placeholders(until: int | None) -> None:
    """Returns when there is none, or this descriptor is readable."""
    while scope.released:
        watched = list(scope.released) if until is None else [until, *scope.released]
        ready, _, _ = select.select(watched, [], [])
        for pidfd in ready:
            if pidfd != until:
                scope.reap_released(pidfd)
        if until in ready:
            return


def _answer(message: Message, given: Sequence[int]) -> Answer:
    name = message.get("call")
    try:
        if name == CompileContainer.call:
            return _container(CompileContainer.of(message), given)
        if name == CompilePause.call:
            return _pause(CompilePause.of(message))
        if name == CompileExec.call:
            return _exec(CompileExec.of(message))
        raise InvalidArgument(f"a compiler has no call {name!r}")
    except OSError as error:
        raise KernelError("compile", error.filename or "", error.errno or 0, error.strerror or "") from None
    except Error:
        raise
    except Exception as error:
        sys.excepthook(*sys.exc_info())
        raise Error(f"{type(error).__name__}: {error}") from None


def _container(request: CompileContainer, given: Sequence[int]) -> Answer:
    identifier, directory, parts = request.container, request.directory, Parts()
    asked = LaunchFile.read(directory)
    spec = _with_oom_score(_spec(directory))
    if spec.hooks.create_container and spec.root:  # where they find the root, in the container's mounts only
        os.makedirs(os.path.join(directory, spec.root.path), mode=0o700, exist_ok=True)
    if asked.rootfs.volatile:
        _forget_earlier_mount(asked.rootfs.work)
    parts.end("read and parse")
    images = dict(zip(request.images, given, strict=False))
    sources = request.sources or {}
    source_fds = dict(zip(request.opened, given[len(images) :], strict=False))
    if asked.runtime or asked.restore:
        with_root = CreateRequest(
            id=identifier,
            bundle=directory,
            spec=spec,
            rootfs=asked.rootfs,
            images=images,
            sources=sources,
            source_fds=source_fds,
        )
        return _with_places(with_root, asked, parts)
    with Undo() as undo, Descriptors() as descriptors:
        compiled = compile_container(
            CreateRequest(
                id=identifier,
                bundle=directory,
                spec=spec,
                rootfs=asked.rootfs,
                stdio=None,
                nulls=() if asked.tty or asked.stdin else (0,),
                state_dir=directory,
                cgroup=asked.cgroup,
                pinned=("shm",),
                sources=sources,
                source_fds=source_fds,
                timed=request.timed,
                images=images,
                image_volumes={**(asked.image_volumes or {}), **(asked.layer_volumes or {})},
            ),
            descriptors,
            undo,
            parts,
        )
        launch, fds = seal(compiled.launch)
        undo.commit()
    parts.end("seal")
    assert compiled.launch.cgroup is not None
    answer = CompiledContainer(
        state=_first_state(identifier, directory, spec, compiled.launch.cgroup).to_fields(),
        io=asked.io,
        launch=launch,
        poststart=plain(spec.hooks.poststart),
        poststop=bool(spec.hooks.poststop) or _outlives_its_processes(spec),
        warnings=list(compiled.warnings),
        parts=parts.noted,
    )
    return answer, fds


def _outlives_its_processes(spec: Spec) -> bool:
    """Whether resctrl has something of the container alone."""
    if spec.linux.intel_rdt is None:
        return False
    from pyrunc.launch.rdt import outlives

    return outlives(spec.linux.intel_rdt)


def _with_places(request: CreateRequest, asked: LaunchFile, parts: Parts) -> Answer:
    """No launch: the mounts that the shim attaches where the specification says, before it runs the other runtime, or CRIU."""
    identifier, directory, spec, images = request.id, request.bundle, request.spec, request.images
    check(spec)
    cgroup = naming.place(spec.linux.cgroups_path, identifier, asked.cgroup.driver)
    places = [place for place in asked.places if place.pinned is None]
    fds: list[int] = []
    try:
        with Descriptors() as descriptors:
            open_root(request, descriptors)
            fds.append(os.dup(descriptors.numbers["root"]))
            for place in places:
                if place.source:
                    fds.append(_clone_source(place, request))
                elif place.image is not None:
                    fds.append(open_image_volume(place.image, spec.linux, images, descriptors))
                else:
                    fds.append(open_overlay(Overlay(place.lower), spec.linux, descriptors))
    except BaseException:
        ipc.close_all(fds)
        raise
    parts.end("root and mounts")
    restore = None
    if asked.restore is not None:
        wanted = asked.restore
        restore = Restore(wanted.images, wanted.work, wanted.options, asked.cgroup.to_fields())
    answer = CompiledContainer(
        state=_first_state(identifier, directory, spec, cgroup).to_fields(),
        io=asked.io,
        runtime=asked.other_runtime,
        restore=restore,
        poststop=bool(spec.hooks.poststop),
        cgroup=cgroup.record(),
        attached=["rootfs", *(place.place for place in places)],
        pinned={place.place: place.pinned for place in asked.places if place.pinned is not None},
        parts=parts.noted,
    )
    return answer, fds


def _clone_source(place: Place, request: CreateRequest) -> int:
    """A clone of a source on the host. Its place becomes what that is: a folder, or a file. Raises KernelError, OSError,
    InvalidArgument (the source did not come along)."""
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
    """The container's overlay may have been mounted by an earlier launch that was never carried out. A volatile overlay is refused
    a second time, for what was written might be torn (Linux, Documentation/filesystems/overlayfs.rst, "Volatile mount"): here
    nothing was."""
    mark = f"{work}/work/incompat/volatile"
    for path in (f"{mark}/dirty", mark):
        try:
            os.rmdir(path)
        except NotADirectoryError:
            os.unlink(path)
        except FileNotFoundError:
            pass


def _pause(request: CompilePause) -> Answer:
    directory = request.sandbox_dir
    asked, parts = HolderFile.read(directory), Parts()
    pins: dict[str, int] = {}
    try:
        if asked.namespaces.get("ipc") == "new":
            pins["shm"] = _open_shm(asked.shm_size_bytes, asked.shm_owner, asked.mount_label)
            parts.end("/dev/shm")
        with Undo() as undo, Descriptors() as descriptors:
            compiled = compile_pause(
                PauseRequest(
                    id=os.path.basename(directory),
                    namespaces=asked.namespaces,
                    hostname=asked.hostname,
                    sysctls=asked.sysctls or {},
                    cgroups_path=asked.cgroups_path,
                    cgroup=asked.cgroup,
                    oom_score_adj=asked.oom_score_adj,
                    seccomp=asked.seccomp,
                    selinux_label=asked.selinux_label,
                    program_label=asked.program_label,
                    uid_mappings=_id_maps(asked.uid_mappings),
                    gid_mappings=_id_maps(asked.gid_mappings),
                    mounts={f"/{name}": number for name, number in pins.items()},
                    timed=request.timed,
                ),
                descriptors,
                undo,
                parts,
            )
            launch, fds = seal(compiled.launch)
            undo.commit()
        parts.end("seal")
    except BaseException:
        ipc.close_all(list(pins.values()))
        raise
    network = asked.namespaces.get("network")
    answer = CompiledPause(launch, network, list(pins), list(compiled.warnings), parts.noted)
    return answer, [*fds, *pins.values()]


def _exec(request: CompileExec) -> Answer:
    directory, parts = request.directory, Parts()
    spec, state = _with_oom_score(_spec(directory)), StateFile.read(directory)
    if state.pid != request.pid or state.cgroup is None:
        raise WrongState("the container is not running")
    parts.end("read and parse")
    with Descriptors() as descriptors:
        compiled = compile_exec(
            ExecRequest(
                pid=request.pid,
                pidfd=-1,
                spec=spec,
                process=merged(spec, {**request.process, "terminal": request.tty}),
                cgroup=Cgroup.from_record(state.cgroup),
                keyring=state.keyring,
                timed=request.timed,
            ),
            descriptors,
        )
        parts.end("plan and lower")
        launch, fds = seal(compiled.launch)
    parts.end("seal")
    return CompiledExec(launch, warnings=list(compiled.warnings), parts=parts.noted), fds


_specs: dict[str, tuple[tuple[int, ...], Spec]] = {}


def _spec(directory: str) -> Spec:
    """The container's configuration, parsed once as long as the file is the same."""
    path = f"{directory}/{CONFIG}"
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        identity = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        kept = _specs.get(path)
        if kept is not None and kept[0] == identity:
            return kept[1]
        spec = parse(jsontext.loads(file.readall() or b""))
    if len(_specs) >= SPECS_AT_MOST:
        _specs.clear()
    _specs[path] = identity, spec
    return spec


def _with_oom_score(spec: Spec) -> Spec:
    """A process whose configuration has none would inherit the shim's, which is spared: it gets the server's, as ours is."""
    process = spec.process
    if process is None or process.oom_score_adj is not None:
        return spec
    with open("/proc/self/oom_score_adj", "rb", buffering=0) as file:
        own = int(file.readall() or b"0")
    return spec.replace(process=process.replace(oom_score_adj=own))


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
