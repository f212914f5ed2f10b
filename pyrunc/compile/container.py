"""Compiles a container's request into a launch: opens descriptors for all that the container needs
from outside, reads its files, makes its cgroup, builds and lowers its plan. Nothing of the
container runs yet.

These descriptors are the root as a detached mount, clones of bind sources, namespaces, and the
cgroup. Nothing is mounted on the host. Another process, such as a shim, may run the launch. That
process adds stdio, and the pod's mounts and namespaces that the launch names (`Launch.pinned`).
"""

from __future__ import annotations

import os

from pyrunc import debug
from pyrunc.compile import host, rootfs_probe
from pyrunc.compile.descriptors import (
    NamedDescriptors,
    compiled_filter,
    filter_devices,
    make_cgroup,
    open_namespaces,
    open_start_socket,
    refuse_settings_of_the_host,
)
from pyrunc.compile.idmaps import maps_of_namespace
from pyrunc.compile.requests import CgroupChoice, keyring_name
from pyrunc.compile.sources import (
    binds_in_root,
    open_devices,
    open_root,
    open_sources,
    pinned_trees,
)
from pyrunc.errors import InvalidSpec
from pyrunc.kernel import mount as kernel_mount
from pyrunc.launch.model import Launch
from pyrunc.launch.stdio import is_null
from pyrunc.plan import build as plans
from pyrunc.plan.lower import lower
from pyrunc.plan.parent import HOOK_STATE, HOOK_STDERR, ParentOptions
from pyrunc.spec.check import check
from pyrunc.spec.value import Value
from pyrunc.timings import Timings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.compile.bind_source import BindSource
    from pyrunc.compile.image_mount import MountedImage
    from pyrunc.compile.requests import Overlay
    from pyrunc.compile.sources import Directory
    from pyrunc.launch.run import ChildProcess
    from pyrunc.plan.model import LoadFilter, Plan, RootfsFacts
    from pyrunc.spec.model import Spec
    from pyrunc.undo import Undo


class CreateRequest(Value):
    """The request for a container, which `compile_container` compiles.

    Streams and descriptors:

    - `stdio`: the caller's descriptors for 0 to 2, which the caller closes. None: the launching
      process adds pipes.
    - `nulls`: with `stdio` None, the numbers among 0 to 2 that will be null devices
    - `preserve_fds`: the caller's descriptors that become 3, 4, …
    - `attached`: the runtime stays and copies the process's terminal to its own

    Mounts:

    - `mount_fds`: detached mounts by name. A mount whose source is `pyrunc:NAME` is a clone of the
      mount NAME.
    - `mount_namespace`: path of the mount namespace in which a pause process attached these mounts,
      for kernels that cannot clone detached mounts
    - `pinned`: names of mounts that the launching process adds (`Launch.pinned`)
    - `images`: descriptors of images that the caller has mounted, by the path of the image's EROFS
      index
    - `image_volumes`: images and overlays by NAME, each mounted for the bind whose source is
      `pyrunc:NAME`
    - `sources`: facts about bind sources, by their paths in `spec`
    - `source_fds`: O_PATH descriptors of bind sources, by the same paths. The caller closes them.
      These paths are not looked up again. A bind that the container's process makes itself needs no
      descriptor.
    - `pivot`: False: mount the root over the host's root

    Cgroup, credentials and start:

    - `cgroup`: how the cgroup is made. None: stay in the caller's cgroup.
    - `existing_cgroup`: use this cgroup instead of making one
    - `keep_groups`: keep the caller's supplementary groups
    - `start_immediately`: execute the container's command. False: wait for `start` on
      `<state_dir>/start.sock`.
    - `record`: is called with the process as soon as the process exists, and writes the process to
      the container's state on disk
    - `timed`: the launch reports when each operation is done
    - `trace`: is called with the plan, the time of the start in ns, and the times of the launch
      (`launch.run.launch_steps`)
    """

    id: str
    bundle: str
    spec: Spec
    rootfs: Directory | Overlay
    stdio: tuple[int, int, int] | None = (0, 1, 2)
    nulls: tuple[int, ...] = ()
    state_dir: str = ""
    cgroup: CgroupChoice | None = CgroupChoice()
    existing_cgroup: Cgroup | None = None
    mount_fds: Mapping[str, int] = {}
    pinned: tuple[str, ...] = ()
    mount_namespace: str = ""
    images: Mapping[str, int] = {}
    image_volumes: Mapping[str, MountedImage | Overlay] = {}
    sources: Mapping[str, BindSource] = {}
    source_fds: Mapping[str, int] = {}
    start_immediately: bool = True
    record: Callable[[ChildProcess], object] | None = None
    attached: bool = False
    preserve_fds: tuple[int, ...] = ()
    keyring: bool = True
    pivot: bool = True
    keep_groups: bool = False
    trace: Callable[[Plan, int, Sequence[tuple[str, int]]], object] | None = None
    timed: bool = False


