"""CreateContainer: everything is checked, the writable layer, the spec and the launch are made;
nothing of the user's runs yet."""

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
from cri_server.config.model import Containers, Runtime
from cri_server.containers import (
    anonymous_volumes,
    host_paths,
    image_volumes,
    launch,
    restore,
    stand_ins,
)
from cri_server.containers.accounts import read_accounts
from cri_server.images.service import Image, Rootfs
from cri_server.images.waiting import Abandoned, in_thread
from cri_server.node.host import effective_capabilities
from cri_server.observability import events
from cri_server.operations.steps import Beside, Step, Steps
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
)
from cri_server.spec.host_binds import HostBind
from cri_server.spec.open_sources import OpenSources
from cri_server.spec.security import DEFAULT, apparmor_profile
from cri_server.spec.sources import Device
from cri_server.spec.user import Accounts
from cri_server.status import sandbox as status
from cri_server.store import disk
from cri_server.store.model import Container, Sandbox
from pyrunc import atomic_file
from pyrunc.compile.descriptors import CgroupChoice
from pyrunc.compile.sources import Overlay
from pyrunc.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    PeerError,
    Unsupported,
    WrongState,
)
from pyrunc.kernel.full import disk_error
from pyrunc.kernel.tree import remove_path
from pyrunc.shim.files import LaunchFile, OtherRuntime, Place

RELABEL_TIMEOUT_S = 100.0  # kubelet gives a call two minutes
CALLER_GRACE_S = 45.0  # kubelet repeats a call that took too long within half a minute


@dataclass(slots=True)
class Work:
    """A container that is being made. `settings`: what holds for containers of the sandbox's
    runtime handler."""

    services: Services
    sandbox: Sandbox
    config: api.ContainerConfig
    id: str
    runtime: Runtime
    settings: Containers
    archive: str = ""
    checkpoint: Checkpoint | None = None
    image: Image | None = None
    rootfs: Rootfs | None = None
    accounts: Accounts = field(default_factory=Accounts)
    wanted: list[mounts.Asked] = field(default_factory=list)
    opened: OpenSources = field(default_factory=OpenSources)
    binds: list[HostBind] = field(default_factory=list)
    mounted_images: dict[str, Rootfs] = field(default_factory=dict)
    devices: list[Device] = field(default_factory=list)
    edits: list[cdi.Edits] = field(default_factory=list)
    hooks: list[hooks.Hook] = field(default_factory=list)
    volumes: list[mounts.Asked] = field(default_factory=list)
    stand_ins: list[mounts.Asked] = field(default_factory=list)
    labels: labels.Labels = labels.NONE
    built: build.Built | None = None
    container: Container | None = None


async def create(
    services: Services,
    reference: str,
    config: api.ContainerConfig,
    sandbox_config: api.PodSandboxConfig,
    *,
    archive: str = "",
) -> str:
    """The id of a container in state CREATED. The same request again joins the running one or
    returns what it made. `archive`: of a checkpoint that it is restored from, whatever image the
    configuration names.

    Raises NotFound (sandbox, image), WrongState (sandbox not ready), InvalidArgument,
    AlreadyExists, Unsupported.
    """
    sandbox = services.index.sandboxes.get(reference)
    build.check(config, sandbox.config)
    key = _key(sandbox, config)
    found = services.index.containers.named(key[1])
    if found is not None:
        return _again(found, config)
    if sandbox.state != api.SANDBOX_READY:
        raise WrongState(f"sandbox {sandbox.id} is not ready")
    return await services.running.join(
        key, lambda: _create(services, sandbox, config, archive), request=config
    )


def _key(sandbox: Sandbox, config: api.ContainerConfig) -> tuple[str, tuple[str, str, int]]:
    return "create", (sandbox.id, config.metadata.name, config.metadata.attempt)


def _again(found: Container, config: api.ContainerConfig) -> str:
    if found.config == config and found.state == api.CONTAINER_CREATED:
        return found.id
    why = "was started already" if found.config == config else "has another configuration"
    raise AlreadyExists(f"container {found.id} of the same name and attempt {why}")


