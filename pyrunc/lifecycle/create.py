"""`create`: a container comes to be, up to its program's first instruction or to the wait for `start`.

The caller's process is its parent (CLONE_PARENT through the launcher), so it is reaped like any child. Everything that the
container needs from outside is a descriptor made here: the root as a detached mount, clones of bind sources, namespaces, the
cgroup. Nothing is mounted on the host, and on failure nothing is left.
"""

from __future__ import annotations

import os
import time

from pyrunc import debug
from pyrunc.errors import InvalidSpec, ResourceExhausted
from pyrunc.kernel import mount as kernel_mount
from pyrunc.lifecycle import birth, facts, findings
from pyrunc.lifecycle.descriptors import (
    CgroupChoice,
    Descriptors,
    compiled_filter,
    open_cgroup,
    open_namespaces,
    open_start_socket,
    refuse_settings_of_the_host,
)
from pyrunc.lifecycle.idmaps import maps_of_namespace, write_maps
from pyrunc.lifecycle.null import own_stdio
from pyrunc.lifecycle.sources import open_devices, open_root, open_sources
from pyrunc.plan import build as plans
from pyrunc.plan.lower import lower
from pyrunc.spec.check import check
from pyrunc.spec.value import Value
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.lifecycle.birth import Born
    from pyrunc.lifecycle.sources import Directory, Overlay
    from pyrunc.plan.model import Findings, LoadFilter, Plan
    from pyrunc.spec.model import Linux, Process, Spec

    Parts = Mapping[str, Callable[[Born], object]]

OOM_KILLED = "container init was OOM-killed (memory limit too low?)"
_NO_MOUNTS: Mapping[str, int] = {}


class CreateRequest(Value):
    """What `create` needs.

    `stdio` stay the caller's. `mount_fds`: a mount whose source is `pyrunc:NAME` is a clone of that detached mount.
    `settled`: sources of binds that the caller has looked up, so that a link in their paths now is an error.
    `start_immediately`: return when the program was executed; else it waits on `<state_dir>/start.sock`. `parts`: the
    caller's part at sync points (`plan.build.SYNC_POINTS`), called with the `Born` process. `preserve_fds`: numbers of the
    caller that become 3, 4, …. `cgroup` None: stay in the caller's. `mount_namespace`: path of the one to which a `holder`
    attached the mounts of `mount_fds`, for kernels that cannot clone them detached. `pivot` False:
    the root covers the host's, `keep_groups`: the caller's groups stay, see `plan.build`.
    `trace`: called with the plan and its times (`birth.bearing`).
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
    parts: Mapping[str, Callable[[Born], object]] = {}
    preserve_fds: tuple[int, ...] = ()
    keyring: bool = True
    restrict_oom_score_adj: bool = False
    seccomp_store: str | None = None
    pivot: bool = True
    keep_groups: bool = False
    trace: Callable[[Plan, int, Sequence[tuple[int, int]]], object] | None = None


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
            descriptors.take("hook-state", os.memfd_create("hook-state", os.MFD_CLOEXEC))
        parts = user_namespace_parts(spec.linux, spec.process, _with_hooks(request, descriptors))
        parts = _with_node(request, parts, undo, cgroup)
        plan = _plan(request, found, load_filter, cgroup is not None, parts)
        _say_what_comes(plan, cgroup)
        findings.give_stdio(spec, request.stdio)
        try:
            stdio = request.stdio if found.null_stdio else own_stdio(request.stdio, descriptors.numbers)
            born = _bear(request, plan, stdio, descriptors, undo, parts)
        except birth.EndedEarly:
            if cgroup is not None and cgroup.oom_kills():
                raise ResourceExhausted(OOM_KILLED) from None
            raise
        if cgroup is not None:
            cgroup.occupied()
        undo.commit()
    return Created(
        born.pid, born.pidfd, born.start_time, born.console_fd, cgroup, (*warnings, *plan.warnings)
    )


def _say_what_comes(plan: Plan, cgroup: Cgroup | None) -> None:
    if not debug.on():
        return
    from pyrunc.plan.show import line

    debug.say("cgroup %s", "of the caller" if cgroup is None else cgroup.path)
    for number, op in enumerate(plan.ops, 1):
        debug.say("plan line %d: %s", number, line(op))


def _bear(
    request: CreateRequest,
    plan: Plan,
    stdio: Sequence[int],
    descriptors: Descriptors,
    undo: Undo,
    parts: Parts,
) -> birth.Born:
    process = request.spec.process
    times: list[tuple[int, int]] | None = None if request.trace is None else []
    started_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    try:
        return birth.bear(
            lower(plan, timed=times is not None),
            descriptors.numbers,
            undo,
            stdio=stdio,
            args=process.args if process else ("",),
            parts=parts,
            extra={3 + i: number for i, number in enumerate(request.preserve_fds)},
            times=times,
        )
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
        parts = user_namespace_parts(spec.linux, spec.process, _with_hooks(request, descriptors))
        parts = _with_node(request, parts, Undo())
        return _plan(request, found, load_filter, request.cgroup is not None, parts)


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


def _with_node(request: CreateRequest, wanted: Parts, undo: Undo, cgroup: Cgroup | None = None) -> Parts:
    """What the node gives the process as soon as it exists: its cgroup, a share of the caches, links."""
    linux, more = request.spec.linux, []  # type: Linux, list[Callable[[Born], object]]
    if request.cgroup is not None and (owner := findings.cgroup_owner(request.spec)) is not None:
        # Not before: who has joined a user namespace could not be born in a group of another's.
        more.append(lambda born: cgroup.give_to(owner) if cgroup is not None else None)
    if linux.intel_rdt:
        from pyrunc.lifecycle import rdt

        asked, root = linux.intel_rdt, rdt.mounted()
        more.append(lambda born: rdt.enter(asked, request.id, born.pid, undo, root))
    if linux.net_devices:
        from pyrunc.lifecycle import net_devices

        more.append(lambda born: net_devices.move(linux.net_devices, born.pid))
    return {**wanted, "born": birth.in_turn(wanted.get("born"), *more)} if more else wanted


def _hand_out_listener(request: CreateRequest) -> Callable[[Born], object]:
    """The filter's notifications go to whoever waits on listenerPath; without that the process would wait for an answer."""
    from pyrunc.lifecycle import inside, listener

    def part(born: Born) -> None:
        told = inside.state(request.id, request.spec, request.bundle, "creating", born.pid)
        listener.send(born, request.spec, told)

    return part


def user_namespace_parts(linux: Linux, process: Process | None, wanted: Parts) -> Parts:
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
