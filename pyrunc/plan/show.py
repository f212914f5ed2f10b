"""Prints a plan: one line for each operation and step, for `pyrunc plan` and for errors.

A line begins with a verb and its object: `mount 'proc' on '/proc'`. Flags are printed by their
names. The parent's steps for which operation 12 waits have the numbers 12.1, 12.2, …. They are
printed before line 12, because operation 12 ends after them.
"""

from __future__ import annotations

from pyrunc.abi import mount as abi
from pyrunc.plan import model as m

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from pyrunc.plan.model import Op, ParentStep, Plan
    from pyrunc.spec.model import IdMap

_ATTRIBUTES = (
    (abi.MOUNT_ATTR_RDONLY, "ro"),
    (abi.MOUNT_ATTR_NOSUID, "nosuid"),
    (abi.MOUNT_ATTR_NODEV, "nodev"),
    (abi.MOUNT_ATTR_NOEXEC, "noexec"),
    (abi.MOUNT_ATTR_NOATIME, "noatime"),
    (abi.MOUNT_ATTR_STRICTATIME, "strictatime"),
    (abi.MOUNT_ATTR_NODIRATIME, "nodiratime"),
    (abi.MOUNT_ATTR_NOSYMFOLLOW, "nosymfollow"),
)
_PROPAGATION = (
    (abi.MS_SHARED, "shared"),
    (abi.MS_SLAVE, "slave"),
    (abi.MS_PRIVATE, "private"),
    (abi.MS_UNBINDABLE, "unbindable"),
)


def show(plan: Plan) -> str:
    """Return the plan as text: its lines, numbered as in errors, then the warnings."""
    lines = [
        f"{label:>4}  {text}" if "." not in label else f"{label:>6}  parent: {text}"
        for label, text in numbered(plan)
    ]
    return "\n".join([*lines, *(f"warning: {text}" for text in plan.warnings)])


def numbered(plan: Plan) -> list[tuple[str, str]]:
    """Return (number, line) of each operation and step in the order of events: `12.1` is the
    first step of the parent for which line 12 waits."""
    lines = []
    for number, op in enumerate(plan.ops, 1):
        steps = enumerate(m.steps_of(op), 1)
        lines += [(f"{number}.{k}", step_line(step)) for k, step in steps]
        lines.append((str(number), line(op)))
    return lines


def trace(plan: Plan, started_ns: int, times: Sequence[tuple[str, int]]) -> str:
    """Return a table of the operations and steps that were timed: duration and time since the start
    in microseconds, number of the plan's line, text of the line.

    `times`: pairs (number as in `numbered`, time in ns by the clock of `started_ns`), in the order
    of events. Pairs for stages of `pyrunc.timings` are skipped.
    """
    texts = dict(numbered(plan))
    lines, before_ns = ["      us   since start    line  operation"], started_ns
    for label, now_ns in times:
        if label not in texts:  # a stage of the launch
            continue
        took_us, since_us = (now_ns - before_ns) // 1000, (now_ns - started_ns) // 1000
        side = "parent: " if "." in label else ""
        lines.append(f"{took_us:8}   {since_us:11}   {label:>5}  {side}{texts[label]}")
        before_ns = now_ns
    return "\n".join(lines) + "\n"


def step_line(step: ParentStep) -> str:
    """Return the plan's line for a step of the parent, without its number."""
    return STEP_LINES[type(step)](step)


def line(op: Op) -> str:
    """Return the plan's line for an operation, such as `mount 'proc' on '/proc'`."""
    return LINES[type(op)](op)


def attributes(bits: int) -> str:
    """Return MOUNT_ATTR_* bits as mount options, such as `ro,nosuid`."""
    return ",".join(word for bit, word in _ATTRIBUTES if bits & bit)


def propagation(flags: int) -> str:
    """Return the MS_* flags of a propagation as a mount option, such as `rslave`."""
    word = next((word for bit, word in _PROPAGATION if flags & bit), "unchanged")
    return "r" + word if flags & abi.MS_REC else word


def _options(*words: str) -> str:
    text = ",".join(filter(None, words))
    return f" ({text})" if text else ""


def _mount_fs(op: m.MountFs) -> str:
    own = ",".join(key if value is None else f"{key}={value}" for key, value in op.options)
    shared = ",".join(map(propagation, op.propagation))
    recursive = _changes(op.recursive_set, op.recursive_clear, "r")
    fallback = f"or bind {op.fallback}" if op.fallback else ""
    words = _options(attributes(op.attributes), own, shared, recursive, fallback)
    return f"mount '{op.type}' on '{op.destination}'{words}"


