"""Compiles an exec into a launch. Fields that the OCI process object of the request lacks are taken
from the container's process.

The launcher joins all namespaces of the container's first process at once, by its pidfd, and clones
the new process. The new process then sets its own limits, capabilities, ids and seccomp filter.
"""

from __future__ import annotations

import os
from errno import ENOENT

from pyrunc.compile import host, rootfs_probe
from pyrunc.compile.container import CompiledLaunch
from pyrunc.compile.descriptors import compiled_filter
from pyrunc.compile.idmaps import maps_of_process
from pyrunc.errors import KernelError
from pyrunc.kernel.cgroup import open_present_group
from pyrunc.kernel.fd import closing_fd
from pyrunc.launch.model import Launch
from pyrunc.plan import build as plans
from pyrunc.plan.lower import lower
from pyrunc.spec.check import check_process
from pyrunc.spec.parse import parse_process
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Any

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.compile.descriptors import NamedDescriptors
    from pyrunc.plan.model import LoadFilter, Plan
    from pyrunc.program.model import LoweredProgram
    from pyrunc.spec.model import IdMap, Process, Spec

PROGRAMS_AT_MOST, SEEN_AT_MOST = 2, 8  # of one container; a program has 28 KiB


class ExecPrograms:
    """A cache of plans and compiled programs, for commands that are executed again and again in one
    container, such as probes."""

    __slots__ = ("_filter", "_programs", "_seen")

    def __init__(self) -> None:
        self._filter: LoadFilter | None = None
        self._programs: dict[Hashable, tuple[Plan, LoweredProgram]] = {}
        self._seen: list[int] = []

    def filter(self, spec: Spec) -> LoadFilter | None:
        """Return the result of `compiled_filter` for the container's configuration `spec`. Later
        calls return the first call's filter."""
        if self._filter is None:
            self._filter = compiled_filter(spec.linux.seccomp)
        return self._filter

    def load(self, key: Hashable) -> tuple[Plan, LoweredProgram] | None:
        """Return the plan and the program that `store` has stored under `key`; None if there are
        none."""
        return self._programs.get(key)

    def store(self, key: Hashable, plan: Plan, program: LoweredProgram) -> None:
        """Store a plan and its program, unless the cache is full. `key`: the inputs from which both
        were made. The first call with `key` stores nothing, so that commands that run only once
        take no room."""
        if hash(key) not in self._seen:
            self._seen = [*self._seen[1 - SEEN_AT_MOST :], hash(key)]
        elif len(self._programs) < PROGRAMS_AT_MOST:
            self._programs[key] = plan, program


class ExecRequest(Value):
    """The request for a process in a running container, which `compile_exec` compiles.

    - `pid`, `pidfd`: the container's first process. `pidfd` -1: the launching process adds the
      pidfd, as the descriptor `container`.
    - `spec`: the container's configuration
    - `process`: the process to run, for example from `merged`
    - `stdio`: the caller's descriptors for 0 to 2, which the caller closes. A process with a
      terminal gets the terminal instead.
    - `cgroup`: the cgroup for the process. None: stay in the caller's cgroup.
    - `follow`: if `cgroup` is gone or takes no processes, enter the present cgroup of the
      container's first process. False: that is an error.
    - `preserve_fds`: the caller's descriptors that become 3, 4, …
    - `id`, `bundle`: the container's id and bundle, for a seccomp agent; `id` also names the
      container's resctrl group
    - `keep_groups`: keep the caller's supplementary groups
    - `attached`: the runtime stays and copies the process's terminal to its own
    - `timed`: the launch reports when each operation is done
    - `programs`: the cache of plans and programs for this container
    """

    pid: int
    pidfd: int
    spec: Spec
    process: Process
    stdio: tuple[int, int, int] = (0, 1, 2)
    cgroup: Cgroup | None = None
    follow: bool = True
    preserve_fds: tuple[int, ...] = ()
    keyring: str = ""
    id: str = ""
    bundle: str = ""
    keep_groups: bool = False
    attached: bool = False
    timed: bool = False
    programs: ExecPrograms | None = None


def merged(spec: Spec, document: dict[str, Any]) -> Process:
    """Parse an OCI process object, and take missing fields from the container's process. Raises
    InvalidSpec.

    `terminal` is never taken from the container's process. The umask is taken if the object's user
    has none.
    """
    process, base = parse_process(document), spec.process
    if base is None:
        return process
    changes = {
        field: getattr(base, field)
        for key, field in _INHERITED
        if document.get(key) is None or (key == "rlimits" and not process.rlimits)
    }
    if "user" not in changes and process.user.umask is None:
        changes["user"] = process.user.replace(umask=base.user.umask)
    return process.replace(**changes) if changes else process


