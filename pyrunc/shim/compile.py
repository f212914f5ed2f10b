"""Compiles launches in the shim: for a container when it is created, for a pause process or an exec
when it is started.

The input is read from files in the container's or the sandbox's folder (`shim.files`). So if the
shim is killed, another shim can compile the container or the pause process again. Only the
functions that `fork_first` returns wait for other processes.
"""

from __future__ import annotations

import os

from pyrunc import jsontext
from pyrunc.abi.mount import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID
from pyrunc.cgroups import naming
from pyrunc.cgroups.group import Cgroup
from pyrunc.compile import rootfs_probe
from pyrunc.compile.container import CreateRequest, compile_container
from pyrunc.compile.descriptors import NamedDescriptors
from pyrunc.compile.exec import ExecPrograms, ExecRequest, compile_exec, merged
from pyrunc.compile.pause import compile_pause
from pyrunc.compile.requests import Overlay, PauseRequest, keyring_name
from pyrunc.compile.sources import clone_bind, open_image_volume, open_overlay, open_root
from pyrunc.container.state import State
from pyrunc.errors import InvalidArgument
from pyrunc.kernel.fd import close_all
from pyrunc.kernel.mount import open_mount
from pyrunc.launch import rdt
from pyrunc.shim import messages
from pyrunc.shim.files import LaunchFile
from pyrunc.spec.check import check
from pyrunc.spec.parse import parse
from pyrunc.timings import Timings
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from pyrunc.ipc import Message
    from pyrunc.launch.model import Launch
    from pyrunc.shim.files import PreparedMount
    from pyrunc.shim.session import SupervisedContainer
    from pyrunc.spec.model import Hook, Spec

    Prepared = tuple[Message, list[int]]
    """The result of the function that `fork_first` returns: fields and descriptors."""

# A full node has 110 pods and at least two shims. A configuration takes 19 KiB, and spares an exec
# 0.4 ms.
CONFIGURATIONS_AT_MOST = 64
"""How many parsed configurations are cached, for containers with exec probes."""


class CompiledProcess:
    """A launch that is ready to be carried out. Owns its descriptors until `close`. `warnings`:
    lines for the shim's log."""

    def __init__(
        self, launch: Launch | None, fds: Sequence[int], warnings: Sequence[str], parts: Timings
    ) -> None:
        self.launch, self.fds, self.warnings = launch, list(fds), warnings
        self.parts = parts

    @property
    def cgroup(self) -> Cgroup | None:
        return self.launch.cgroup if self.launch else None

    def close(self) -> None:
        """Close the descriptors, and end the placeholder process of a systemd scope. Called when
        the launch is done or is given up. The cgroup stays."""
        try:
            if self.cgroup is not None:
                self.cgroup.occupied()
        finally:
            close_all(self.fds)
            self.fds = []

    def leave_to_fork(self) -> None:
        """Close the shim's copies of the descriptors, after it has forked a process that carries
        out the launch. That process also ends the placeholder process of a systemd scope."""
        if self.cgroup is not None:
            write_end = self.cgroup.release_placeholder()
            if write_end is not None:
                self.fds.append(write_end)
        close_all(self.fds)
        self.fds = []


class CompiledContainer(CompiledProcess):
    """A compiled container, which can be started.

    - `state`: the content of its state.json, still without the process
    - `group`: its cgroup
    - `poststart`: its poststart hooks
    - `poststop`: it has poststop hooks or resctrl groups, so `Starter.after_stop` must run

    A container that another OCI runtime starts or CRIU restores has no launch. Instead, the shim
    attaches its mounts:

    - `attached`: the mount points for `fds`, in the same order
    - `pinned`: mount point -> name of a mount that the shim holds for the pod
      (`CompiledPause.pins`)
    """

    state: State
    file: LaunchFile
    group: Cgroup
    poststart: tuple[Hook, ...] = ()
    poststop: bool = False
    attached: Sequence[str] = ()
    pinned: Mapping[str, str] = {}

    @property
    def cgroup(self) -> Cgroup:
        return self.group


class CompiledPause(CompiledProcess):
    """A compiled pause process.

    - `pins`: name -> detached mount for the pod's containers
    - `new_network`: the clone call that makes the process also makes the pod's network namespace
    """

    pins: dict[str, int]
    new_network: bool = False