def _changes(to_set: int, to_clear: int, prefix: str = "") -> str:
    """Return the MOUNT_ATTR_* bits that are set and cleared as a text such as `ro,-nosuid`. Each
    name begins with `prefix`.

    If the atime bits are cleared and none is set, the text also has `relatime`, which the kernel
    then uses.
    """
    named = [prefix + word for bit, word in _ATTRIBUTES if to_set & bit]
    if to_clear & abi.MOUNT_ATTR__ATIME and not to_set & abi.MOUNT_ATTR__ATIME:
        named.append(prefix + "relatime")
    plain = to_clear & ~to_set & ~abi.MOUNT_ATTR__ATIME
    named += [f"{prefix}-{word}" for bit, word in _ATTRIBUTES if plain & bit]
    return ",".join(named)


def _mount_tree(op: m.MountTree) -> str:
    words = _options(
        "source in the root" if op.in_root else "",
        "peer" if op.peer else "",
        _changes(op.set, op.clear),
        ",".join(map(propagation, op.propagation)),
        _changes(op.recursive_set, op.recursive_clear, "r"),
    )
    return f"bind '{op.source}' on '{op.destination}'{words}"


def _terminal(op: m.OpenTerminal) -> str:
    size = f" {op.size.width}x{op.size.height}" if op.size else ""
    place = " of the host" if op.of_host else ""
    return f"open terminal{place}{size}" + (
        " as '/dev/console' and stdio" if op.console else " as stdio"
    )


def _scheduler(op: m.SetScheduler) -> str:
    return f"scheduler {op.policy} nice {op.nice} priority {op.priority}"


def _capabilities(op: m.SetCapabilities) -> str:
    return (
        f"capset effective {op.effective:#x} permitted {op.permitted:#x}"
        f" inheritable {op.inheritable:#x} ambient {_numbers(op.ambient)}"
    )


def _numbers(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers)) or "none"


def _join_process(op: m.JoinProcess) -> str:
    return f"setns '{op.descriptor}' namespaces {','.join(op.kinds)}"


def _clone(op: m.Clone) -> str:
    news = f" with new namespaces {','.join(op.kinds)}" if op.kinds else ""
    return f"clone process{' into its cgroup' if op.cgroup else ''}{news}"


