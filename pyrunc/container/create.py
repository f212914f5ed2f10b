"""`create`: a container comes to be, up to its program's first instruction or to the wait for `start`.

The caller's process is its parent (CLONE_PARENT through the launcher), so it is reaped like any child. Everything that the
container needs from outside is a descriptor made here: the root as a detached mount, clones of bind sources, namespaces, the
cgroup. Nothing is mounted on the host, and on failure nothing is left.
"""

from __future__ import annotations

import os
import time

from pyrunc import debug
from pyrunc.compile import host as facts
from pyrunc.compile import rootfs_probe as findings
from pyrunc.compile.descriptors import (
    CgroupChoice,
    Descriptors,
    compiled_filter,
    open_cgroup,
    open_namespaces,
    open_start_socket,
    refuse_settings_of_the_host,
)
from pyrunc.compile.idmaps import maps_of_namespace
from pyrunc.compile.null import own_stdio
from pyrunc.compile.sources import open_devices, open_root, open_sources
from pyrunc.errors import InvalidSpec, ResourceExhausted
from pyrunc.kernel import mount as kernel_mount
from pyrunc.launch import run
from pyrunc.launch.model import Launch
from pyrunc.plan import build as plans
from pyrunc.plan.lower import lower
from pyrunc.plan.parent import HOOK_STATE, HOOK_STDERR, Parent
from pyrunc.spec.check import check
from pyrunc.spec.value import Value
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.compile.sources import Directory, Overlay
    from pyrunc.launch.run import ChildProcess
    from pyrunc.plan.model import Findings, LoadFilter, Plan
    from pyrunc.spec.model import Spec


OOM_KILLED = "container init was OOM-killed (memory limit too low?)"
_NO_MOUNTS: Mapping[str, int] = {}


