"""`restore`: starts a container from CRIU's images, under an id of the caller's choice.

CRIU creates namespaces, mounts and processes. This module makes what CRIU needs for that: the
cgroup, mount points, standard streams, and a mount of the root in a private mount namespace of the
runtime. As after `create`, the container's init is a child of the caller.
"""

from __future__ import annotations

import os

from pyrunc.abi.clone import CLONE_NEWNS
from pyrunc.abi.mount import MS_BIND, MS_REC, MS_SLAVE
from pyrunc.checkpoint import checkpoint as dumps
from pyrunc.checkpoint import criu, criu_images
from pyrunc.compile.descriptors import NamedDescriptors
from pyrunc.compile.rootfs_probe import cgroup_owner
from pyrunc.container import status
from pyrunc.container.process import ContainerProcess
from pyrunc.errors import InvalidSpec, PeerError, Unsupported
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel.credential import is_machine_root
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.namespace import open_namespace, unshare
from pyrunc.kernel.path import components, open_beneath
from pyrunc.launch.run import ChildProcess
from pyrunc.spec.model import KERNEL_NAMES
from pyrunc.spec.value import Value
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.checkpoint.checkpoint import CriuOptions
    from pyrunc.checkpoint.criu import FieldList
    from pyrunc.container.bundle import Bundle, CreateOptions
    from pyrunc.container.state import State
    from pyrunc.spec.model import Spec

LOG = "restore.log"
FIRST_FREE = 4  # of CRIU's descriptors, after stdio and its socket


class Labels(Value):
    """Labels that replace those in the images. `profile`: an AppArmor profile or the SELinux label
    of the processes; `mount_context`: the SELinux context of mounts."""

    profile: str = ""
    mount_context: str = ""

    def fields(self) -> FieldList:
        """Return the labels as fields of CRIU's request."""
        labels: FieldList = [
            (criu.LSM_PROFILE, self.profile),
            (criu.LSM_MOUNT_CONTEXT, self.mount_context),
        ]
        return [(number, value) for number, value in labels if value]


def restore(
    state: State,
    bundle: Bundle,
    create_options: CreateOptions,
    choices: CriuOptions,
    labels: Labels,
    stdio: tuple[int, int, int] = (0, 1, 2),
) -> ContainerProcess:
    """Restore a container's processes from CRIU's images. The caller has made the state's folder
    and holds its lock. A failure leaves no processes.

    Raises Unsupported (rootless, or a cgroup namespace with a path), NotFound (no criu, no images),
    InvalidArgument (malformed images), InvalidSpec, KernelError, PeerError with the errors in
    CRIU's log.
    """
    if not is_machine_root():
        raise Unsupported("restore needs root in the initial user namespace")
    work_path = choices.work_path or state.folder
    streams = _check_images(choices, work_path)
    with Undo() as undo, NamedDescriptors() as descriptors:
        # Before folders are opened: CRIU mounts in them, so they must be in its mount namespace.
        _mount_root(state.rootfs)
        descriptors.take("images", dumps.open_folder(choices.image_path, make=False))
        descriptors.take("work", dumps.open_folder(work_path))
        _open_namespaces(bundle.spec, descriptors)
        # CRIU makes no mount points, and an unpacked image need not have them.
        binds = _make_mount_points(bundle.spec, state.bundle, state.rootfs)
        group = _open_group(state, bundle.spec, create_options, undo)
        notifications = _Notifications(state, bundle.spec, create_options, group, undo)
        try:
            # CRIU restores no_new_privs from its images only since version 3.19.
            forbids = bundle.spec.process is not None and bundle.spec.process.no_new_privileges
            with criu.Criu(
                _inherited_numbers(descriptors), stdio, no_new_privileges=forbids
            ) as session:
                if group is not None:
                    # CRIU forks the processes, so they begin in its group: no list of pids has to
                    # be moved.
                    group.attach(session.pid)
                options = _criu_options(
                    state, bundle.spec, choices, streams, binds, descriptors, session.pid
                )
                session.request(criu.RESTORE, [*options, *labels.fields()], notifications)
        except PeerError as error:
            raise PeerError(f"{error.message}: {criu.errors_of(work_path, LOG)}") from None
        process = notifications.process
        if process is None:
            raise PeerError("criu did not report the restored process")
        if group is not None:
            group.occupied()
        undo.commit()
    return ContainerProcess.of(process, tuple(notifications.warnings), group)


