"""`restore`: a container comes back from CRIU's images, running, under an id of its choice.

CRIU makes namespaces, mounts and processes; ours is what surrounds them: the cgroup, the mount
points, standard streams, and the root as a mount, which exists only in a mount namespace of this
runtime's own. The processes are children of the caller, as after `create`.
"""

from __future__ import annotations

import os

from pyrunc.abi.clone import CLONE_NEWNS
from pyrunc.abi.mount import MS_BIND, MS_REC, MS_SLAVE
from pyrunc.checkpoint import checkpoint as dumps
from pyrunc.checkpoint import criu
from pyrunc.checkpoint import criu_images as images
from pyrunc.compile.descriptors import NamedDescriptors
from pyrunc.compile.rootfs_probe import cgroup_owner
from pyrunc.container import status as facts
from pyrunc.container.create import Created
from pyrunc.errors import InvalidSpec, PeerError, Unsupported
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel.credential import is_machine_root
from pyrunc.kernel.namespace import open_namespace, unshare
from pyrunc.kernel.path import components, open_beneath, resolve
from pyrunc.launch.run import ChildProcess
from pyrunc.plan.mounts import normal
from pyrunc.plan.namespaces import KERNEL_NAMES
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.checkpoint.checkpoint import Choices
    from pyrunc.checkpoint.criu import Value
    from pyrunc.container.bundle import Bundle, CreateOptions
    from pyrunc.container.state import State
    from pyrunc.spec.model import Spec

    Fields = list[tuple[int, Value]]

LOG = "restore.log"
FIRST_FREE = 4  # of CRIU's descriptors, behind stdio and its socket


class Labels:
    """What takes the place of the labels in the images: an AppArmor profile or SELinux label, the
    context of mounts."""

    __slots__ = ("mount_context", "profile")

    def __init__(self, profile: str = "", mount_context: str = "") -> None:
        self.profile, self.mount_context = profile, mount_context

    def fields(self) -> Fields:
        """As CRIU's options."""
        given: Fields = [
            (criu.LSM_PROFILE, self.profile),
            (criu.LSM_MOUNT_CONTEXT, self.mount_context),
        ]
        return [(number, value) for number, value in given if value]


def restore(
    state: State,
    bundle: Bundle,
    create_options: CreateOptions,
    choices: Choices,
    labels: Labels,
    stdio: tuple[int, int, int] = (0, 1, 2),
) -> Created:
    """Bring the processes back; the state's folder exists and its lock is held. On failure nothing
    of them is left.

    Raises Unsupported (rootless), NotFound (no criu, no images), InvalidSpec, KernelError,
    PeerError with what CRIU logged.
    """
    if not is_machine_root():
        raise Unsupported("restore needs the machine's root")
    work_path = choices.work_path or state.folder
    streams = _check_images(choices, work_path)
    with Undo() as undo, NamedDescriptors() as descriptors:
        _own_root(
            state.rootfs
        )  # before folders are opened: CRIU mounts in its own, which must be in its namespace
        descriptors.take("images", dumps.open_folder(choices.image_path, make=False))
        descriptors.take("work", dumps.open_folder(work_path))
        _open_namespaces(bundle.spec, descriptors)
        _make_places(bundle.spec, state.bundle, state.rootfs)
        group = _open_group(state, bundle.spec, create_options, undo)
        part = _Part(state, bundle.spec, create_options, group, undo)
        try:
            # CRIU itself does so from 3.19 on, and by what the images say.
            forbids = bundle.spec.process is not None and bundle.spec.process.no_new_privileges
            with criu.Criu(_numbers(descriptors), stdio, no_new_privileges=forbids) as session:
                if group is not None:
                    group.attach(session.pid)
                options = _options(state, bundle.spec, choices, streams, descriptors, session.pid)
                session.request(criu.RESTORE, [*options, *labels.fields()], part)
        except PeerError as error:
            raise PeerError(f"{error.message}: {criu.errors_of(work_path, LOG)}") from None
        born = part.born
        if born is None:
            raise PeerError("criu told of no process that it restored")
        if group is not None:
            group.occupied()
        undo.commit()
    return Created(
        born.pid, born.pidfd, born.start_time, born.console_fd, group, tuple(part.warnings)
    )