class ContainerCompiler:
    """Compiles a container from its request, and from config.json and launch.json in `directory`.
    Both files are read once. `fds`: the descriptors of the request's images and opened sources; the
    caller closes them."""

    def __init__(
        self, directory: str, request: messages.CreateContainer, fds: Sequence[int], oom_score: int
    ) -> None:
        """Read config.json and launch.json. `oom_score`: oom_score_adj of a process whose
        configuration sets none. Raises Error, OSError."""
        self._id, self._directory = request.container, directory
        self._request, self._fds = request, fds
        self._parts = Timings()
        self._file = LaunchFile.read(directory)
        self._spec = _configuration(directory, oom_score).spec
        self._parts.end("read and parse")

    def fork_first(self) -> Callable[[], Prepared] | None:
        """Return a function that must run before `compile`; None when there is nothing to do. The
        function waits for other processes, so a fork of the shim runs it.

        With the systemd driver it makes the cgroup. For a container that another runtime starts or
        CRIU restores, it opens the container's root and mounts.
        """
        if self._file.runtime or self._file.restore:
            return self._open_places
        if self._file.cgroup.driver == "systemd":
            linux = self._spec.linux
            group = naming.place(linux.cgroups_path, self._id, "systemd")
            return lambda: _make_scope(group, linux.resources or {}, self._spec.annotations)
        return None

    def compile(self, prepared: Prepared | None) -> CompiledContainer:
        """Compile the container. Afterwards its cgroup exists, unless another runtime or CRIU makes
        it later. Raises Error, OSError.

        `prepared`: the result of `fork_first`. Its descriptors belong to the compiled container.
        """
        file, spec, parts = self._file, self._spec, self._parts
        # createContainer hooks find the root there, in the container's mount namespace only
        if spec.hooks.create_container and spec.root:
            os.makedirs(os.path.join(self._directory, spec.root.path), mode=0o700, exist_ok=True)
        if file.rootfs.volatile:
            _forget_earlier_mount(file.rootfs.work)
        if file.runtime or file.restore:
            assert prepared is not None
            return self._with_places(prepared)
        descriptors = NamedDescriptors()
        with Undo() as undo:
            undo.push("descriptors", descriptors.close)
            request = self._create_request(spec).replace(existing_cgroup=prepared_group(prepared))
            compiled = compile_container(request, descriptors, undo, parts)
            undo.commit()
        launch = compiled.launch
        assert launch.cgroup is not None
        fds = _used(launch, descriptors)
        result = CompiledContainer(launch, fds, compiled.warnings, parts)
        self._complete(result, spec, launch.cgroup)
        result.poststart = spec.hooks.poststart
        if spec.linux.intel_rdt is not None and rdt.outlives(spec.linux.intel_rdt):
            result.poststop = True  # a resctrl group stays when its processes have ended
        return result

    def _complete(self, result: CompiledContainer, spec: Spec, group: Cgroup) -> None:
        result.file, result.group = self._file, group
        state = State.of_spec(self._id, self._directory, self._directory, spec)
        keyring = keyring_name(self._id)
        result.state = state.replace(keyring=keyring, cgroup=group.record(), complete=True)
        result.poststop = bool(spec.hooks.poststop)

    def _create_request(self, spec: Spec) -> CreateRequest:
        file, request = self._file, self._request
        images = len(request.images)
        return CreateRequest(
            id=self._id,
            bundle=self._directory,
            spec=spec,
            rootfs=file.rootfs,
            stdio=None,
            # The launch replaces null devices by a private one. Through the host's /dev/null as
            # stdin, the container's root could change the mode and owner of this device for the
            # whole node (fchmod(2), fchown(2)).
            nulls=() if file.tty or file.stdin else (0,),
            state_dir=self._directory,
            cgroup=file.cgroup,
            pinned=("shm",),
            timed=request.timed,
            images=dict(zip(request.images, self._fds, strict=False)),
            sources=request.sources or {},
            source_fds=dict(zip(request.opened, self._fds[images:], strict=False)),
            image_volumes={**(file.image_volumes or {}), **(file.layer_volumes or {})},
        )

    def _open_places(self) -> Prepared:
        """Open the root and the mounts that the shim attaches before another runtime or CRIU runs.
        Returns their mount points and descriptors. The mounts that the shim holds for the pod are
        left out."""
        request = self._create_request(self._spec)
        check(request.spec)
        opened: list[int] = []
        attached = ["rootfs"]
        try:
            with NamedDescriptors() as descriptors:
                open_root(request, descriptors)
                opened.append(os.dup(descriptors.numbers["root"]))
                for place in self._file.places:
                    if place.pinned is None:
                        opened.append(_open_place(place, request, descriptors))
                        attached.append(place.place)
        except BaseException:
            close_all(opened)
            raise
        return {"attached": attached}, opened

    def _with_places(self, prepared: Prepared) -> CompiledContainer:
        """Return the compiled form of a container that another runtime starts or CRIU restores.
        Instead of a launch it has mounts, which the shim attaches. `prepared`: the result of
        `_open_places`."""
        fields, fds = prepared
        file, spec = self._file, self._spec
        group = naming.place(spec.linux.cgroups_path, self._id, file.cgroup.driver)
        result = CompiledContainer(None, fds, (), self._parts)
        self._complete(result, spec, group)
        result.attached = fields["attached"]
        result.pinned = {
            place.place: place.pinned for place in file.places if place.pinned is not None
        }
        return result


