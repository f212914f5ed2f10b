"""Builds plans from a specification: the operations of a start in their order. Reads and changes
nothing on the host.

`build` plans a container's start, `build_exec` a process that enters a running container,
`build_pause` a pod's pause process. The order: namespaces, mounts, pivot, terminal, other
operations that need root's rights, identity, execve.
"""

from __future__ import annotations

from pyrunc.abi import mount as mounts_abi
from pyrunc.errors import InvalidSpec
from pyrunc.kernel.path import clean
from pyrunc.plan import devices, identity, model, mounts, namespaces, paths
from pyrunc.plan.parent import (
    HOOK_STATE,
    HOOK_STDERR,
    ParentOptions,
    steps_of_exec,
    steps_of_pause,
    steps_of_start,
    sync,
    with_listener,
)
from pyrunc.spec.check import cpu_list, sysctl_path
from pyrunc.spec.model import CpuAffinity
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from pyrunc.plan.model import HostFacts, LoadFilter, Op, Plan, RootfsFacts
    from pyrunc.plan.parent import Steps
    from pyrunc.spec.model import Hook, Linux, Process, Spec

# Signals that end a process by default: HUP INT QUIT ABRT TERM. They also end a process that waits
# for `start`.
# The kernel drops a signal of default disposition that is sent to the first process of a pid
# namespace, so without handlers a created container could only be killed by SIGKILL.
ENDING = (1, 2, 3, 6, 15)


OOM_SCORE_ADJ_MIN = -1000


class StartPlanOptions(Value):
    """Options of a container's start beyond its configuration.

    - `parent`: options of the parent's steps
    - `await_start`: wait for `start` before execve
    - `keyring`: name of a new session keyring
    - `preserve`: how many of the caller's descriptors stay open, from 3 on
    - `pivot`: use pivot_root(2). False: mount the root over the host's root (`CoverRoot`).
    - `keep_groups`: keep the caller's supplementary groups
    """

    load_filter: LoadFilter | None = None
    cgroup: bool = True
    parent: ParentOptions = ParentOptions()
    await_start: bool = False
    keyring: str = ""
    preserve: int = 0
    pivot: bool = True
    keep_groups: bool = False


class ExecPlanOptions(Value):
    """Options of a process in a running container, beyond its configuration.

    - `home`: home directory of the process's user, for an environment without HOME
    - `attached`: the runtime copies the process's terminal to its own
    - `keyring`: name of the session keyring to join
    - `preserve`: how many of the caller's descriptors stay open, from 3 on
    - `keep_groups`: keep the caller's supplementary groups
    """

    load_filter: LoadFilter | None = None
    cgroup: bool = True
    home: str = ""
    keyring: str = ""
    preserve: int = 0
    keep_groups: bool = False
    attached: bool = False


class PausePlanOptions(Value):
    """Options of a pause process beyond its namespaces. `mounts`: absolute paths in its root, at
    which mounts are attached."""

    hostname: str = ""
    load_filter: LoadFilter | None = None
    oom_score_adj: int | None = None
    mounts: Collection[str] = ()
    cgroup: bool = True
    selinux_label: str = ""


def build(
    spec: Spec, host: HostFacts, facts: RootfsFacts, options: StartPlanOptions = StartPlanOptions()
) -> Plan:
    """Plan a container's start: the operations of its process and the steps of its parent. Raises
    InvalidSpec."""
    process, linux, await_start = spec.process, spec.linux, options.await_start
    steps = steps_of_start(spec, options.parent)
    load_filter = with_listener(options.load_filter, steps)
    warnings = _unsupported_flags(linux)
    ops: list[Op] = [model.Prepare()]
    if process is not None:
        ops += identity.before(process, host)
    ops += _clone(linux, options.cgroup, steps, host.affinity_restricted)
    if options.keyring:
        # Before the filter, because the default profiles refuse keyctl(2).
        ops.append(model.NewKeyring(options.keyring, linux.namespace("user") is not None))
    ops += _root_filesystem(spec, host, facts, steps, options, warnings)
    ops += _settings(spec, host)
    if await_start:  # before a filter, which need not know the call
        ops.append(model.EndBySignals(ENDING))
    if process is None:
        ops += [*sync("before-identity", steps), *_no_execution(await_start)]
    else:
        ops += identity.scheduling(process, linux.personality)
        ops += sync("before-identity", steps)
        in_user = linux.namespace("user") is not None
        ops += identity.change(process, host, load_filter, in_user, warnings, options.keep_groups)
        hooks = spec.hooks.start_container
        ops += _execution(process, facts.home, await_start, options.preserve, load_filter, hooks)
    return model.Plan(tuple(ops), tuple(warnings))