class _Notifications:
    """Handles CRIU's notifications during a restore."""

    __slots__ = (
        "_create_options",
        "_group",
        "_spec",
        "_state",
        "_undo",
        "console_fd",
        "process",
        "warnings",
    )

    def __init__(
        self,
        state: State,
        spec: Spec,
        create_options: CreateOptions,
        group: Cgroup | None,
        undo: Undo,
    ) -> None:
        self._state = state
        self._spec = spec
        self._create_options = create_options
        self._group = group
        self._undo = undo
        self.process: ChildProcess | None = None
        self.console_fd: int | None = None
        self.warnings: list[str] = []

    def __call__(self, script: str, pid: int, fds: tuple[int, ...]) -> None:
        if script == "setup-namespaces":
            self._run_hooks(pid)
        elif script == "orphan-pts-master" and fds:
            # Copied, because the descriptors of a notification are closed after it.
            self.console_fd = os.dup(fds[0])
        elif script == "post-restore":
            self._take_over(pid)

    def _run_hooks(self, pid: int) -> None:
        hooks = self._spec.hooks
        # As runc does: engines set up the network of a new namespace in these hooks.
        if hooks.prestart or hooks.create_runtime:
            from pyrunc.launch import hooks as programs

            oci_state = status.oci_state(self._state, status.CREATING, pid)
            programs.run(hooks.prestart, "prestart", oci_state)
            programs.run(hooks.create_runtime, "createRuntime", oci_state)

    def _take_over(self, pid: int) -> None:
        """Record the restored process in the container's state, so that `delete` finds it, and
        write the limits to the container's cgroup. The process is still frozen."""
        self.process = process = ChildProcess(pid)
        process.console_fd = self.console_fd
        self._undo.push(f"process {pid}", process.kill)
        self._state.save(pid=process.pid, start_time=process.start_time)
        if self._group is not None:
            resources = self._spec.linux.resources or {}
            self.warnings += self._group.apply(resources, self._create_options.missing_controllers)
            self._group.set_devices(resources.get("devices") or ())
            if (owner := cgroup_owner(self._spec)) is not None:
                self._group.give_to(owner)


def _open_group(
    state: State, spec: Spec, create_options: CreateOptions, undo: Undo
) -> Cgroup | None:
    if not create_options.with_cgroup:
        return None
    from pyrunc.cgroups.naming import place

    group = place(spec.linux.cgroups_path, state.id, create_options.driver)
    group.create(spec.linux.resources or {}, spec.annotations)
    undo.push(f"cgroup {group.path}", group.remove)
    return group


def _open_namespaces(spec: Spec, descriptors: NamedDescriptors) -> None:
    """Open the network and pid namespaces that have a path, because CRIU takes these as
    descriptors. CRIU opens the other namespaces by path."""
    for kind in ("network", "pid"):
        entry = spec.linux.namespace(kind)
        if entry is not None and entry.path:
            descriptors.take(kind, open_namespace(entry.path, KERNEL_NAMES[kind]))


def _mount_root(rootfs: str) -> None:
    """Move this process to a private mount namespace and bind-mount the root on itself there,
    because CRIU requires the root to be a mount. Raises InvalidSpec, KernelError."""
    if not os.path.isdir(rootfs):
        raise InvalidSpec("root.path", f"{rootfs} is not a directory")
    # In a namespace of ours, so that the bind below appears nowhere on the host and ends with us.
    unshare(CLONE_NEWNS)
    # A slave, not private: mounts of the host that come later, such as volumes, still arrive.
    kernel_mount.mount(None, "/", None, MS_REC | MS_SLAVE)
    kernel_mount.mount(rootfs, rootfs, None, MS_BIND | MS_REC)


