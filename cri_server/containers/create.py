"""CreateContainer: checks the request, makes the writable layer and the OCI spec, and has the shim
compile the launch (all data that the process needs to start). StartContainer starts the process."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.checkpoints.read import Checkpoint
from cri_server.config import handlers
from cri_server.config.model import ContainersConfig, RuntimeConfig
from cri_server.containers import (
    anonymous_volumes,
    image_volumes,
    launch,
    placeholder_mounts,
    restore,
)
from cri_server.containers.accounts import read_accounts
from cri_server.images.service import Image, Rootfs
from cri_server.images.waiting import Abandoned, in_thread
from cri_server.node.host import effective_capabilities
from cri_server.observability import events
from cri_server.operations.steps import Parallel, Step, Steps
from cri_server.pod import orphans
from cri_server.security.selinux import labels, relabel
from cri_server.services import Services
from cri_server.spec import (
    build,
    cdi,
    external_runtime,
    groups,
    hooks,
    host_binds,
    mounts,
    namespaces,
    path_length,
    pod_files,
    signals,
    sources,
    user,
)
from cri_server.spec.host_binds import HostBind
from cri_server.spec.open_sources import OpenSources
from cri_server.spec.security import DEFAULT, apparmor_profile
from cri_server.spec.sources import HostDevice
from cri_server.spec.user import Accounts
from cri_server.status import sandbox as status
from cri_server.store import disk
from cri_server.store.model import Container, Sandbox, copy
from pyrunc import atomic_file
from pyrunc.compile.requests import CgroupChoice, Overlay
from pyrunc.compile.rootfs_probe import PASSWD_BELOW
from pyrunc.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    Unsupported,
    WrongState,
)
from pyrunc.kernel.full import disk_error
from pyrunc.kernel.tree import remove_path
from pyrunc.shim.files import LaunchFile, OtherRuntime, PreparedMount

RELABEL_TIMEOUT_S = 100.0  # kubelet gives a call two minutes
CALLER_GRACE_S = 45.0  # after a timeout kubelet repeats the call within 30 s


@dataclass(slots=True)
class CreateContext:
    """A container that is being created. `settings`: the configuration of the sandbox's runtime
    handler."""

    services: Services
    sandbox: Sandbox
    config: api.ContainerConfig
    id: str
    runtime: RuntimeConfig
    settings: ContainersConfig
    archive: str = ""
    checkpoint: Checkpoint | None = None
    image: Image | None = None
    rootfs: Rootfs | None = None
    accounts: Accounts = field(default_factory=Accounts)
    requested_mounts: list[mounts.MountRequest] = field(default_factory=list)
    open_sources: OpenSources = field(default_factory=OpenSources)
    binds: list[HostBind] = field(default_factory=list)
    mounted_images: dict[str, str] = field(default_factory=dict)
    devices: list[HostDevice] = field(default_factory=list)
    edits: list[cdi.CdiEdits] = field(default_factory=list)
    hooks: list[hooks.ConfiguredHook] = field(default_factory=list)
    volumes: list[mounts.MountRequest] = field(default_factory=list)
    placeholders: list[mounts.MountRequest] = field(default_factory=list)
    labels: labels.SelinuxLabels = labels.NONE
    mounted_home: str | None = None
    built: build.Built | None = None
    container: Container | None = None


async def create(
    services: Services,
    reference: str,
    config: api.ContainerConfig,
    *,
    archive: str = "",
) -> str:
    """Create a container in the sandbox `reference` and return the container's id. A repeated
    request waits for the first one, and returns the same id until the container is started.
    `archive`: the path of a checkpoint to restore instead of the configuration's image.

    Raises NotFound (sandbox, image), WrongState (sandbox not ready), InvalidArgument, AlreadyExists
    (a container of this name has another configuration, or was started), Unsupported.
    """
    sandbox = services.index.sandboxes.get(reference)
    build.check(config, sandbox.config)
    key = _key(sandbox, config)
    existing = services.index.containers.find_by_name(key[1])
    if existing is not None:
        return _existing_id(existing, config)
    if sandbox.state != api.SANDBOX_READY:
        raise WrongState(f"sandbox {sandbox.id} is not ready")
    return await services.running.join(
        key, lambda: _create(services, sandbox, config, archive), request=config
    )


def _key(sandbox: Sandbox, config: api.ContainerConfig) -> tuple[str, tuple[str, str, int]]:
    return "create", (sandbox.id, config.metadata.name, config.metadata.attempt)


def _existing_id(existing: Container, config: api.ContainerConfig) -> str:
    if existing.config == config and existing.state == api.CONTAINER_CREATED:
        return existing.id
    why = "was started already" if existing.config == config else "has another configuration"
    raise AlreadyExists(f"container {existing.id} has the same name and attempt, but {why}")


async def _create(
    services: Services, sandbox: Sandbox, config: api.ContainerConfig, archive: str
) -> str:
    with sandbox.gate:
        context = _context(services, sandbox, config)
        context.archive = archive
        try:
            with context.open_sources:
                await STEPS.run(context)
            assert context.container is not None
            if sandbox.state != api.SANDBOX_READY:
                await STEPS.undo(context)
                raise WrongState(
                    f"sandbox {sandbox.id} was stopped while the container was created"
                )
            services.index.containers.add(context.container)
        finally:
            services.images.release(context.id)  # the index has the container, or never will
        await services.observer.created_container(sandbox, context.container)
    status.publish(services, sandbox, context.id, events.CREATED)
    return context.id


def _context(services: Services, sandbox: Sandbox, config: api.ContainerConfig) -> CreateContext:
    """Return the context of a CreateContainer call, with a new container id. Raises WrongState when
    the sandbox's handler is no longer configured."""
    runtime = handlers.find(services.config, sandbox.runtime_handler)
    if runtime is None:
        raise WrongState(f"runtime handler {sandbox.runtime_handler!r} is no longer configured")
    settings = handlers.settings(services.config, sandbox.runtime_handler)
    return CreateContext(services, sandbox, config, os.urandom(32).hex(), runtime, settings)