def build_exec(
    linux: Linux, process: Process, host: HostFacts, options: ExecPlanOptions = ExecPlanOptions()
) -> Plan:
    """Plan an exec: the operations of a process that joins the namespaces of a running container,
    and the steps of its parent. `linux`: from the container's configuration. Raises InvalidSpec."""
    steps = steps_of_exec(linux, process, options.attached)
    load_filter = with_listener(options.load_filter, steps)
    warnings: list[str] = []
    ops: list[Op] = [model.Prepare("pyrunc:exec")]
    ops += identity.before(process, host)
    affinity = process.exec_cpu_affinity or CpuAffinity()
    if affinity.initial:
        ops.append(model.SetAffinity(cpu_list(affinity.initial, "process.execCPUAffinity.initial")))
    kinds = namespaces.own(linux)
    # Two namespaces are joined only after the clone into the cgroup:
    # - cgroup: if the tree is mounted with nsdelegate, as by systemd, no process may be moved
    #   across the namespace's boundary from inside (cgroup-v2.rst, "Delegation"; clone3 says
    #   ENOENT).
    # - user: the cgroup may belong to the container's user. The host's root may write to it, but
    #   loses this right in a user namespace that does not map the cgroup's group (EACCES).
    outer = tuple(kind for kind in kinds if kind not in ("cgroup", "user"))
    inner = tuple(kind for kind in ("user", "cgroup") if kind in kinds)
    if outer:
        ops.append(model.JoinProcess(outer, "container"))
    ops.append(model.Clone((), options.cgroup))
    if inner:
        ops.append(model.JoinProcess(inner, "container"))
    ops += sync("cloned", steps)
    if affinity.final:
        ops.append(model.SetAffinity(cpu_list(affinity.final, "process.execCPUAffinity.final")))
    elif host.affinity_restricted and not affinity.initial:
        # Allow all CPUs: the runtime may be pinned (systemd's CPUAffinity, taskset(1)), and the
        # process would inherit its affinity. The cpuset still limits the process.
        ops.append(model.SetAffinity())
    ops.append(model.NewSession())
    if "user" in kinds:
        ops.append(model.BecomeRoot())
    if options.keyring:
        ops.append(model.NewKeyring(options.keyring, "user" in kinds))
    if process.terminal:
        ops.append(model.OpenTerminal(process.console_size, process.user.uid, console=False))
    ops.append(model.SetUmask(0o022 if process.user.umask is None else process.user.umask))
    if linux.memory_policy is not None:
        ops.append(identity.memory_policy(linux.memory_policy))
    ops += identity.scheduling(process, linux.personality)
    ops += sync("before-identity", steps)
    ops += identity.change(
        process, host, load_filter, "user" in kinds, warnings, options.keep_groups
    )
    ops += _execution(process, options.home, False, options.preserve, load_filter)
    return model.Plan(tuple(ops), tuple(warnings))


def build_pause(
    linux: Linux, host: HostFacts, options: PausePlanOptions = PausePlanOptions()
) -> Plan:
    """Plan a pod's pause process: the pod's namespaces, an empty read-only root, no
    capabilities."""
    steps = steps_of_pause(linux)
    ops: list[Op] = [model.Prepare("pyrunc:pause")]
    if options.oom_score_adj is not None:
        floor = OOM_SCORE_ADJ_MIN if host.lowers_oom_score else host.oom_score_adj
        ops.append(model.SetOomScore(max(options.oom_score_adj, floor)))
    if options.selinux_label:
        ops.append(model.SetExecLabel("selinux", options.selinux_label))
    ops += _clone(linux, options.cgroup, steps, host.affinity_restricted)
    ops += [
        model.SetPropagation(mounts_abi.MS_SLAVE | mounts_abi.MS_REC),
        # No image: the process is executed by descriptor, so the root can be empty.
        model.AttachEmptyRoot(_folders(options.mounts)),
        *(model.AttachMount(path, f"mount:{path}") for path in options.mounts),
        model.PivotRoot(),
        model.SetUmask(0o022),
    ]
    if options.hostname:
        ops.append(model.SetHostname(options.hostname))
    ops += [model.SetSysctl(sysctl_path(key), value) for key, value in linux.sysctl.items()]
    ops += [
        # A pause process needs no right at all, so taking it over gains nothing: no capability, no
        # group, an empty read-only root.
        model.DropBounding((), host.last_capability),
        model.SetGroups(()),
        model.SetIds(65535, 65535, False),
        model.SetCapabilities(0, 0, 0, ()),
        model.ForbidNewPrivileges(),
    ]
    if options.load_filter is not None:
        ops.append(options.load_filter)
    ops.append(model.ExecuteDescriptor("pause", ("pause",), ()))
    return model.Plan(tuple(ops))