async def _create(
    services: Services, sandbox: Sandbox, config: api.ContainerConfig, archive: str
) -> str:
    with sandbox.gate:
        work = _work(services, sandbox, config)
        work.archive = archive
        with work.opened:
            await STEPS.run(work)
        assert work.container is not None
        if sandbox.state != api.SANDBOX_READY:
            await _take_back(work)
            raise WrongState(f"sandbox {sandbox.id} was stopped meanwhile")
        services.index.containers.add(work.container)
        await services.observer.created_container(sandbox, work.container)
    status.publish(services, sandbox, work.id, events.CREATED)
    return work.id


def _work(services: Services, sandbox: Sandbox, config: api.ContainerConfig) -> Work:
    """Raises WrongState when the configuration has the sandbox's handler no more."""
    runtime = handlers.find(services.config, sandbox.runtime_handler)
    if runtime is None:
        raise WrongState(
            f"the configuration has no runtime handler {sandbox.runtime_handler!r} any more"
        )
    settings = handlers.settings(services.config, sandbox.runtime_handler)
    return Work(services, sandbox, config, os.urandom(32).hex(), runtime, settings)


async def _take_back(work: Work) -> None:
    await drop_launch(work)
    await unsave(work)
    await remove_folders(work)
    await tell_plugins_of_end(work)


async def find_checkpoint(work: Work) -> None:
    """An image may be one, or be in an archive."""
    reference = work.archive or work.config.image.image
    if not reference:
        raise InvalidArgument("config.image.image is empty")
    work.checkpoint = await restore.take(
        work.services, work.id, reference, work.config.image.user_specified_image
    )
    if work.checkpoint is not None and work.runtime.binary:
        raise InvalidArgument(
            f"runtime handler {work.sandbox.runtime_handler!r} is another runtime: only our own restores a checkpoint"
        )
    if work.checkpoint is not None and namespaces.has_user_namespace(work.sandbox.options):
        raise InvalidArgument(
            "a checkpoint cannot be restored into a pod with a user namespace: CRIU would make one of its own, to which the pod's "
            "network does not belong"
        )


async def drop_checkpoint(work: Work) -> None:
    await asyncio.to_thread(remove_path, work.services.paths.container_root(work.id))


async def find_image(work: Work) -> None:
    """Images are never pulled here, but for that of a checkpoint, which nobody else knows."""
    reference = work.config.image.image
    if work.checkpoint is not None:
        work.image = await restore.find_image(work.services, work.checkpoint)
    else:
        work.image = await work.services.images.status(reference)
    if work.image is None:
        raise NotFound(f"image {reference[:200]!r} is not on this node")
    work.rootfs = await work.services.images.rootfs(work.image.id)
    work.accounts = await read_accounts(work.image.id, work.rootfs.lower_dirs)


async def _check_recursive_read_only(work: Work) -> None:
    """Another runtime may not know the option, and would leave what is mounted below writable.
    Raises Unsupported, beginning with the word that kubelet looks for."""
    for index, each in enumerate(work.wanted):
        if each.request.recursive_read_only and not await work.services.oci_features.mounts_rro(
            work.runtime
        ):
            raise Unsupported(
                f"RROUnsupported: mounts[{index}]: the runtime of handler {work.sandbox.runtime_handler!r} does not tell of"
                " recursively read-only mounts in its features"
            )


async def find_sources(work: Work) -> None:
    """Host paths may lie on storage that does not answer: looked up in a thread that can be given
    up."""
    config, services = work.config, work.services
    work.wanted = mounts.asked(config.mounts)
    await _check_recursive_read_only(work)
    work.mounted_images = await image_volumes.resolve(services, work.wanted)
    timeout_s = services.config.containers.foreign_path_timeout_s
    work.volumes = _volumes(work)
    if work.checkpoint is not None:
        root = services.paths.container_root(work.id)
        work.stand_ins = stand_ins.declared(
            work.checkpoint.binds, [*work.wanted, *work.volumes], root
        )
    if any(not m.source for m in work.wanted):
        opened = work.opened
        await sources.in_time(timeout_s, opened.subject, sources.find, work.wanted, opened)
    named = cdi.names([device.name for device in config.CDI_devices], config.annotations)
    if named:
        folders = services.config.containers.cdi_dirs
        work.edits = await sources.in_time(timeout_s, "CDI files", cdi.resolve, named, folders)
    if work.settings.hooks_dirs:
        folders = work.settings.hooks_dirs
        work.hooks = await sources.in_time(timeout_s, "hooks", hooks.read, folders)
    if (
        config.linux.security_context.privileged
        and not work.settings.privileged_without_host_devices
    ):
        work.devices = await sources.in_time(timeout_s, "/dev", sources.all_devices)
    if config.devices:
        found = await sources.in_time(timeout_s, "devices", sources.devices, list(config.devices))
        taken = {d.path for d in found}
        work.devices = [d for d in work.devices if d.path not in taken] + found