async def find_checkpoint(context: CreateContext) -> None:
    """Load the checkpoint into `context` if the request names an archive, or an image that contains
    a checkpoint. Raises NotFound, WrongState, ResourceExhausted, KernelError, and InvalidArgument
    if the pod has an external runtime or a user namespace."""
    reference = context.archive or context.config.image.image
    if not reference:
        raise InvalidArgument("config.image.image is empty")
    context.checkpoint = await restore.load_checkpoint(
        context.services, context.id, reference, context.config.image.user_specified_image
    )
    if context.checkpoint is not None and context.runtime.binary:
        raise InvalidArgument(
            f"runtime handler {context.sandbox.runtime_handler!r} is an external runtime:"
            " only pyrunc restores checkpoints"
        )
    if context.checkpoint is not None and namespaces.has_user_namespace(context.sandbox.options):
        raise InvalidArgument(
            "a checkpoint cannot be restored into a pod with a user namespace: CRIU would make"
            " a new one, which does not own the pod's network namespace"
        )


async def drop_checkpoint(context: CreateContext) -> None:
    await asyncio.to_thread(remove_path, context.services.paths.container_root(context.id))


async def find_image(context: CreateContext) -> None:
    """Find the container's image, its unpacked layers, and its accounts (/etc/passwd, /etc/group).
    For a checkpoint, use the image that the checkpointed container was created from, and pull it if
    it is missing. Raises NotFound if the image is not on this node."""
    reference = context.config.image.image
    if context.checkpoint is not None:
        context.image = await restore.find_image(context.services, context.checkpoint)
    else:
        context.image = await context.services.images.status(reference)
    if context.image is None:
        raise NotFound(f"image {reference[:200]!r} is not on this node")
    context.rootfs = await context.services.images.rootfs(context.image.id, context.id)
    context.accounts = await read_accounts(context.image.id, context.rootfs.lower_dirs)


async def _check_recursive_read_only(context: CreateContext) -> None:
    """Raise Unsupported if a mount is recursively read-only and the external runtime does not list
    this feature: submounts might stay writable. The message begins with RROUnsupported, which
    kubelet looks for."""
    for index, mount in enumerate(context.requested_mounts):
        if mount.request.recursive_read_only and not await context.services.oci_features.mounts_rro(
            context.runtime
        ):
            raise Unsupported(
                f"RROUnsupported: mounts[{index}]: the runtime of handler"
                f" {context.sandbox.runtime_handler!r} does not list recursively read-only mounts"
                " among its features"
            )