def _unsupported_flags(linux: Linux) -> list[str]:
    """Return a warning if the personality has flags. Like runc, pyrunc ignores them, because
    runtime-spec defines none yet."""
    flags = linux.personality.flags if linux.personality is not None else ()
    return [f"linux.personality.flags: {', '.join(flags)} are ignored"] if flags else []


def _folders(places: Collection[str]) -> tuple[str, ...]:
    """Return the folders to make in a pause process's root, parents first: proc, dev, sys, tmp, and
    the mount points `places`."""
    folders = dict.fromkeys(("proc", "dev", "sys", "tmp"))
    for place in places:
        parts = place.strip("/").split("/")
        folders.update(dict.fromkeys("/".join(parts[: n + 1]) for n in range(len(parts))))
    return tuple(folders)


def _clone(linux: Linux, cgroup: bool, steps: Steps, affinity_restricted: bool) -> list[Op]:
    """Plan the operations that join existing namespaces, clone the process into new namespaces, and
    set up the new ones. `cgroup`: the clone also enters the container's cgroup.

    `affinity_restricted`: the runtime may not run on all CPUs. The new process then gets an
    affinity to all CPUs.
    """
    new = namespaces.new(linux)
    ops, late = namespaces.joins(linux)
    time = linux.namespace("time")
    if time is not None and not time.path:
        ops.append(
            model.OffsetClocks(
                tuple((c, o.secs, o.nanosecs) for c, o in linux.time_offsets.items())
            )
        )
    ops.append(model.Clone(new, cgroup))
    ops += late
    ops += sync("cloned", steps)
    if affinity_restricted:
        ops.append(model.SetAffinity())
    ops.append(model.NewSession())
    if linux.namespace("user") is not None:
        ops.append(model.BecomeRoot())
    if "net" in new:
        ops.append(model.LoopbackUp())
    return ops


def _root_filesystem(
    spec: Spec,
    host: HostFacts,
    facts: RootfsFacts,
    steps: Steps,
    options: StartPlanOptions,
    warnings: list[str],
) -> list[Op]:
    """Plan the operations on the root file system, in this order: root, mounts, devices, links,
    pivot, working directory, terminal. The last operations make mounts read-only."""
    linux, process, pivot = spec.linux, spec.process, options.pivot
    root_place = options.parent.hook_folder or "/"
    ops: list[Op]
    if linux.namespace("mount") is None:
        _warn_of_no_mounts(spec, warnings)
        ops = [*sync("mounted", steps), *sync("before-pivot", steps)]
        if process is not None and process.terminal:
            ops.append(
                # Before the change of root: the devpts is the host's.
                model.OpenTerminal(
                    process.console_size, process.user.uid, console=False, of_host=True
                )
            )
        return [*ops, model.ChangeRoot()]
    if linux.mount_label and not host.selinux:
        raise InvalidSpec("linux.mountLabel", f"{linux.mount_label!r} is set, but SELinux is off")
    propagation = mounts.PROPAGATION.get(linux.rootfs_propagation, 0)
    private = propagation & mounts_abi.MS_PRIVATE
    if private and not pivot:
        raise InvalidSpec("linux.rootfsPropagation", "private propagation needs pivot_root")
    inherited = (mounts_abi.MS_PRIVATE if private else mounts_abi.MS_SLAVE) | mounts_abi.MS_REC
    ops = [model.SetPropagation(inherited), model.AttachRoot(inherited, root_place)]
    for i, mount in enumerate(spec.mounts):
        if not mount.destination.startswith("/"):
            warnings.append(
                f"mount destination {mount.destination} is not absolute: it is taken relative to /"
            )
        if i in facts.destinations:
            mount = mount.replace(destination=facts.destinations[i])
        ops += mounts.operations(mount, i, linux, host, facts, warnings)
    ops += devices.operations(spec, host, facts.devices)
    ops += sync("mounted", steps)
    ops += sync("before-pivot", steps)
    ops.append(model.PivotRoot() if pivot else model.CoverRoot(root_place != "/", facts.instances))
    if process is not None:
        if process.cwd != "/":
            ops.append(model.MakeFolder(clean(process.cwd)))
        # In the container's own devpts: ttyname(3) finds the terminal's name there, and the host's
        # terminals cannot be opened from it.
        if process.terminal:
            ops.append(model.OpenTerminal(process.console_size, process.user.uid, console=True))
        elif facts.null_stdio:
            ops.append(model.ReopenNull(facts.null_stdio))
    # Last, because devices, links, mount points and the console are made in these mounts before.
    ops += [op for op in map(mounts.finishing, spec.mounts) if op is not None]
    if spec.root is not None and spec.root.readonly:
        ops.append(model.ChangeMount("/", mounts_abi.MOUNT_ATTR_RDONLY))
    return ops