def _volumes(work: Work) -> list[mounts.Asked]:
    assert work.rootfs is not None
    options = work.config.linux.security_context.namespace_options
    users = (
        options.userns_options if namespaces.has_user_namespace(options) else api.UserNamespace()
    )
    root = work.services.paths.container_root(work.id)
    return anonymous_volumes.declared(work.rootfs.config.volumes, work.wanted, root, users)


async def label_volumes(work: Work) -> None:
    """SELinux: the container's labels, and its files' on volumes that ask for it. They stay there,
    as under other runtimes.

    Raises InvalidArgument, KernelError, DeadlineExceeded, PeerError (the process that labels was
    killed).
    """
    policy = work.services.node.selinux
    if policy is None:
        return
    work.labels = labels.of_container(
        policy, work.config.linux.security_context, work.sandbox.selinux
    )
    paths = [m.source for m in work.wanted if m.request.selinux_relabel and m.request.host_path]
    for path in paths:
        relabel.check_path(path)
    if paths:
        asked = relabel.Relabel(paths, work.labels.mount)
        done = await work.services.jobs.run(relabel.ERRAND, asked, timeout_s=RELABEL_TIMEOUT_S)
        if done.exit_code:  # 137 where the node has no memory for the names of a huge folder
            said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise PeerError(
                f"relabelling {', '.join(paths)} ended with exit code {done.exit_code}: {said[:300]}"
            )


async def build_spec(work: Work) -> None:
    sandbox, services = work.sandbox, work.services
    folder = services.paths.sandbox_root(sandbox.id)
    assert work.rootfs is not None and sandbox.pause is not None
    image = work.rootfs.config
    work.built = build.build(
        build.Inputs(
            container_id=work.id,
            config=work.config,
            sandbox=sandbox.config,
            image=build.ImageFacts(
                user=image.user,
                env=image.env,
                entrypoint=image.entrypoint,
                cmd=image.cmd,
                working_dir=image.working_dir,
                stop_signal=image.stop_signal,
            ),
            accounts=work.accounts,
            wanted=[*work.wanted, *work.volumes, *work.stand_ins],
            devices=work.devices,
            files=pod_files.paths(folder),
            hostname=pod_files.hostname(sandbox.config, sandbox.id, services.node.hostname),
            pause_pid=sandbox.pause.pid,
            target_pid=_target(work),
            cgroup_parent=sandbox.cgroup_parent,
            node=services.node,
            available_capabilities=effective_capabilities(),
            kubernetes={
                "io.kubernetes.cri.sandbox-id": sandbox.id,
                "io.kubernetes.cri.sandbox-name": sandbox.config.metadata.name,
                "io.kubernetes.cri.sandbox-namespace": sandbox.config.metadata.namespace,
                "io.kubernetes.cri.sandbox-uid": sandbox.config.metadata.uid,
            },
            default_apparmor=await _default_apparmor(work),
            edits=work.edits,
            settings=work.settings,
            hooks=work.hooks,
            labels=work.labels,
        )
    )
    if work.checkpoint is not None:
        restore.check(work.checkpoint, work.built.spec, [*work.wanted, *work.volumes])
    work.container = _container(work, image.stop_signal)


async def ask_plugins(work: Work) -> None:
    """They may change the spec."""
    assert work.built is not None and work.container is not None
    await work.services.observer.create_container(work.sandbox, work.container, work.built.spec)