class CreateRequest(Value):
    """What `create` needs.

    `stdio` stay the caller's. `mount_fds`: a mount whose source is `pyrunc:NAME` is a clone of that detached mount.
    `settled`: sources of binds that the caller has looked up, so that a link in their paths now is an error.
    `start_immediately`: return when the program was executed; else it waits on `<state_dir>/start.sock`. `record`: puts the
    process into the container's state on disk as soon as it exists. `attached`: see `plan.parent.Parent`. `preserve_fds`: numbers of the caller that become 3, 4, …. `cgroup` None: stay in the caller's. `mount_namespace`: path of the one to which a `holder`
    attached the mounts of `mount_fds`, for kernels that cannot clone them detached. `pivot` False:
    the root covers the host's, `keep_groups`: the caller's groups stay, see `plan.build`.
    `trace`: called with the plan and its times (`launch.run.launch_steps`).
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
    settled: tuple[str, ...] = ()
    start_immediately: bool = True
    record: Callable[[ChildProcess], object] | None = None
    attached: bool = False
    preserve_fds: tuple[int, ...] = ()
    keyring: bool = True
    restrict_oom_score_adj: bool = False
    seccomp_store: str | None = None
    pivot: bool = True
    keep_groups: bool = False
    trace: Callable[[Plan, int, Sequence[tuple[str, int]]], object] | None = None


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
    check(request.spec)
    with Undo() as undo, Descriptors() as descriptors:
        request = _with_namespaces(request, descriptors)
        spec = request.spec
        load_filter = compiled_filter(spec.linux.seccomp, request.seccomp_store)
        open_root(request, descriptors)
        inside = findings.inside(spec, request.settled)
        open_sources(request, descriptors, inside)
        open_devices(spec, descriptors)
        if spec.linux.sysctl:
            descriptors.take("proc", kernel_mount.open_proc())
        found = findings.look(spec, descriptors.numbers, request.stdio, inside, request.pivot)
        cgroup, warnings = open_cgroup(
            request.id, spec.linux, spec.annotations, request.cgroup, descriptors, undo
        )
        if not request.start_immediately:
            descriptors.take("start", open_start_socket(request.state_dir, undo))
        if spec.hooks.start_container:
            for name in (HOOK_STATE, HOOK_STDERR):
                descriptors.take(name, os.memfd_create(name, os.MFD_CLOEXEC))
        plan = _plan(request, found, load_filter, cgroup is not None)
        _say_what_comes(plan, cgroup)
        findings.give_stdio(spec, request.stdio)
        try:
            stdio = request.stdio if found.null_stdio else own_stdio(request.stdio, descriptors.numbers)
            child = _launch(request, plan, stdio, descriptors, undo, cgroup)
        except run.EndedEarly:
            if cgroup is not None and cgroup.oom_kills():
                raise ResourceExhausted(OOM_KILLED) from None
            raise
        if cgroup is not None:
            cgroup.occupied()
        undo.commit()
    said = (*warnings, *plan.warnings)
    return Created(child.pid, child.pidfd, child.start_time, child.console_fd, cgroup, said)


def _say_what_comes(plan: Plan, cgroup: Cgroup | None) -> None:
    if not debug.on():
        return
    from pyrunc.plan.show import numbered

    debug.say("cgroup %s", "of the caller" if cgroup is None else cgroup.path)
    for number, text in numbered(plan):
        debug.say("plan line %s: %s", number, text)


def _launch(
    request: CreateRequest,
    plan: Plan,
    stdio: Sequence[int],
    descriptors: Descriptors,
    undo: Undo,
    cgroup: Cgroup | None,
) -> run.ChildProcess:
    spec, process = request.spec, request.spec.process
    times: list[tuple[str, int]] | None = None if request.trace is None else []
    launch = Launch(
        lower(plan, timed=times is not None),
        descriptors.numbers,
        stdio,
        args=process.args if process else ("",),
        preserve_fds=request.preserve_fds,
        id=request.id,
        bundle=os.path.abspath(request.bundle),
        oci_version=spec.version,
        annotations=spec.annotations,
        cgroup=cgroup,
    )
    started_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    try:
        return run.launch(launch, undo, record=request.record, times=times)
    finally:
        if request.trace is not None and times is not None:
            request.trace(plan, started_ns, times)


def preview(request: CreateRequest) -> Plan:
    """The plan that `create` would carry out now. Nothing is made: the detached mounts that are looked at go away again."""
    check(request.spec)
    with Descriptors() as descriptors:
        request = _with_namespaces(request, descriptors)
        spec = request.spec
        open_root(request, descriptors)
        inside = findings.inside(spec, request.settled)
        open_sources(request, descriptors, inside)
        open_devices(spec, descriptors)
        found = findings.look(spec, descriptors.numbers, request.stdio, inside, request.pivot)
        load_filter = compiled_filter(spec.linux.seccomp, request.seccomp_store)
        return _plan(request, found, load_filter, request.cgroup is not None)


def _plan(
    request: CreateRequest,
    found: Findings,
    load_filter: LoadFilter | None,
    in_cgroup: bool,
) -> Plan:
    hooks = request.spec.hooks
    parent = Parent(
        record=request.record is not None,
        cgroup_owner=findings.cgroup_owner(request.spec) if in_cgroup else None,
        hook_folder=_hook_folder(request) if hooks.create_container else "",
        attached=request.attached,
    )
    return plans.build(
        request.spec,
        facts.host(),
        found,
        load_filter=load_filter,
        cgroup=in_cgroup,
        parent=parent,
        await_start=not request.start_immediately,
        keyring=f"_ses.{request.id}" if request.keyring else "",
        restrict_oom_score_adj=request.restrict_oom_score_adj,
        preserve=len(request.preserve_fds),
        pivot=request.pivot,
        keep_groups=request.keep_groups,
    )


def _with_namespaces(request: CreateRequest, descriptors: Descriptors) -> CreateRequest:
    """Open the namespaces that are joined; the request with the id maps that a joined user namespace really has."""
    spec = request.spec
    open_namespaces(spec.linux, descriptors)
    refuse_settings_of_the_host(spec, descriptors)
    user = spec.linux.namespace("user")
    joined = descriptors.numbers.get("namespace:user")
    if user is None or joined is None:
        return request
    maps = maps_of_namespace(user.path, joined)
    asked = spec.linux.uid_mappings, spec.linux.gid_mappings
    if any(asked) and list(map(set, asked)) != list(map(set, maps)):
        raise InvalidSpec("linux.uidMappings", f"are not those of the user namespace {user.path}")
    linux = spec.linux.replace(uid_mappings=maps[0], gid_mappings=maps[1])
    return request.replace(spec=spec.replace(linux=linux))


def _hook_folder(request: CreateRequest) -> str:
    """Where createContainer hooks find the container's root: the bundle's folder of it, which must exist."""
    root = request.spec.root
    path = os.path.abspath(os.path.join(request.bundle, root.path if root else ""))
    if not os.path.isdir(path):
        raise InvalidSpec("hooks.createContainer", f"need root.path to be a directory, {path} is none")
    return path