class CompiledLaunch(Value):
    """A launch and the plan from which it was lowered. `warnings` are lines for a person."""

    launch: Launch
    plan: Plan
    warnings: tuple[str, ...]


def compile_container(
    request: CreateRequest,
    descriptors: NamedDescriptors,
    undo: Undo,
    timings: Timings | None = None,
) -> CompiledLaunch:
    """Compile the launch of the container's first process. Raises InvalidSpec, KernelError.

    - `descriptors`: gets the descriptors that the process inherits
    - `undo`: gets the steps that remove the container's cgroup and start socket
    """
    timings = timings or Timings()
    check(request.spec)
    request = _with_namespaces(request, descriptors)
    spec = request.spec
    load_filter = compiled_filter(spec.linux.seccomp)
    timings.end("check, namespaces, filter")
    rootfs_facts = _probe(request, descriptors)
    timings.end("root and sources")
    cgroup, warnings = make_cgroup(
        request.id,
        spec.linux,
        spec.annotations,
        request.cgroup,
        descriptors,
        undo,
        existing=request.existing_cgroup,
    )
    if cgroup is not None:
        filter_devices(cgroup, spec.linux)
    timings.end("cgroup")
    # Made here, not in the process: its path is in the state folder of the host, which the
    # container does not see.
    if not request.start_immediately:
        descriptors.take("start", open_start_socket(request.state_dir, undo))
    if spec.hooks.start_container:
        for name in (HOOK_STATE, HOOK_STDERR):
            # Empty now: the state holds the pid, which is not known before the clone.
            descriptors.take(name, os.memfd_create(name, os.MFD_CLOEXEC))
    plan = _plan(request, rootfs_facts, load_filter, cgroup is not None)
    timings.end("plan")
    _log_plan(plan, cgroup)
    process = spec.process
    lowered = lower(plan, timed=request.timed or request.trace is not None)
    timings.end("lower")
    launch = Launch(
        lowered,
        descriptors.numbers,
        request.stdio or (),
        args=process.args if process else ("",),
        preserve_fds=request.preserve_fds,
        pinned=pinned_trees(request),
        stdio_owner=rootfs_probe.stdio_owner(spec.process, spec.linux.uid_mappings),
        own_nulls=not rootfs_facts.null_stdio,
        id=request.id,
        bundle=os.path.abspath(request.bundle),
        oci_version=spec.version,
        annotations=spec.annotations,
        cgroup=cgroup,
    )
    return CompiledLaunch(launch, plan, (*warnings, *plan.warnings))


