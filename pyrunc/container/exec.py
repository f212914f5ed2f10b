"""`exec`: another process enters a container that runs. It is a child of the caller and lives in the container's cgroup.

The launcher joins the namespaces of the container's first process by its pidfd, all at once, and clones; what follows is the
identity half of a start. What the request does not say is taken from the container's configuration.
"""

from __future__ import annotations

import os
from errno import EBUSY, ENOENT

from pyrunc.compile import host as facts
from pyrunc.compile import rootfs_probe as findings
from pyrunc.compile.descriptors import Descriptors, compiled_filter
from pyrunc.compile.idmaps import maps_of_process
from pyrunc.compile.null import own_stdio
from pyrunc.errors import KernelError, NotFound, WrongState
from pyrunc.launch import run
from pyrunc.launch.model import Launch
from pyrunc.plan import build as plans
from pyrunc.plan.lower import lower
from pyrunc.program.errors import OperationFailed
from pyrunc.spec.check import check_process
from pyrunc.spec.parse import parse_process
from pyrunc.spec.value import Value
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from typing import Any

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.plan.lower import Lowered
    from pyrunc.plan.model import LoadFilter
    from pyrunc.spec.model import Process, Spec


class ExecRequest(Value):
    """What `execute` needs: the container's first process and configuration, and what is to run (see `merged`).

    `cgroup` None: stay in the caller's. `stdio` stay the caller's and are not used with a terminal. `id` and `bundle` are
    what a seccomp agent is told; `id` names the group of intelRdt too. `attached`: see `plan.parent.Parent`. `keep` gets the program and its warnings when it did
    its work alone, without a step of its parent.
    """

    pid: int
    pidfd: int
    spec: Spec
    process: Process
    stdio: tuple[int, int, int] = (0, 1, 2)
    cgroup: Cgroup | None = None
    preserve_fds: tuple[int, ...] = ()
    keyring: str = ""
    restrict_oom_score_adj: bool = False
    seccomp_store: str | None = None
    id: str = ""
    bundle: str = ""
    keep_groups: bool = False
    attached: bool = False
    keep: Callable[[Lowered, tuple[str, ...]], object] | None = None


class Executed(Value):
    """The process. The descriptors are the caller's now."""

    pid: int
    pidfd: int
    start_time: int
    console_fd: int | None
    warnings: tuple[str, ...] = ()


def merged(spec: Spec, asked: dict[str, Any]) -> Process:
    """An OCI process object, with what it does not name taken from the container's. Raises InvalidSpec.

    Never inherited: the terminal. The umask follows the container's unless the object's user has one.
    """
    process, base = parse_process(asked), spec.process
    if base is None:
        return process
    changes: dict[str, Any] = {
        field: getattr(base, field)
        for key, field in _INHERITED
        if asked.get(key) is None or (key == "rlimits" and not process.rlimits)
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


def execute(request: ExecRequest) -> Executed:
    """Run the process; returns when its program was executed. Raises like `create`, WrongState for a dead container."""
    return run.drive(executing(request))


def executing(request: ExecRequest) -> Generator[int, None, Executed]:
    """`execute` in steps, see `launch.run.launch_steps`: for a caller that must not wait for a frozen or throttled container."""
    spec, process = request.spec, request.process
    check_process(process)
    load_filter = compiled_filter(spec.linux.seccomp, request.seccomp_store)
    home = "" if findings.has_home(process) else _home(request)
    if not process.terminal:
        findings.give_stdio(_with_maps(spec, request.pid).replace(process=process), request.stdio)
    try:
        return (yield from _run(request, load_filter, home, None))
    except OperationFailed as error:
        # The container's init may have moved to a group below: then this one takes no processes (cgroup v2, no internal
        # processes), or it is gone.
        if request.cgroup is None or error.errno not in (EBUSY, ENOENT) or error.call != "clone":
            raise
        return (yield from _run(request, load_filter, home, _current_group(request.pid)))


def _with_maps(spec: Spec, pid: int) -> Spec:
    """A configuration that only names its user namespace does not say its maps; the container's process does."""
    linux = spec.linux
    if linux.namespace("user") is None or linux.uid_mappings:
        return spec
    uids, gids = maps_of_process(pid)
    return spec.replace(linux=linux.replace(uid_mappings=uids, gid_mappings=gids))


def _run(
    request: ExecRequest, load_filter: LoadFilter | None, home: str, group: str | None
) -> Generator[int, None, Executed]:
    process = request.process
    with Undo() as undo, Descriptors() as descriptors:
        descriptors.take("container", os.dup(request.pidfd))
        if group is not None:
            descriptors.take("cgroup", os.open(group, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        elif request.cgroup is not None:
            descriptors.take("cgroup", request.cgroup.open_directory())
        stdio = own_stdio(request.stdio, descriptors.numbers)
        plan = plans.build_exec(
            request.spec.linux,
            process,
            facts.host(),
            load_filter=load_filter,
            cgroup="cgroup" in descriptors.numbers,
            home=home,
            keyring=request.keyring,
            restrict_oom_score_adj=request.restrict_oom_score_adj,
            preserve=len(request.preserve_fds),
            keep_groups=request.keep_groups,
            attached=request.attached,
        )
        try:
            lowered = lower(plan)
            child = yield from run.launch_steps(_launch(request, lowered, stdio, descriptors), undo)
        except KernelError as error:
            if error.call == "setns" and not _alive(request.pidfd):
                raise WrongState("the container is not running") from None
            raise
        undo.commit()
    if request.keep is not None and not lowered.steps and not process.terminal and group is None:
        request.keep(lowered, plan.warnings)
    return Executed(child.pid, child.pidfd, child.start_time, child.console_fd, plan.warnings)


def _launch(request: ExecRequest, lowered: Lowered, stdio: Sequence[int], descriptors: Descriptors) -> Launch:
    spec = request.spec
    return Launch(
        lowered,
        descriptors.numbers,
        stdio,
        args=request.process.args,
        preserve_fds=request.preserve_fds,
        id=request.id,
        bundle=os.path.abspath(request.bundle),
        oci_version=spec.version,
        annotations=spec.annotations,
        status="running",
        container_pid=request.pid,
        cgroup=request.cgroup,
    )


def _home(request: ExecRequest) -> str:
    """By the /etc/passwd that the container sees now."""
    try:
        root = os.open(f"/proc/{request.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return findings.home(root, request.process.user.uid)
    finally:
        os.close(root)


def _alive(pidfd: int) -> bool:
    import select

    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return not poller.poll(0)


def _current_group(pid: int) -> str:
    """The directory of the v2 group that the process is in now."""
    from pyrunc.kernel import cgroup as tree

    try:
        with open(f"/proc/{pid}/cgroup", "rb", buffering=0) as file:
            lines = (file.readall() or b"").decode("utf-8", "surrogateescape").splitlines()
    except OSError:
        raise WrongState("the container is not running") from None
    for line in lines:
        if line.startswith("0::"):
            return tree.root() + line[3:]
    raise NotFound(f"process {pid} is in no cgroup of the v2 tree")