async def tell_plugins_of_end(work: Work) -> None:
    assert work.container is not None
    await work.services.observer.remove_container(work.container)


async def _default_apparmor(work: Work) -> str:
    """The runtime's own profile, loaded, when this container is to enter it."""
    asked = apparmor_profile(work.config.linux.security_context)
    services = work.services
    return (
        await services.default_apparmor.name(services.node, services.jobs)
        if asked.kind == DEFAULT
        else ""
    )


def _target(work: Work) -> int:
    """The process whose pid namespace mode TARGET joins: a running container of the same
    sandbox."""
    options = work.config.linux.security_context.namespace_options
    return target_pid(work.services, work.sandbox, options) if options.pid == api.TARGET else 0


def target_pid(services: Services, sandbox: Sandbox, options: api.NamespaceOption) -> int:
    """Raises NotFound, InvalidArgument (another sandbox's), WrongState (not running)."""
    target = services.index.containers.get(options.target_id)
    if target.sandbox_id != sandbox.id:
        raise InvalidArgument(f"target container {target.id} belongs to another sandbox")
    if not target.running or target.process is None:
        raise WrongState(f"target container {target.id} is not running")
    return target.process.pid


def _container(work: Work, image_signal: str) -> Container:
    assert work.image is not None and work.built is not None
    resources = api.LinuxContainerResources()
    resources.CopyFrom(work.config.linux.resources)
    image, asked = work.image, work.config.image
    name, name_by_digest = work.services.images.names(
        image, [asked.user_specified_image, asked.image]
    )
    return Container(
        id=work.id,
        sandbox_id=work.sandbox.id,
        config=work.config,
        created_at_ns=time.time_ns(),
        boot_id=work.services.node.boot_id,
        image_id=image.id,
        image_ref=name_by_digest,
        image_name=name,
        user=work.built.user,
        stop_signal=signals.chosen(work.config.stop_signal, image_signal),
        log_path=log_path(work.sandbox.config, work.config),
        cgroups_path=work.built.spec["linux"]["cgroupsPath"],
        resources=resources,
        mounted_images={path: root.image_id for path, root in work.mounted_images.items()},
    )


def log_path(sandbox: api.PodSandboxConfig, config: api.ContainerConfig) -> str:
    """The log's absolute path, empty when output is to be discarded. Raises InvalidArgument for one
    outside the pod's."""
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


async def make_folders(work: Work) -> None:
    assert work.rootfs is not None
    paths = work.services.paths
    try:
        paths.container_state(work.id).mkdir(mode=0o700)
        await _make_on_disk(work, str(paths.container_root(work.id)), work.rootfs.lower_dirs)
        if work.checkpoint is not None:
            await restore.fill_layer(work.services, work.id, work.volumes)
            await asyncio.to_thread(stand_ins.make, work.stand_ins)
        if work.labels.mount:
            await asyncio.to_thread(_label, [*work.volumes, *work.stand_ins], work.labels.mount)
    except OSError as error:
        raise disk_error(error, "mkdir", str(paths.container_root(work.id))) from None


def _label(volumes: list[mounts.Asked], label: str) -> None:
    for volume in volumes:
        relabel.relabel_tree(volume.source, label.encode())


async def _make_on_disk(work: Work, root: str, lower_dirs: Sequence[Path]) -> None:
    """Raises WrongState when the copying of volumes was ended because nothing needs it any more."""
    await asyncio.to_thread(make_layer, root, lower_dirs[0])
    if not work.volumes:
        return
    ended = threading.Event()

    def is_given_up() -> bool:
        return ended.is_set() or _is_given_up(work)

    try:
        await in_thread(
            lambda: anonymous_volumes.fill(work.volumes, lower_dirs, is_given_up), ended.set
        )
    except Abandoned:
        raise WrongState(
            f"copying the volumes of the image was ended: sandbox {work.sandbox.id} is being stopped, or the caller is gone"
        ) from None


def _is_given_up(work: Work) -> bool:
    """From any thread."""
    key = _key(work.sandbox, work.config)
    return (
        work.sandbox.phase != "ready"
        or work.services.running.seconds_without_caller(key) > CALLER_GRACE_S
    )