_INHERITED = (
    ("cwd", "cwd"),
    ("env", "env"),
    ("user", "user"),
    ("capabilities", "capabilities"),
    ("rlimits", "rlimits"),
    ("noNewPrivileges", "no_new_privileges"),
    ("apparmorProfile", "apparmor_profile"),
    ("selinuxLabel", "selinux_label"),
    ("oomScoreAdj", "oom_score_adj"),
    ("scheduler", "scheduler"),
    ("ioPriority", "io_priority"),
    ("execCPUAffinity", "exec_cpu_affinity"),
)


def compile_exec(request: ExecRequest, descriptors: NamedDescriptors) -> CompiledLaunch:
    """Compile the launch of an exec. Raises InvalidSpec, KernelError, and WrongState when the
    container's first process has ended."""
    spec, process = request.spec, request.process
    check_process(process)
    programs = request.programs or ExecPrograms()
    load_filter = programs.filter(spec)
    home = "" if rootfs_probe.has_home(process.env) else _home(request)
    owner = rootfs_probe.stdio_owner(process, _uid_mappings(spec, request.pid))
    if request.pidfd >= 0:
        # A pidfd, not the namespaces' files: one setns(2) enters all namespaces, and a pidfd cannot
        # refer to a later process with the same pid.
        descriptors.take("container", os.dup(request.pidfd))
    if request.cgroup is not None:
        group = _open_group(request.cgroup, request.pid, follow=request.follow)
        descriptors.take("cgroup", group)
    plan, program = _program(
        request,
        plans.ExecPlanOptions(
            load_filter=load_filter,
            cgroup=request.cgroup is not None,
            home=home,
            keyring=request.keyring,
            preserve=len(request.preserve_fds),
            keep_groups=request.keep_groups,
            attached=request.attached,
        ),
    )
    launch = Launch(
        program,
        descriptors.numbers,
        request.stdio,
        args=process.args,
        preserve_fds=request.preserve_fds,
        stdio_owner=owner,
        id=request.id,
        bundle=os.path.abspath(request.bundle),
        oci_version=spec.version,
        annotations=spec.annotations,
        status="running",
        container_pid=request.pid,
        cgroup=request.cgroup if request.follow else None,
    )
    return CompiledLaunch(launch, plan, plan.warnings)


def _open_group(group: Cgroup, pid: int, *, follow: bool) -> int:
    """Open the cgroup `group` for the new process. If the cgroup is gone and `follow` is set, open
    the present cgroup of the container's first process, `pid`, instead."""
    try:
        return group.open_directory()
    except KernelError as error:
        # A first process that may write to the cgroup tree can move to another group and remove
        # this one. runc follows it, too.
        if error.errno != ENOENT or not follow:
            raise
    return open_present_group(pid)


def _program(request: ExecRequest, options: plans.ExecPlanOptions) -> tuple[Plan, LoweredProgram]:
    """Return the plan and the compiled program of the exec. If an earlier request has stored them
    in `request.programs`, they are taken from there."""
    facts, programs = host.host(), request.programs
    key = request.process, facts, options, request.timed
    stored = programs.load(key) if programs is not None else None
    if stored is not None:
        return stored
    plan = plans.build_exec(request.spec.linux, request.process, facts, options)
    program = lower(plan, timed=request.timed)
    if programs is not None:
        programs.store(key, plan, program)
    return plan, program


def _uid_mappings(spec: Spec, pid: int) -> tuple[IdMap, ...]:
    """Return the container's map of uids. It is read from the first process, `pid`, if the
    container joined a user namespace by path and so has no map in its configuration."""
    linux = spec.linux
    if linux.namespace("user") is None or linux.uid_mappings:
        return linux.uid_mappings
    return maps_of_process(pid)[0]


def _home(request: ExecRequest) -> str:
    """Return the home of the user in the container's present /etc/passwd."""
    try:
        # The root of the process, so that mounts over /etc, such as a volume with its own passwd,
        # count.
        root = os.open(f"/proc/{request.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ""
    with closing_fd(root):
        return rootfs_probe.home(root, request.process.user.uid)