class _Part:
    """What we do while CRIU works, at the points that it tells of."""

    __slots__ = (
        "_create_options",
        "_group",
        "_spec",
        "_state",
        "_undo",
        "born",
        "console_fd",
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
        self.born: ChildProcess | None = None
        self.console_fd: int | None = None
        self.warnings: list[str] = []

    def __call__(self, script: str, pid: int, fds: tuple[int, ...]) -> None:
        if script == "setup-namespaces":
            self._run_hooks(pid)
        elif script == "orphan-pts-master" and fds:
            self.console_fd = os.dup(fds[0])
        elif script == "post-restore":
            self._take_over(pid)

    def _run_hooks(self, pid: int) -> None:
        hooks = self._spec.hooks
        if hooks.prestart or hooks.create_runtime:
            from pyrunc.launch import hooks as programs

            told = facts.oci_state(self._state, facts.CREATING, pid)
            programs.run(hooks.prestart, "prestart", told)
            programs.run(hooks.create_runtime, "createRuntime", told)

    def _take_over(self, pid: int) -> None:
        """All is there and stands still: from now on it is deletable, and limited. CRIU worked
        without the limits."""
        self.born = born = ChildProcess(pid)
        born.console_fd = self.console_fd
        self._undo.push(f"process {pid}", born.kill)
        self._state.pid, self._state.start_time = born.pid, born.start_time
        self._state.save()
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
    """Those that CRIU takes as descriptors; it opens others by their paths."""
    for kind in ("network", "pid"):
        entry = spec.linux.namespace(kind)
        if entry is not None and entry.path:
            descriptors.take(kind, open_namespace(entry.path, KERNEL_NAMES[kind]))


def _own_root(rootfs: str) -> None:
    """CRIU wants the root to be a mount. Here it is one for this process and its children, and
    nobody else."""
    if not os.path.isdir(rootfs):
        raise InvalidSpec("root.path", f"{rootfs} is not a directory")
    unshare(CLONE_NEWNS)
    kernel_mount.mount(None, "/", None, MS_REC | MS_SLAVE)
    kernel_mount.mount(rootfs, rootfs, None, MS_BIND | MS_REC)


def _make_places(spec: Spec, bundle: str, rootfs: str) -> None:
    """The folders and files on which CRIU mounts; those inside another mount come back with
    that."""
    root = os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        made: list[str] = []
        sources = dict(dumps.bound(spec, bundle))
        for mount in spec.mounts:
            place = normal(mount.destination)
            if not any(place.startswith(above + "/") for above in made):
                _make_place(root, place, place in sources and not os.path.isdir(sources[place]))
                made.append(place)
    finally:
        os.close(root)


def _make_place(root: int, place: str, is_file: bool) -> None:
    names = components(resolve(root, place))
    current = os.dup(root)
    try:
        for index, name in enumerate(names):
            try:
                if is_file and index == len(names) - 1:
                    os.close(
                        os.open(
                            name,
                            os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC,
                            0o644,
                            dir_fd=current,
                        )
                    )
                    return
                os.mkdir(name, 0o755, dir_fd=current)
            except FileExistsError:
                pass
            above, current = current, open_beneath(current, name)
            os.close(above)
    finally:
        os.close(current)


def _numbers(descriptors: NamedDescriptors) -> dict[int, int]:
    """CRIU's numbers for what it inherits: images, work, namespaces in their order."""
    return {FIRST_FREE + i: number for i, number in enumerate(descriptors.numbers.values())}


def _options(
    state: State,
    spec: Spec,
    choices: Choices,
    streams: Sequence[str],
    descriptors: NamedDescriptors,
    criu_pid: int,
) -> list[tuple[int, Value]]:
    fields: Fields = [
        (criu.IMAGES_DIR_FD, descriptors.numbers["images"]),
        (criu.WORK_DIR_FD, descriptors.numbers["work"]),
        (criu.LOG_FILE, LOG),
        (criu.ROOT, state.rootfs),
        (criu.RST_SIBLING, True),
        (criu.NOTIFY_SCRIPTS, True),
        *choices.fields(),
        *dumps.configuration_file(state),
        *(dumps.external_mount(place, source) for place, source in dumps.bound(spec, state.bundle)),
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
            raise Unsupported("restore into a cgroup namespace that is given by path")
        else:
            names = criu.message([(1, KERNEL_NAMES[entry.type]), (2, entry.path)])
            fields.append((criu.JOIN_NS, names))
    # Of two that are one, the first.
    ours = {stream: number for number, stream in reversed([*enumerate(streams)])}
    fields += [
        (criu.INHERIT_FD, criu.message([(1, stream), (2, number)]))
        for stream, number in ours.items()
        if images.is_outside(stream)
    ]
    return [*fields, *_cgroup_roots(criu_pid)]


def _check_images(choices: Choices, work_path: str) -> list[str]:
    """Before anything is made: the folders hold files only, and a dump. What descriptors 0 to 2
    were."""
    folder, work = dumps.open_folder(choices.image_path, make=False), dumps.open_folder(work_path)
    try:
        images.check(folder, choices.image_path)
        images.require_dump(folder, choices.image_path)
        images.check_log(work, work_path, LOG)
        return images.streams(folder, choices.image_path)
    finally:
        os.close(folder)
        os.close(work)


def _cgroup_roots(pid: int) -> Fields:
    """The groups that CRIU is in stand for those in which the container was."""
    fields: Fields = []
    with open(f"/proc/{pid}/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            fields.append((criu.CG_ROOT, criu.message([(1, controllers), (2, path)])))
    return fields