LINES: dict[type, Callable[[Any], str]] = {
    m.Prepare: lambda op: f"prepare '{op.name}'",
    m.SetOomScore: lambda op: f"set oom_score_adj to {op.value}",
    m.SetExecLabel: lambda op: f"label {op.module} '{op.label}' for the next execve",
    m.Join: lambda op: f"setns '{op.descriptor}'",
    m.JoinProcess: _join_process,
    m.OffsetClocks: lambda op: (
        "offset clocks " + " ".join(f"{c} {s}.{n:09}" for c, s, n in op.offsets)
    ),
    m.SetAffinity: lambda op: f"run on CPUs {_numbers(op.cpus) if op.cpus else 'all'}",
    m.Clone: _clone,
    m.Sync: lambda op: f"wait for the parent at '{op.point}'",
    m.BecomeRoot: lambda op: "become root of the user namespace",
    m.NewSession: lambda op: "setsid",
    m.NewKeyring: lambda op: f"keyctl join session '{op.name}'",
    m.LoopbackUp: lambda op: "link lo up",
    m.SetPropagation: lambda op: f"propagate all mounts {propagation(op.flags)}",
    m.AttachRoot: lambda op: (
        f"attach root {propagation(op.propagation)}"
        + (f" on '{op.place}'" if op.place != "/" else "")
    ),
    m.AttachEmptyRoot: lambda op: f"attach empty root with {' '.join(op.folders)}",
    m.AttachMount: lambda op: f"attach '{op.descriptor}' on '{op.path}'",
    m.MountFs: _mount_fs,
    m.MountTree: _mount_tree,
    m.AttachDevice: lambda op: (
        f"attach '{op.device.path}' {op.device.type} {op.device.major}:{op.device.minor}"
    ),
    m.MakeDevice: lambda op: (
        f"mknod '{op.path}' {op.type} {op.major}:{op.minor} mode {op.mode:04o}"
    ),
    m.Symlink: lambda op: f"symlink '{op.path}' to '{op.target}'",
    m.PivotRoot: lambda op: "pivot_root",
    m.CoverRoot: lambda op: (
        "cover '/' by the root" + (f", hide {' '.join(op.hide)}" if op.hide else "")
    ),
    m.LabelMount: lambda op: f"label '{op.path}' {op.label!r}",
    m.ShareRoot: lambda op: f"propagate '/' {propagation(op.propagation)}",
    m.ChangeRoot: lambda op: "chroot",
    m.ReopenNull: lambda op: f"reopen '/dev/null' as {_numbers(op.descriptors)}",
    m.MakeFolder: lambda op: f"mkdir '{op.path}'",
    m.OpenTerminal: _terminal,
    m.ChangeMount: lambda op: f"remount '{op.path}'{_options(_changes(op.set, op.clear))}",
    m.SetUmask: lambda op: f"umask {op.mask:04o}",
    m.SetHostname: lambda op: f"sethostname '{op.name}'",
    m.SetDomainname: lambda op: f"setdomainname '{op.name}'",
    m.SetSysctl: lambda op: f"sysctl '{op.path}' = {op.value!r}",
    m.ReadonlyPath: lambda op: f"readonly '{op.path}'",
    m.MaskPath: lambda op: f"mask '{op.path}'",
    m.SetScheduler: _scheduler,
    m.SetIoPriority: lambda op: f"ioprio {op.klass} {op.priority}",
    m.SetPersonality: lambda op: f"personality {op.domain:#x}",
    m.SetMemoryPolicy: lambda op: f"set_mempolicy {op.mode} nodes {_numbers(op.nodes)}",
    m.SetLimit: lambda op: f"setrlimit {op.type} {op.soft}:{op.hard}",
    m.DropBounding: lambda op: f"drop capabilities but {_numbers(op.keep)} from the bounding set",
    m.SetGroups: lambda op: f"setgroups {_numbers(op.groups)}",
    m.TryFolder: lambda op: f"chdir '{op.path}' if root may",
    m.SetIds: lambda op: (
        f"setuid {op.uid} gid {op.gid}" + (" keeping capabilities" if op.keep else "")
    ),
    m.SetCapabilities: _capabilities,
    m.ForbidNewPrivileges: lambda op: "no_new_privs",
    m.EnterFolder: lambda op: f"chdir '{op.path}'",
    m.LoadFilter: lambda op: f"seccomp filter of {len(op.instructions) // 8} instructions",
    m.CheckProgram: lambda op: f"check '{op.args[0]}'",
    m.Ready: lambda op: "say ready",
    m.EndBySignals: lambda op: f"end by signals {','.join(map(str, op.numbers))}",
    m.AwaitStart: lambda op: "await start",
    m.RefuseStart: lambda op: "refuse to start: no process",
    m.RunHook: lambda op: f"run startContainer hook #{op.index} '{op.path}'",
    m.Execute: lambda op: f"exec '{op.args[0]}'",
    m.ExecuteDescriptor: lambda op: f"exec descriptor '{op.descriptor}'",
}


def _maps(step: m.WriteIdMaps) -> str:
    def text(entries: Sequence[IdMap]) -> str:
        return ",".join(f"{e.container_id}:{e.host_id}:{e.size}" for e in entries) or "none"

    return f"write id maps uid {text(step.uids)} gid {text(step.gids)}"


def _hooks(step: m.RunHooks) -> str:
    where = f" in the container's namespaces at '{step.folder}'" if step.folder else ""
    return f"run {step.kind} hooks {' '.join(repr(hook.path) for hook in step.hooks)}{where}"


def _rdt(step: m.EnterRdt | m.JoinRdt) -> str:
    return f"resctrl group {step.rdt.get('closID') or 'of the container'}"


STEP_LINES: dict[type, Callable[[Any], str]] = {
    m.WriteIdMaps: _maps,
    m.RecordProcess: lambda step: "record pid and start time",
    m.GiveCgroup: lambda step: f"give the cgroup to uid {step.uid}",
    m.EnterRdt: lambda step: f"enter {_rdt(step)}",
    m.JoinRdt: lambda step: f"join {_rdt(step)}",
    m.MoveLinks: lambda step: (
        "move links " + " ".join(f"'{a}' to '{b}'" for a, b in step.links.items())
    ),
    m.WriteHookState: lambda step: f"write the state into '{step.descriptor}'",
    m.RunHooks: _hooks,
    m.SetLimits: lambda step: (
        "prlimit " + " ".join(f"{e.type} {e.soft}:{e.hard}" for e in step.limits)
    ),
    m.ClearOnlcr: lambda step: "clear ONLCR of the terminal",
    m.SendListener: lambda step: f"send the seccomp listener to '{step.path}'",
}
