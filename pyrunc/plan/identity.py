"""Plans a process's identity (limits, capabilities, groups, ids, working directory, filter), for a
container's start and for an exec.

The order (capabilities(7)):

- drop the bounding set, while the process has SETPCAP
- set the groups and the gid, then the uid
- set the capabilities by capset
- set the ambient capabilities

Without no_new_privs a filter needs CAP_SYS_ADMIN, so it is loaded before the ids change. With
no_new_privs it is loaded right before execve. Capabilities that the runtime does not have are left
out with a warning (runtime-spec 1.1).
"""

from __future__ import annotations

from pyrunc.abi.capability import CAPABILITIES
from pyrunc.abi.process import IOPRIO_CLASSES, SCHED_FLAGS
from pyrunc.errors import InvalidSpec
from pyrunc.plan import model
from pyrunc.spec.check import MEMORY_FLAGS, PERSONALITIES, cpu_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.plan.model import HostFacts, LoadFilter, Op
    from pyrunc.spec.model import Capabilities, MemoryPolicy, Personality, Process


def before(process: Process, host: HostFacts) -> list[Op]:
    """Plan the operations that set the OOM score and the LSM label. The launcher carries them out
    before it clones the process, which inherits both settings."""
    ops: list[Op] = []
    if process.oom_score_adj is not None:
        # Also when it equals ours: the process that carries out the plan, a shim, may have a lower
        # score.
        ops.append(model.SetOomScore(process.oom_score_adj))
    for name, label, module, on in (
        ("apparmorProfile", process.apparmor_profile, "AppArmor", host.apparmor),
        ("selinuxLabel", process.selinux_label, "SELinux", host.selinux),
    ):
        if label and not on:
            raise InvalidSpec(f"process.{name}", f"{label!r} is set, but {module} is off")
    if process.apparmor_profile:
        ops.append(model.SetExecLabel("apparmor", process.apparmor_profile))
    if process.selinux_label:
        ops.append(model.SetExecLabel("selinux", process.selinux_label))
    return ops


def scheduling(process: Process, personality: Personality | None) -> list[Op]:
    """Plan the operations that set the scheduler, the I/O priority and the personality."""
    ops: list[Op] = []
    scheduler, io = process.scheduler, process.io_priority
    if scheduler is not None:
        flags = sum(SCHED_FLAGS[flag] for flag in set(scheduler.flags))
        ops.append(
            model.SetScheduler(
                scheduler.policy,
                flags,
                scheduler.nice,
                scheduler.priority,
                scheduler.runtime,
                scheduler.deadline,
                scheduler.period,
            )
        )
    if io is not None:
        assert io.klass in IOPRIO_CLASSES  # spec.check
        ops.append(model.SetIoPriority(io.klass, io.priority))
    if personality is not None:
        ops.append(model.SetPersonality(PERSONALITIES[personality.domain]))
    return ops


def change(
    process: Process,
    host: HostFacts,
    load_filter: LoadFilter | None,
    in_user_namespace: bool,
    warnings: list[str],
    keep_groups: bool = False,
) -> list[Op]:
    """Plan the change from the runtime's rights to those of the process. All operations after it,
    such as hooks and execve, run with the rights of the process.

    Without no_new_privs, the seccomp filter is loaded here. With no_new_privs, `build` plans the
    filter later, so that it cannot forbid operations of the start. In a user namespace the process
    can have every capability, but cannot raise its limits: the parent sets them from outside.
    """
    user, capabilities = process.user, process.capabilities
    ops: list[Op] = []
    if in_user_namespace:
        # The first process of a user namespace has all capabilities there, whatever the runtime
        # holds.
        host = host.replace(capabilities=(2 << host.last_capability) - 1)
    else:
        ops += [model.SetLimit(limit.type, limit.soft, limit.hard) for limit in process.rlimits]
    # Before the ids change, because the folder may be root's and closed to the user, as runc
    # allows. Both tries check that it is inside (CVE-2024-21626).
    ops.append(model.TryFolder(process.cwd))
    if load_filter is not None and not process.no_new_privileges:
        ops.append(load_filter)
    sets = None if capabilities is None else _capability_sets(capabilities, host, warnings)
    if sets is not None:
        ops.append(model.DropBounding(sets[0], host.last_capability))
    if keep_groups and not user.additional_gids:
        pass
    # If /proc/PID/setgroups is `deny`, setgroups(2) always fails with EPERM, even for an empty list
    # (user_namespaces(7)).
    elif host.setgroups:
        ops.append(model.SetGroups(user.additional_gids))
    elif user.additional_gids:
        raise InvalidSpec(
            "process.user.additionalGids", "setgroups is denied in this user namespace"
        )
    ops.append(model.SetIds(user.uid, user.gid, sets is not None and user.uid != 0))
    if sets is not None:
        ops.append(sets[1])
    ops.append(model.EnterFolder(process.cwd))
    if process.no_new_privileges:
        ops.append(model.ForbidNewPrivileges())
    return ops