class PauseCompiler:
    """Compiles a pod's pause process from pause.json in `sandbox_dir`. The file is read once."""

    def __init__(self, sandbox_dir: str, *, timed: bool = False) -> None:
        """Read pause.json. Raises Error, OSError."""
        self._id, self._timed = os.path.basename(sandbox_dir), timed
        self._parts = Timings()
        self._request = PauseRequest.read(sandbox_dir)

    def fork_first(self) -> Callable[[], Prepared] | None:
        """Return a function that a fork of the shim must run before `compile`. It makes the cgroup
        with the systemd driver. None with cgroupfs."""
        if self._request.cgroup.driver != "systemd":
            return None
        group = naming.place(self._request.cgroups_path, self._id, "systemd")
        return lambda: _make_scope(group, {}, {})

    def compile(self, prepared: Prepared | None) -> CompiledPause:
        """Compile the pause process. Afterwards its cgroup exists. `prepared`: the result of
        `fork_first`. Raises Error, OSError."""
        request, parts = self._request, self._parts
        pins: dict[str, int] = {}
        descriptors = NamedDescriptors()
        with Undo() as undo:
            undo.push("descriptors", descriptors.close)
            if request.namespaces.get("ipc") == "new":
                pins["shm"] = _open_shm(
                    request.shm_size_bytes, request.shm_owner, request.mount_label
                )
                undo.push("pinned mounts", os.close, pins["shm"])
                parts.end("/dev/shm")
            compiled = compile_pause(
                self._id,
                request,
                descriptors,
                undo,
                parts,
                mounts={f"/{name}": number for name, number in pins.items()},
                existing_cgroup=prepared_group(prepared),
                timed=self._timed,
            )
            undo.commit()
        launch = compiled.launch
        result = CompiledPause(launch, _used(launch, descriptors), compiled.warnings, parts)
        result.pins = pins
        result.new_network = request.namespaces.get("network") == "new"
        return result


def _make_scope(
    group: Cgroup, resources: Mapping[str, Any], annotations: Mapping[str, str]
) -> Prepared:
    """Let systemd make the cgroup (scope) of a pod or container. Returns the result of
    `Cgroup.record` and, if there is one, the descriptor that keeps the scope's placeholder process
    alive.

    A new scope needs a process: the placeholder, a child of the shim, stays until the container's
    first process is in the cgroup.
    """
    group.create(resources, annotations)
    placeholder = group.release_placeholder()
    return {"cgroup": group.record()}, [] if placeholder is None else [placeholder]


def prepared_group(prepared: Prepared | None) -> Cgroup | None:
    """Return the cgroup that a fork has made (`prepared`: the fork's result); None if it has made
    none. The returned object owns the descriptor of the systemd scope's placeholder process."""
    if prepared is None or "cgroup" not in prepared[0]:
        return None
    group = Cgroup.from_record(prepared[0]["cgroup"])
    if prepared[1]:
        group.take_placeholder(prepared[1][0])
    return group


def _used(launch: Launch, descriptors: NamedDescriptors) -> list[int]:
    """Return the descriptors that the launch's compiled program and hooks use; close the others."""
    used = []
    for name, number in descriptors.numbers.items():
        if name in launch.lowered.numbers or name.startswith("hook-"):
            used.append(number)
        else:
            os.close(number)
    return used


def _open_place(place: PreparedMount, request: CreateRequest, descriptors: NamedDescriptors) -> int:
    """Open the mount that the shim will attach at the path `place.place`; return its descriptor.
    Raises KernelError, OSError, InvalidArgument."""
    if place.source:
        return _clone_source(place, request)
    linux = request.spec.linux
    if place.image is not None:
        return open_image_volume(place.image, linux, request.images, descriptors)
    return open_overlay(Overlay(place.lower), linux, descriptors)


def _clone_source(place: PreparedMount, request: CreateRequest) -> int:
    """Return a detached clone of the mount of `place.source`, a file or folder of the host. Make
    the mount point `place.place`, a file or folder like the source.

    Raises KernelError, OSError, InvalidArgument (the request has no descriptor of the source).
    """
    path = f"{request.bundle}/{place.place}"
    source, number = request.sources.get(place.source), request.source_fds.get(place.source)
    if source is None or number is None:
        raise InvalidArgument(f"the request has no descriptor of {place.source}")
    if source.is_directory:
        os.makedirs(path, mode=0o700, exist_ok=True)
    else:
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    mount = next(mount for mount in request.spec.mounts if mount.source == path)
    return clone_bind(mount.replace(source=place.source), number)