async def find_sources(context: CreateContext) -> None:
    """Look up the container's host paths, image volumes, devices, CDI devices and hooks, and store
    them in `context`. Each lookup of a host path runs in a thread with the deadline
    `foreign_path_timeout_s`, because the storage may not answer. Raises DeadlineExceeded,
    InvalidArgument, NotFound (image volume), Unsupported, WrongState (hooks), KernelError."""
    config, services = context.config, context.services
    context.requested_mounts = mounts.check_requests(config.mounts)
    await _check_recursive_read_only(context)
    context.mounted_images = await image_volumes.resolve(
        services, context.id, context.requested_mounts
    )
    timeout_s = services.config.containers.foreign_path_timeout_s
    context.volumes = _volumes(context)
    if context.checkpoint is not None:
        root = services.paths.container_root(context.id)
        context.placeholders = placeholder_mounts.declared(
            context.checkpoint.binds, [*context.requested_mounts, *context.volumes], root
        )
    if any(not m.source for m in context.requested_mounts):
        await sources.run_with_deadline(
            timeout_s,
            context.open_sources.subject,
            sources.resolve,
            context.requested_mounts,
            context.open_sources,
        )
        context.mounted_home = await _read_mounted_home(context, timeout_s)
    cdi_names = cdi.names([device.name for device in config.CDI_devices], config.annotations)
    if cdi_names:
        folders = services.config.containers.cdi_dirs
        context.edits = await sources.run_with_deadline(
            timeout_s, "CDI files", cdi.resolve, cdi_names, folders
        )
    if context.settings.hooks_dirs:
        folders = context.settings.hooks_dirs
        context.hooks = await sources.run_with_deadline(timeout_s, "hooks", hooks.read, folders)
    if (
        config.linux.security_context.privileged
        and not context.settings.privileged_without_host_devices
    ):
        context.devices = await sources.run_with_deadline(timeout_s, "/dev", sources.all_devices)
    if config.devices:
        devices = await sources.run_with_deadline(
            timeout_s, "devices", sources.devices, list(config.devices)
        )
        requested_paths = {d.path for d in devices}
        context.devices = [d for d in context.devices if d.path not in requested_paths] + devices


async def _read_mounted_home(context: CreateContext, timeout_s: float) -> str | None:
    """Return the home of the container's user if a bind mount covers the image's /etc/passwd, else
    None. The home is read from the file in the deepest such mount; it is `/` if the file does not
    list the user. Raises DeadlineExceeded, InvalidArgument (unknown user)."""
    covering = [
        mount
        for mount in context.requested_mounts
        if mount.destination in PASSWD_BELOW and mount.source in context.open_sources.fds
    ]
    if not covering:
        return None
    mount = sorted(covering, key=lambda m: len(m.destination))[-1]
    assert context.rootfs is not None
    security_context, image_user = context.config.linux.security_context, context.rootfs.config.user
    uid = user.resolve(security_context, image_user, context.accounts).uid
    # A copy, because after a missed deadline the abandoned thread may still use the descriptor.
    number = os.dup(context.open_sources.fds[mount.source])
    return await sources.run_with_deadline(
        timeout_s,
        f"path {mount.source!r}",
        sources.read_home,
        number,
        PASSWD_BELOW[mount.destination],
        uid,
    )


def _volumes(context: CreateContext) -> list[mounts.MountRequest]:
    assert context.rootfs is not None
    options = context.config.linux.security_context.namespace_options
    users = (
        options.userns_options if namespaces.has_user_namespace(options) else api.UserNamespace()
    )
    root = context.services.paths.container_root(context.id)
    return anonymous_volumes.declared(
        sorted(context.rootfs.config.volumes), context.requested_mounts, root, users
    )