def make_layer(root: str, top_layer: str | os.PathLike[str]) -> None:
    """The writable layer. The root of the merged tree takes owner and mode from `upper`, so that
    has the image's."""
    os.makedirs(root, 0o700, exist_ok=True)  # a checkpoint may be there
    os.mkdir(f"{root}/work", 0o700)
    os.mkdir(f"{root}/upper", 0o755)
    facts = os.stat(top_layer)
    os.chown(f"{root}/upper", facts.st_uid, facts.st_gid)
    os.chmod(f"{root}/upper", facts.st_mode & 0o7777)


async def remove_folders(work: Work) -> None:
    await disk.delete_container_folders(work.services.paths, work.services.trash, work.id)


async def write_bundle(work: Work) -> None:
    assert work.built is not None and work.rootfs is not None and work.container is not None
    folder = work.services.paths.container_state(work.id)
    root = work.services.paths.container_root(work.id)
    settings = work.services.config
    spec = work.built.spec
    places: Sequence[Place] = ()
    runtime = restored = None
    if work.runtime.binary:
        spec, places = external_runtime.bundle(spec, work.wanted, str(folder))
        runtime = OtherRuntime(work.runtime.binary, list(work.runtime.arguments))
    elif work.checkpoint is not None:
        spec, places = external_runtime.with_paths(spec, work.wanted, str(folder))
        restored = restore.bundle(work.services, work.id)
    launch_file = LaunchFile(
        rootfs=_overlay(work.rootfs, root, volatile=work.settings.volatile),
        cgroup=CgroupChoice(
            groups.driver_of(work.container.cgroups_path), settings.cgroup.missing_controllers
        ),
        sandbox=work.sandbox.id,
        tty=bool(work.config.tty),
        stdin=bool(work.config.stdin),
        stdin_once=bool(work.config.stdin_once),
        log_path=work.container.log_path or None,
        log_directory=work.sandbox.config.log_directory,
        image_volumes={
            mount.source.removeprefix(mounts.OUR_MOUNTS): mount.image
            for mount in work.wanted
            if mount.image is not None
        },
        layer_volumes={
            mount.source.removeprefix(mounts.OUR_MOUNTS): Overlay(mount.layers)
            for mount in work.wanted
            if mount.layers
        },
        settled=[mount.source for mount in work.wanted if mount.request.host_path],
        runtime=runtime,
        restore=restored,
        places=places,
    )
    work.binds = host_binds.of(spec, launch_file, host_paths.own_folders(work.services))
    try:
        atomic_file.write_json(str(folder / host_binds.CONFIG), spec)
        launch_file.write(folder)
    except OSError as error:
        raise disk_error(error, "write", str(folder)) from None


def _overlay(rootfs: Rootfs, root: Path, *, volatile: bool) -> Overlay:
    image = rootfs.mount.image if rootfs.mount is not None else None
    lower = [] if image is not None else [str(path) for path in rootfs.lower_dirs]
    return Overlay(lower, str(root / "upper"), str(root / "work"), volatile, image)


async def save(work: Work) -> None:
    assert work.container is not None
    await disk.save_container(work.services.paths, work.container)


async def unsave(work: Work) -> None:
    await disk.forget(work.services.paths.container_record(work.id))


async def prepare_launch(work: Work) -> None:
    assert work.container is not None
    await launch.prepare(work.services, work.sandbox, work.container, work.opened, work.binds)


async def drop_launch(work: Work) -> None:
    assert work.container is not None
    await launch.drop(work.services, work.container)
    await orphans.kill_group(work.container.cgroups_path, work.container.id)


STEPS: Steps[Work] = Steps(
    "create_container",
    [
        Step("checkpoint", find_checkpoint, drop_checkpoint),
        Step("image", find_image),
        Step("sources", find_sources),
        Step("labels", label_volumes),
        Step("spec", build_spec),
        Step("nri", ask_plugins, tell_plugins_of_end),
        Step("folders", make_folders, remove_folders),
        Step("bundle", write_bundle),
        # Neither needs the other. A cgroup without a record is found by the bundle that it was made
        # from.
        Beside((Step("record", save, unsave), Step("launch", prepare_launch, drop_launch))),
    ],
)