def _make_mount_points(spec: Spec, bundle: str, rootfs: str) -> list[tuple[str, str]]:
    """Create the mount points that CRIU needs in the root: folders and files. Skips a mount point
    inside another mount, because CRIU restores it with that mount. Returns the result of
    `bind_mounts`."""
    with closing_fd(os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        mounted: list[str] = []
        binds = dumps.bind_mounts(spec, bundle, root)
        sources = dict(binds)
        for place in dumps.mount_points(spec, root):
            if not any(place.startswith(above + "/") for above in mounted):
                _make_mount_point(
                    root, place, place in sources and not os.path.isdir(sources[place])
                )
                mounted.append(place)
    return binds


def _make_mount_point(root: int, place: str, is_file: bool) -> None:
    names = components(place)
    # Name by name beneath the root: the image's links were resolved before, and must not change
    # meanwhile.
    current = os.dup(root)
    try:
        for index, name in enumerate(names):
            try:
                if is_file and index == len(names) - 1:
                    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
                    os.close(os.open(name, flags, 0o644, dir_fd=current))
                    return
                os.mkdir(name, 0o755, dir_fd=current)
            except FileExistsError:
                pass
            above, current = current, open_beneath(current, name)
            os.close(above)
    finally:
        os.close(current)


def _inherited_numbers(descriptors: NamedDescriptors) -> dict[int, int]:
    """Assign each of `descriptors` a number in CRIU, in order. Return a dict: number in CRIU
    -> our number."""
    return {FIRST_FREE + i: number for i, number in enumerate(descriptors.numbers.values())}


def _criu_options(
    state: State,
    spec: Spec,
    choices: CriuOptions,
    streams: Sequence[str],
    binds: Sequence[tuple[str, str]],
    descriptors: NamedDescriptors,
    criu_pid: int,
) -> FieldList:
    fields: FieldList = [
        (criu.IMAGES_DIR_FD, descriptors.numbers["images"]),
        (criu.WORK_DIR_FD, descriptors.numbers["work"]),
        (criu.LOG_FILE, LOG),
        (criu.ROOT, state.rootfs),
        # The processes become our children, not CRIU's, so that we get their exits.
        (criu.RST_SIBLING, True),
        (criu.NOTIFY_SCRIPTS, True),
        *choices.fields(),
        *dumps.configuration_file(state),
        *(dumps.external_mount(place, source) for place, source in binds),
        dumps.external_mount(dumps.NULL, dumps.NULL),
    ]
    for entry in spec.linux.namespaces:
        if not entry.path:
            continue
        if entry.type in ("network", "pid"):
            key = dumps.NETWORK_KEY if entry.type == "network" else dumps.PID_KEY
            number = FIRST_FREE + list(descriptors.numbers).index(entry.type)
            fields.append((criu.INHERIT_FD, criu.message([(1, key), (2, number)])))
        elif entry.type == "cgroup":
            raise Unsupported("cannot restore into a cgroup namespace given by path")
        else:
            names = criu.message([(1, KERNEL_NAMES[entry.type]), (2, entry.path)])
            fields.append((criu.JOIN_NS, names))
    # If several numbers have the same stream, the lowest is used.
    ours = {stream: number for number, stream in reversed([*enumerate(streams)])}
    fields += [
        (criu.INHERIT_FD, criu.message([(1, stream), (2, number)]))
        for stream, number in ours.items()
        if criu_images.is_external(stream)
    ]
    return [*fields, *_cgroup_roots(criu_pid)]


def _check_images(choices: CriuOptions, work_path: str) -> list[str]:
    """Check the image folder, the work folder and the dump's files before the container is created.
    Return the names of the dumped container's descriptors 0 to 2. Raises NotFound,
    InvalidArgument."""
    with (
        closing_fd(dumps.open_folder(choices.image_path, make=False)) as folder,
        closing_fd(dumps.open_folder(work_path)) as work,
    ):
        criu_images.check(folder, choices.image_path)
        criu_images.require_dump(folder, choices.image_path)
        criu_images.check_log(work, work_path, LOG)
        return criu_images.streams(folder, choices.image_path)


def _cgroup_roots(pid: int) -> FieldList:
    """Return the options that map the container's former cgroups to those of the process `pid`."""
    fields: FieldList = []
    with open(f"/proc/{pid}/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            fields.append((criu.CG_ROOT, criu.message([(1, controllers), (2, path)])))
    return fields