async def label_volumes(context: CreateContext) -> None:
    """Choose the container's SELinux labels, and relabel the volumes whose mounts request it. The
    files keep these labels after the container's end, as with other runtimes.

    Raises InvalidArgument, KernelError, DeadlineExceeded, PeerError (the relabelling process was
    killed).
    """
    policy = context.services.node.selinux
    if policy is None:
        return
    context.labels = labels.of_container(
        policy, context.config.linux.security_context, context.sandbox.selinux
    )
    paths = [
        m.source
        for m in context.requested_mounts
        if m.request.selinux_relabel and m.request.host_path
    ]
    for path in paths:
        relabel.check_path(path)
    if paths:
        arguments = relabel.Relabel(paths, context.labels.mount)
        result = await context.services.zygote.run(
            relabel.JOB, arguments, timeout_s=RELABEL_TIMEOUT_S
        )
        # The exit code is 137 where the node has no memory for the names of a huge folder.
        result.require_success(f"SELinux relabelling of {', '.join(paths)}")


async def build_spec(context: CreateContext) -> None:
    sandbox, services = context.sandbox, context.services
    assert context.rootfs is not None and sandbox.pause is not None
    image = context.rootfs.config
    context.built = build.build(
        build.Inputs(
            container_id=context.id,
            config=context.config,
            sandbox=sandbox.config,
            image=image,
            accounts=context.accounts,
            requested_mounts=[*context.requested_mounts, *context.volumes, *context.placeholders],
            devices=context.devices,
            files=str(services.paths.sandbox_root(sandbox.id)),
            hostname=pod_files.hostname(sandbox.config, sandbox.id, services.node.hostname),
            pause_pid=sandbox.pause.pid,
            target_pid=_target(context),
            cgroup_parent=sandbox.cgroup_parent,
            node=services.node,
            available_capabilities=effective_capabilities(),
            kubernetes={
                "io.kubernetes.cri.sandbox-id": sandbox.id,
                "io.kubernetes.cri.sandbox-name": sandbox.config.metadata.name,
                "io.kubernetes.cri.sandbox-namespace": sandbox.config.metadata.namespace,
                "io.kubernetes.cri.sandbox-uid": sandbox.config.metadata.uid,
            },
            default_apparmor=await _default_apparmor(context),
            edits=context.edits,
            settings=context.settings,
            hooks=context.hooks,
            labels=context.labels,
            mounted_home=context.mounted_home,
        )
    )
    if context.checkpoint is not None:
        # Only the mounts of the request are used, because admission has checked them. CRI-O used
        # those of the archive (CVE-2024-8676).
        restore.check(
            context.checkpoint, context.built.spec, [*context.requested_mounts, *context.volumes]
        )
    context.container = _container(context, image.stop_signal)


async def ask_plugins(context: CreateContext) -> None:
    """Let NRI plugins change the container's OCI spec."""
    assert context.built is not None and context.container is not None
    await context.services.observer.create_container(
        context.sandbox, context.container, context.built.spec
    )


async def notify_plugins_of_removal(context: CreateContext) -> None:
    assert context.container is not None
    await context.services.observer.remove_container(context.container)


async def _default_apparmor(context: CreateContext) -> str:
    """Load pyrunc's default AppArmor profile if this container uses it, and return its name; else
    return an empty string."""
    profile = apparmor_profile(context.config.linux.security_context)
    services = context.services
    return (
        await services.default_apparmor.name(services.node, services.zygote)
        if profile.kind == DEFAULT
        else ""
    )


def _target(context: CreateContext) -> int:
    """Return the pid of the process whose pid namespace the container joins (mode TARGET); 0 in
    other modes."""
    options = context.config.linux.security_context.namespace_options
    return (
        target_pid(context.services, context.sandbox, options) if options.pid == api.TARGET else 0
    )


def target_pid(services: Services, sandbox: Sandbox, options: api.NamespaceOption) -> int:
    """Return the pid of the container whose id is `options.target_id`. Raises NotFound,
    InvalidArgument if that container belongs to another sandbox, WrongState if it is not
    running."""
    target = services.index.containers.get(options.target_id)
    if target.sandbox_id != sandbox.id:
        raise InvalidArgument(f"target container {target.id} belongs to another sandbox")
    if not target.running or target.process is None:
        raise WrongState(f"target container {target.id} is not running")
    return target.process.pid