def _forget_earlier_mount(work: str) -> None:
    """Remove the folder `work/incompat/volatile`, which an earlier mount of the volatile overlay
    has left in its folder `work`.

    While it exists, the kernel refuses a second mount, because writes of the first may be
    incomplete (Linux, Documentation/filesystems/overlayfs.rst, "Volatile mount"). Here the first
    mount had no writes, because its launch was never carried out.
    """
    mark = f"{work}/work/incompat/volatile"
    for path in (f"{mark}/dirty", mark):
        try:
            os.rmdir(path)
        except NotADirectoryError:
            os.unlink(path)
        except FileNotFoundError:
            pass


def compile_exec_request(
    container: SupervisedContainer,
    request: messages.StartExec,
    pidfd: int,
    stdio: tuple[int, int, int],
    oom_score_adj: int,
) -> CompiledProcess:
    """Compile the launch of an exec in the running `container`. Raises Error, OSError.

    - `pidfd`: a pidfd of the container's first process
    - `stdio`: the exec's streams, which the caller closes
    - `oom_score_adj`: the value if the request's process object sets none
    """
    parts = Timings()
    configuration = _configuration(container.directory, oom_score_adj)
    spec = configuration.spec
    parts.end("read and parse")
    descriptors = NamedDescriptors()
    with Undo() as undo:
        undo.push("descriptors", descriptors.close)
        compiled = compile_exec(
            ExecRequest(
                pid=container.pid,
                pidfd=pidfd,
                spec=spec,
                process=merged(spec, {**request.process, "terminal": request.tty}),
                stdio=stdio,
                cgroup=container.group,
                keyring=keyring_name(container.id),
                timed=request.timed,
                programs=configuration.programs,
            ),
            descriptors,
        )
        undo.commit()
    parts.end("plan and lower")
    return CompiledProcess(
        compiled.launch, _used(compiled.launch, descriptors), compiled.warnings, parts
    )


def looks_up_home(
    container: SupervisedContainer, request: messages.StartExec, oom_score_adj: int
) -> bool:
    """Return whether the start of the exec looks up HOME in the container's /etc/passwd, because
    the process's environment has none. The lookup may block if the file's storage does not
    answer. Raises Error, OSError."""
    env = request.process.get("env")
    if env is None:
        process = _configuration(container.directory, oom_score_adj).spec.process
        env = process.env if process is not None else ()
    return not rootfs_probe.has_home(env)


class _Configuration:
    """A container's parsed config.json, and a cache of the compiled programs of its execs.
    `identity`: inode, size, mtime and ctime of config.json."""

    __slots__ = ("identity", "programs", "spec")

    def __init__(self, identity: tuple[int, ...], spec: Spec) -> None:
        self.identity, self.spec = identity, spec
        self.programs = ExecPrograms()


_configurations: dict[str, _Configuration] = {}


def _configuration(directory: str, oom_score: int) -> _Configuration:
    """Return the container's configuration, from a cache unless the file has changed. If the
    configuration has no OOM score, it gets `oom_score`."""
    path = f"{directory}/{messages.CONFIG}"
    cached = _configurations.pop(path, None)
    if cached is None or cached.identity != _identity(os.stat(path)):
        with open(path, "rb", buffering=0) as file:
            identity = _identity(os.fstat(file.fileno()))
            spec = parse(jsontext.loads(file.readall() or b""))
        cached = _Configuration(identity, _with_oom_score(spec, oom_score))
    while len(_configurations) >= CONFIGURATIONS_AT_MOST:
        del _configurations[next(iter(_configurations))]
    # Insert at the end: the first entry is then the one that was used the longest time ago.
    _configurations[path] = cached
    return cached


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Return attributes of a file. If its content changes, at least one of them changes."""
    # The inode's number alone is not enough: a filesystem may give it to a later file.
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def forget(directory: str) -> None:
    """Remove the container's configuration and compiled programs from the cache."""
    _configurations.pop(f"{directory}/{messages.CONFIG}", None)


def _with_oom_score(spec: Spec, score: int) -> Spec:
    """Return the configuration, with the OOM score `score` if it has none. Without a score the
    process would inherit the shim's score, which protects from the OOM killer."""
    process = spec.process
    if process is None or process.oom_score_adj is not None:
        return spec
    # runtime-spec, `oomScoreAdj`: without it a runtime does not change the inherited value.
    return spec.replace(process=process.replace(oom_score_adj=score))


def _open_shm(size_bytes: int, owner: Sequence[int], label: str) -> int:
    uid, gid = owner
    options = [("mode", "1777"), ("size", str(size_bytes)), ("uid", str(uid)), ("gid", str(gid))]
    if label:
        options.append(("context", label))
    attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC
    return open_mount("tmpfs", options, attributes=attributes, source="shm")