def _probe(request: CreateRequest, descriptors: NamedDescriptors) -> RootfsFacts:
    """Open the root and the bind sources, add them to `descriptors`, and return facts about the
    container's files."""
    spec = request.spec
    open_root(request, descriptors)
    in_root = binds_in_root(request)
    own_binds = rootfs_probe.resolve_binds(spec, request.sources, in_root)
    open_sources(request, descriptors, {*own_binds, *in_root})
    open_devices(spec, descriptors)
    if spec.linux.sysctl:
        descriptors.take("proc", kernel_mount.open_proc())
    nulls = request.nulls
    if request.stdio is not None:
        nulls = tuple(n for n, number in enumerate(request.stdio) if is_null(number))
    facts = rootfs_probe.probe(
        spec,
        descriptors.numbers,
        nulls,
        own_binds,
        request.sources,
        pinned_trees(request).keys(),
        request.pivot,
    )
    return facts.replace(root_sources=in_root) if in_root else facts


def preview(request: CreateRequest) -> Plan:
    """Return the plan that `create` would run now, without making a process, cgroup or socket.
    Raises InvalidSpec, KernelError, Unsupported."""
    check(request.spec)
    with NamedDescriptors() as descriptors:
        request = _with_namespaces(request, descriptors)
        rootfs_facts = _probe(request, descriptors)
        load_filter = compiled_filter(request.spec.linux.seccomp)
        return _plan(request, rootfs_facts, load_filter, request.cgroup is not None)


def _log_plan(plan: Plan, cgroup: Cgroup | None) -> None:
    if not debug.on():
        return
    from pyrunc.plan.show import numbered

    debug.say("cgroup %s", "of the caller" if cgroup is None else cgroup.path)
    for number, text in numbered(plan):
        debug.say("plan line %s: %s", number, text)


def _plan(
    request: CreateRequest,
    rootfs_facts: RootfsFacts,
    load_filter: LoadFilter | None,
    in_cgroup: bool,
) -> Plan:
    hooks = request.spec.hooks
    parent = ParentOptions(
        record=request.record is not None,
        cgroup_owner=rootfs_probe.cgroup_owner(request.spec) if in_cgroup else None,
        hook_folder=_hook_folder(request) if hooks.create_container else "",
        attached=request.attached,
    )
    return plans.build(
        request.spec,
        host.host(),
        rootfs_facts,
        plans.StartPlanOptions(
            load_filter=load_filter,
            cgroup=in_cgroup,
            parent=parent,
            await_start=not request.start_immediately,
            keyring=keyring_name(request.id) if request.keyring else "",
            preserve=len(request.preserve_fds),
            pivot=request.pivot,
            keep_groups=request.keep_groups,
        ),
    )


def _with_namespaces(request: CreateRequest, descriptors: NamedDescriptors) -> CreateRequest:
    """Open the namespaces that the container joins, and return the request. If one of them is a
    user namespace, the returned request has its id maps. Raises InvalidSpec if the configured maps
    differ from these."""
    spec = request.spec
    open_namespaces(spec.linux, descriptors)
    refuse_settings_of_the_host(spec, descriptors)
    user = spec.linux.namespace("user")
    joined = descriptors.numbers.get("namespace:user")
    if user is None or joined is None:
        return request
    maps = maps_of_namespace(user.path, joined)
    configured = spec.linux.uid_mappings, spec.linux.gid_mappings
    # Overlays and stdio are given to ids by these maps: with other maps, files would belong to
    # foreign users.
    if any(configured) and list(map(set, configured)) != list(map(set, maps)):
        raise InvalidSpec(
            "linux.uidMappings", f"differ from the mappings of the user namespace {user.path}"
        )
    linux = spec.linux.replace(uid_mappings=maps[0], gid_mappings=maps[1])
    return request.replace(spec=spec.replace(linux=linux))


def _hook_folder(request: CreateRequest) -> str:
    """Return the folder `root.path` of the bundle, where createContainer hooks expect the
    container's root. Raises InvalidSpec when it does not exist."""
    root = request.spec.root
    path = os.path.abspath(os.path.join(request.bundle, root.path if root else ""))
    # As under runc, such hooks find the container's mounts at root.path, so the root is attached
    # there for them.
    if not os.path.isdir(path):
        raise InvalidSpec("hooks.createContainer", f"root.path {path} is not a directory")
    return path