def _container(context: CreateContext, image_signal: str) -> Container:
    assert context.image is not None and context.built is not None
    image, image_spec = context.image, context.config.image
    # The names that this pod uses. The image's first name may be in another repository, which users
    # report as a kubelet bug (kubernetes issues 51017, 74081, 95385).
    name, name_by_digest = context.services.images.names(
        image, [image_spec.user_specified_image, image_spec.image]
    )
    return Container(
        id=context.id,
        sandbox_id=context.sandbox.id,
        config=copy(context.config),
        created_at_ns=time.time_ns(),
        boot_id=context.services.node.boot_id,
        image_id=image.id,
        image_ref=name_by_digest,
        image_name=name,
        user=context.built.user,
        stop_signal=signals.stop_signal(context.config.stop_signal, image_signal),
        log_path=log_path(context.sandbox.config, context.config),
        cgroups_path=context.built.spec["linux"]["cgroupsPath"],
        resources=copy(context.config.linux.resources),
        mounted_images=context.mounted_images,
    )


def log_path(sandbox: api.PodSandboxConfig, config: api.ContainerConfig) -> str:
    """Return the log's absolute path; empty if the output is discarded. Raises InvalidArgument for
    a path that is too long, or outside the pod's log directory."""
    if not sandbox.log_directory or not config.log_path:
        return ""
    if (
        config.log_path.startswith("/")
        or ".." in config.log_path.split("/")
        or "\0" in config.log_path
    ):
        raise InvalidArgument(f"log_path {config.log_path!r} leaves the pod's log directory")
    path_length.check(config.log_path, "config.log_path")
    path = os.path.join(sandbox.log_directory, config.log_path)
    path_length.check(path, "log_directory with log_path")
    return path


async def make_folders(context: CreateContext) -> None:
    assert context.rootfs is not None
    paths = context.services.paths
    try:
        # On a tmpfs, so this cannot block the loop.
        paths.container_state(context.id).mkdir(mode=0o700)
        await _make_on_disk(
            context, str(paths.container_root(context.id)), context.rootfs.lower_dirs
        )
        if context.checkpoint is not None:
            await restore.fill_layer(context.services, context.id, context.volumes)
            await asyncio.to_thread(placeholder_mounts.make, context.placeholders)
        if context.labels.mount:
            await asyncio.to_thread(
                _label, [*context.volumes, *context.placeholders], context.labels.mount
            )
    except OSError as error:
        raise disk_error(error, "mkdir", str(paths.container_root(context.id))) from None


def _label(volumes: list[mounts.MountRequest], label: str) -> None:
    for volume in volumes:
        relabel.relabel_tree(volume.source, label.encode())


async def _make_on_disk(context: CreateContext, root: str, lower_dirs: Sequence[Path]) -> None:
    """Make the writable layer and the volumes. Raises WrongState when the sandbox is being stopped
    or the caller no longer waits."""
    await asyncio.to_thread(make_layer, root, lower_dirs[0])
    if not context.volumes:
        return
    cancelled, running = threading.Event(), context.services.running
    key = _key(context.sandbox, context.config)

    def is_abandoned() -> bool:
        return (
            cancelled.is_set()
            or context.sandbox.phase != "ready"
            or running.seconds_without_caller(key) > CALLER_GRACE_S
        )

    try:
        await in_thread(
            lambda: anonymous_volumes.fill(context.volumes, lower_dirs, is_abandoned), cancelled.set
        )
    except Abandoned:
        raise WrongState(
            f"copying the image's volumes was stopped: sandbox {context.sandbox.id} is being"
            " stopped, or the caller no longer waits"
        ) from None


def make_layer(root: str, top_layer: str | os.PathLike[str]) -> None:
    """Make the writable layer. `upper` gets the owner and mode of the image's top layer, because
    overlayfs gives the merged root the owner and mode of `upper`."""
    # 0700: users of the node must not reach set-uid programs of an image (CVE-2021-41103).
    os.makedirs(root, 0o700, exist_ok=True)  # it exists if it holds a checkpoint
    os.mkdir(f"{root}/work", 0o700)
    os.mkdir(f"{root}/upper", 0o755)
    layer_stat = os.stat(top_layer)
    os.chown(f"{root}/upper", layer_stat.st_uid, layer_stat.st_gid)
    os.chmod(f"{root}/upper", layer_stat.st_mode & 0o7777)