def _warn_of_no_mounts(spec: Spec, warnings: list[str]) -> None:
    """Add a warning that the configuration's mounts, devices and root.readonly are left out:
    without a mount namespace they would change the host."""
    ignored = [f"mounts[{i}]" for i in range(len(spec.mounts))]
    ignored += [f"linux.devices[{i}]" for i in range(len(spec.linux.devices))]
    ignored += ["root.readonly"] if spec.root is not None and spec.root.readonly else []
    if ignored:
        warnings.append(f"without a mount namespace these are left out: {', '.join(ignored)}")


def _settings(spec: Spec, host: HostFacts) -> list[Op]:
    """Plan the settings that need root's rights: umask, host and domain name, sysctls, read-only
    and masked paths, the root's mount propagation, memory policy."""
    linux, process = spec.linux, spec.process
    umask = process.user.umask if process is not None else None
    ops: list[Op] = [model.SetUmask(0o022 if umask is None else umask)]
    if spec.hostname:
        ops.append(model.SetHostname(spec.hostname))
    if spec.domainname:
        ops.append(model.SetDomainname(spec.domainname))
    ops += [model.SetSysctl(sysctl_path(key), value) for key, value in linux.sysctl.items()]
    ops += paths.operations(linux, host.clones_detached)
    propagation = mounts.PROPAGATION.get(linux.rootfs_propagation, 0)
    if propagation & (mounts_abi.MS_SHARED | mounts_abi.MS_UNBINDABLE):
        # Last, because an unbindable root could not be the source of the binds above.
        ops.append(model.ShareRoot(propagation))
    policy = linux.memory_policy
    if policy is not None:
        ops.append(identity.memory_policy(policy))
    return ops


def _execution(
    process: Process,
    home: str,
    await_start: bool,
    preserve: int,
    load_filter: LoadFilter | None,
    hooks: Collection[Hook] = (),
) -> list[Op]:
    """Plan the end of a start: report that the process is ready, wait for `start`, run the
    startContainer hooks, execute the container's command."""
    if not process.args:
        raise InvalidSpec("process.args", "must not be empty")
    env = identity.environment(process, home)
    ops: list[Op] = []
    if await_start:
        # As in runc, a missing program is an error of create. Without `start`, execve itself
        # reports it to the same caller.
        ops.append(model.CheckProgram(process.args, env))
    # As late as no_new_privs permits, so that the profile need not allow what the start does above.
    if load_filter is not None and process.no_new_privileges:
        ops.append(load_filter)
    ops.append(model.Ready())
    if await_start:
        ops.append(model.AwaitStart("start"))
    for index, hook in enumerate(hooks):
        hook_env = env if hook.env is None else hook.env
        ops.append(
            model.RunHook(
                index,
                hook.path,
                hook.args or (hook.path,),
                hook_env,
                hook.timeout_s,
                HOOK_STATE,
                HOOK_STDERR,
            )
        )
    ops.append(model.Execute(process.args, env, preserve))
    return ops


def _no_execution(await_start: bool) -> list[Op]:
    """Plan the end of a start whose configuration has no `process`: the container can be created,
    but not started (runtime-spec, runtime.md, "Start")."""
    if not await_start:
        raise InvalidSpec("process", "process property must not be empty")
    return [model.Ready(), model.AwaitStart("start"), model.RefuseStart()]