def environment(process: Process, home: str) -> tuple[str, ...]:
    """Return the process's `env`. If a name occurs several times, only its last occurrence stays.
    If HOME is missing or empty, it is appended with the value `home`, or `/` if `home` is empty."""
    # glibc's getenv(3) returns the first of two values, bash keeps the last: all programs agree
    # only if there is one. The last wins, as in runc.
    by_name: dict[str, str] = {}
    for variable in reversed(process.env):
        by_name.setdefault(variable.partition("=")[0], variable)
    if by_name.get("HOME") == "HOME=":
        del by_name["HOME"]
    variables = [*reversed(by_name.values())]
    return (*variables,) if "HOME" in by_name else (*variables, f"HOME={home or '/'}")


def _capability_sets(
    capabilities: Capabilities, host: HostFacts, warnings: list[str]
) -> tuple[tuple[int, ...], model.SetCapabilities]:
    """Return the bounding set, and the operation that sets the other capability sets. Capabilities
    that the runtime does not have are left out, and named in `warnings`."""
    refused: dict[str, None] = {}
    bounding = _capability_numbers(capabilities.bounding, host, refused)
    effective = _mask(_capability_numbers(capabilities.effective, host, refused))
    permitted = _mask(_capability_numbers(capabilities.permitted, host, refused))
    inheritable = _mask(_capability_numbers(capabilities.inheritable, host, refused))
    ambient = _capability_numbers(capabilities.ambient, host, refused)
    if refused:
        warnings.append(
            f"ignoring unknown or unavailable capabilities: [{' '.join(sorted(refused))}]"
        )
    raised = permitted & inheritable  # capabilities(7), "Ambient": a subset of both
    names = {number: name for name, number in CAPABILITIES.items()}
    for number in ambient:
        if not raised >> number & 1:
            warnings.append(
                f"can't raise ambient capability {names[number]}: operation not permitted"
            )
    raisable = tuple(number for number in ambient if raised >> number & 1)
    sets = model.SetCapabilities(effective & permitted, permitted, inheritable, raisable)
    return tuple(sorted(bounding)), sets


def _capability_numbers(
    names: tuple[str, ...], host: HostFacts, refused: dict[str, None]
) -> list[int]:
    numbers = []
    for name in dict.fromkeys(names):
        number = CAPABILITIES.get(name)
        if number is None or not host.capabilities >> number & 1:
            refused[name] = None
        else:
            numbers.append(number)
    return numbers


def _mask(numbers: list[int]) -> int:
    return sum(1 << number for number in numbers)


def memory_policy(policy: MemoryPolicy) -> Op:
    """Plan set_mempolicy(2). Nodes must be absent for DEFAULT and LOCAL, are optional for
    PREFERRED, and required for all other modes."""
    nodes = cpu_list(policy.nodes, "linux.memoryPolicy.nodes")
    if policy.mode in ("MPOL_DEFAULT", "MPOL_LOCAL"):
        if nodes:
            raise InvalidSpec("linux.memoryPolicy.nodes", f"{policy.mode} takes no nodes")
    elif not nodes and policy.mode != "MPOL_PREFERRED":
        raise InvalidSpec("linux.memoryPolicy.nodes", f"{policy.mode} needs nodes")
    flags = sum(MEMORY_FLAGS[flag] for flag in set(policy.flags))
    return model.SetMemoryPolicy(policy.mode, flags, nodes)