async def remove_folders(context: CreateContext) -> None:
    await disk.delete_container_folders(context.services.paths, context.services.trash, context.id)


async def write_bundle(context: CreateContext) -> None:
    assert (
        context.built is not None and context.rootfs is not None and context.container is not None
    )
    folder = context.services.paths.container_state(context.id)
    root = context.services.paths.container_root(context.id)
    settings = context.services.config
    spec = context.built.spec
    places: Sequence[PreparedMount] = ()
    runtime = restore_folders = None
    if context.runtime.binary:
        spec, places = external_runtime.bundle(spec, context.requested_mounts, str(folder))
        runtime = OtherRuntime(context.runtime.binary, list(context.runtime.arguments))
    elif context.checkpoint is not None:
        spec, places = external_runtime.with_paths(spec, context.requested_mounts, str(folder))
        restore_folders = restore.bundle(context.services, context.id)
    launch_file = LaunchFile(
        rootfs=_overlay(context.rootfs, root, volatile=context.settings.volatile),
        cgroup=CgroupChoice(
            groups.driver_of(context.container.cgroups_path), settings.cgroup.missing_controllers
        ),
        sandbox=context.sandbox.id,
        tty=bool(context.config.tty),
        stdin=bool(context.config.stdin),
        stdin_once=bool(context.config.stdin_once),
        log_path=context.container.log_path or None,
        log_directory=context.sandbox.config.log_directory,
        image_volumes={
            mount.source.removeprefix(mounts.OUR_MOUNTS): mount.image
            for mount in context.requested_mounts
            if mount.image is not None
        },
        layer_volumes={
            mount.source.removeprefix(mounts.OUR_MOUNTS): Overlay(mount.layers)
            for mount in context.requested_mounts
            if mount.layers
        },
        settled=[mount.source for mount in context.requested_mounts if mount.request.host_path],
        runtime=runtime,
        restore=restore_folders,
        places=places,
    )
    context.binds = host_binds.of(spec, launch_file, launch.own_folders(context.services))
    try:
        atomic_file.write_json(str(folder / host_binds.CONFIG), spec)
        launch_file.write(folder)
    except OSError as error:
        raise disk_error(error, "write", str(folder)) from None


def _overlay(rootfs: Rootfs, root: Path, *, volatile: bool) -> Overlay:
    image = rootfs.mount.image if rootfs.mount is not None else None
    lower = [] if image is not None else [str(path) for path in rootfs.lower_dirs]
    return Overlay(lower, str(root / "upper"), str(root / "work"), volatile, image)


async def save(context: CreateContext) -> None:
    assert context.container is not None
    await disk.save_container(context.services.paths, context.container)


async def remove_record(context: CreateContext) -> None:
    await disk.remove_record(context.services.paths.container_record(context.id))


async def prepare_launch(context: CreateContext) -> None:
    assert context.container is not None
    await launch.prepare(
        context.services, context.sandbox, context.container, context.open_sources, context.binds
    )


async def drop_launch(context: CreateContext) -> None:
    assert context.container is not None
    await launch.drop(context.services, context.container)
    await orphans.kill_group(context.container.cgroups_path, context.container.id)


STEPS: Steps[CreateContext] = Steps(
    "create_container",
    [
        Step("checkpoint", find_checkpoint, drop_checkpoint),
        Step("image", find_image),
        Step("sources", find_sources),
        Step("labels", label_volumes),
        Step("spec", build_spec),
        Step("nri", ask_plugins, notify_plugins_of_removal),
        Step("folders", make_folders, remove_folders),
        Step("bundle", write_bundle),
        # Parallel, because these are independent. If the server dies before the record is written,
        # recovery reads the cgroup's path from config.json.
        Parallel(
            (Step("record", save, remove_record), Step("launch", prepare_launch, drop_launch))
        ),
    ],
)
