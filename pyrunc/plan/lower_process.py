"""Lowers the operations on the process: clone, namespaces, limits, identity, filter, execve."""

from __future__ import annotations

from errno import EACCES, EINVAL, EISDIR, ENOENT, ENOSYS, EPERM
from struct import pack

from pyrunc.abi import clone
from pyrunc.abi import file as f
from pyrunc.abi import prctl as p
from pyrunc.abi.capability import LINUX_CAPABILITY_VERSION_3
from pyrunc.abi.ioctl import IFF_UP, SIOCSIFFLAGS
from pyrunc.abi.process import (
    IOPRIO_CLASS_SHIFT,
    IOPRIO_CLASSES,
    IOPRIO_WHO_PROCESS,
    RLIMITS,
    SCHED_POLICIES,
)
from pyrunc.abi.signal import SIGSET_SIZE
from pyrunc.plan import model as m
from pyrunc.plan.lower_mount import require_proc
from pyrunc.plan.lowering import EMPTY, Lowering
from pyrunc.plan.parent import HOOK_STATE, HOOK_STDERR
from pyrunc.program import macros
from pyrunc.program.model import LISTENER, NEXT, PROGRESS, READY, STATUS
from pyrunc.spec.check import MEMORY_MODES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from pyrunc.program.model import Operand, Slot


AF_INET, SOCK_DGRAM, SOCK_CLOEXEC = 2, 2, 0o2000000
KEEP_ALL_KEYS = 0x80000  # KEY_USR_SEARCH, beside the possessor's rights
SIGCHLD, SIGKILL, POLLIN = 17, 9, 1
HOOK_OUTPUT_LIMIT_BYTES = 4096
OUTSIDE = "current working directory is outside of container mount namespace root"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_ARG_STRLEN, POINTER_BYTES = 32 * 4096, 8  # include/uapi/linux/binfmts.h
NO_PROGRAM = "no-program"  # mark of failures of the last execve and of its check


# ---- in the launcher


def prepare(low: Lowering, op: m.Prepare) -> None:
    macros.prologue(low.a, op.name)
    low.a.sys("umask", 0)  # so that modes are exact until the process's own umask is set


def _write_own(low: Lowering, paths: Sequence[str], content: bytes) -> None:
    """Emit calls that write `content` to the first existing file of `paths`, which are relative to
    /proc. The program fails unless /proc is a procfs and nothing is mounted over the file.

    Without these checks the content could go to a file that is not the kernel's. The process would
    then run without its label, for example (CVE-2019-16884, CVE-2025-52881).
    """
    a = low.a
    proc = low.a.slot(4)
    opened = low.a.slot(4)
    done = low.a.label()
    a.sys("openat", f.AT_FDCWD, "/proc", f.O_PATH | low.o_directory | f.O_CLOEXEC, 0, store=proc)
    # Also checked in the runtime's own /proc: if the runtime itself runs in a container, its /proc
    # may contain whatever that container's image has there.
    require_proc(low, proc, "/proc is no procfs")
    # Links are allowed, because `self` and `thread-self` are links; NO_XDEV refuses a file that is
    # mounted over the real one.
    beneath = f.RESOLVE_BENEATH | f.RESOLVE_NO_MAGICLINKS | f.RESOLVE_NO_XDEV
    for path in paths:
        skip = {} if path == paths[-1] else {ENOENT: NEXT}
        macros.open_at(a, proc, path, f.O_WRONLY, resolve=beneath, store=opened, skip=skip, ok=done)
    a.place(done)
    a.sys("write", opened, low.a.constant(content), len(content))
    low.close(opened, proc)


def set_oom_score(low: Lowering, op: m.SetOomScore) -> None:
    _write_own(low, ["self/oom_score_adj"], str(op.value).encode())


def set_exec_label(low: Lowering, op: m.SetExecLabel) -> None:
    """Emit calls that set the label of the process's next execve. The launcher makes them in the
    runtime's /proc, before the clone. With SELinux they also set the label of the process's session
    keyring."""
    label = op.label.encode("utf-8", "surrogateescape")
    if op.module == "apparmor":
        _write_own(
            low, ["thread-self/attr/apparmor/exec", "thread-self/attr/exec"], b"exec " + label
        )
    else:
        _write_own(low, ["thread-self/attr/exec"], label)
        _write_own(low, ["thread-self/attr/keycreate"], label)


def join(low: Lowering, op: m.Join) -> None:
    low.a.sys("setns", low.numbers[op.descriptor], clone.NAMESPACES[op.kind])


def join_process(low: Lowering, op: m.JoinProcess) -> None:
    low.a.sys("setns", low.numbers[op.descriptor], _flags(op.kinds))


def _flags(kinds: Sequence[str]) -> int:
    return sum(clone.NAMESPACES[kind] for kind in kinds)


def offset_clocks(low: Lowering, op: m.OffsetClocks) -> None:
    # Not by clone3: that enters the new namespace at once, and offsets can be written only while it
    # has no process (time_namespaces(7)).
    low.a.sys("unshare", clone.CLONE_NEWTIME)
    if op.offsets:
        text = "".join(
            f"{clock} {seconds} {nanoseconds}\n" for clock, seconds, nanoseconds in op.offsets
        )
        _write_own(low, ["self/timens_offsets"], text.encode())


def set_affinity(low: Lowering, op: m.SetAffinity) -> None:
    # 1024 bytes are 8192 CPUs, the largest NR_CPUS; the kernel drops the bits of CPUs that it does
    # not have, or that the cpuset excludes.
    mask = bytearray(b"" if op.cpus else b"\xff" * 1024)
    for cpu in op.cpus:
        mask += bytes(max(0, (cpu // 64 + 1) * 8 - len(mask)))
        mask[cpu // 8] |= 1 << cpu % 8
    low.a.sys("sched_setaffinity", 0, len(mask), low.a.constant(bytes(mask)))


def clone_process(low: Lowering, op: m.Clone) -> None:
    cgroup = low.numbers["cgroup"] if op.cgroup else None
    macros.fork_parent(low.a, _flags(op.kinds), cgroup)
    # The cgroup's directory is a folder of the host, and from here on a process in the container's
    # pid namespace may look into our /proc/PID/fd (CVE-2024-21626).
    if op.cgroup:
        low.close(low.numbers["cgroup"])


# ---- in the container's process


def sync(low: Lowering, op: m.Sync) -> None:
    low.a.send(PROGRESS, low.line)
    low.a.wait()


def become_root(low: Lowering, op: m.BecomeRoot) -> None:
    # After clone3 the process still has the ids of the runtime's user, which the id maps need not
    # contain.
    low.a.sys("setresgid", 0, 0, 0)
    low.a.sys("setresuid", 0, 0, 0)
    # The change of ids has reset the dumpable flag to fs.suid_dumpable (commit_creds,
    # kernel/cred.c).
    macros.forbid_dumps(low.a)


def new_session(low: Lowering, op: m.NewSession) -> None:
    # In the caller's session the process could push input into the caller's terminal (TIOCSTI).
    low.a.sys("setsid")


def new_keyring(low: Lowering, op: m.NewKeyring) -> None:
    a, key, end = low.a, low.a.slot(4), low.a.label()
    a.sys("keyctl", p.KEYCTL_JOIN_SESSION_KEYRING, op.name, 0, 0, 0, store=key, skip={ENOSYS: end})
    # Possessor: everything; the user (in a user namespace: anyone) may search, as runc has it.
    permissions = 0x3F3F0000 | (0x8 if op.in_user_namespace else 0) | KEEP_ALL_KEYS
    a.sys("keyctl", p.KEYCTL_SETPERM, key, permissions, 0, 0)
    a.place(end)


def loopback_up(low: Lowering, op: m.LoopbackUp) -> None:
    a, socket = low.a, low.a.slot(4)
    a.sys("socket", AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0, store=socket)
    # An ioctl in place of rtnetlink: it is one call, and the launcher could not parse the answer of
    # rtnetlink.
    a.sys("ioctl", socket, SIOCSIFFLAGS, low.a.constant(pack("<16sH22x", b"lo", IFF_UP)))
    low.close(socket)


def set_umask(low: Lowering, op: m.SetUmask) -> None:
    low.a.sys("umask", op.mask)


def set_hostname(low: Lowering, op: m.SetHostname) -> None:
    low.a.sys("sethostname", op.name, len(op.name.encode("utf-8", "surrogateescape")))


def set_domainname(low: Lowering, op: m.SetDomainname) -> None:
    low.a.sys("setdomainname", op.name, len(op.name.encode("utf-8", "surrogateescape")))


def set_sysctl(low: Lowering, op: m.SetSysctl) -> None:
    """Emit calls that write a sysctl in a private procfs. If the path contains a mount or a link,
    these calls fail (CVE-2025-52881)."""
    a, content = low.a, op.value.encode("utf-8", "surrogateescape")
    resolve = macros.BENEATH | f.RESOLVE_NO_XDEV
    path = f"sys/{op.path}"
    opened = macros.open_at(a, low.numbers["proc"], path, f.O_WRONLY, resolve=resolve)
    a.sys("write", opened, low.a.constant(content), len(content))
    low.close(opened)


def set_scheduler(low: Lowering, op: m.SetScheduler) -> None:
    # The struct's first version (SCHED_ATTR_SIZE_VER0, 48 bytes), which every kernel takes: what
    # came later, utilisation clamps, is not in runtime-spec.
    attributes = pack(
        "<IIQiIQQQ",
        48,
        SCHED_POLICIES[op.policy],
        op.flags,
        op.nice,
        op.priority & 0xFFFFFFFF,
        op.runtime,
        op.deadline,
        op.period,
    )
    low.a.sys("sched_setattr", 0, low.a.constant(attributes), 0)


def set_io_priority(low: Lowering, op: m.SetIoPriority) -> None:
    value = IOPRIO_CLASSES[op.klass] << IOPRIO_CLASS_SHIFT | op.priority
    low.a.sys("ioprio_set", IOPRIO_WHO_PROCESS, 0, value)


def set_personality(low: Lowering, op: m.SetPersonality) -> None:
    low.a.sys("personality", op.domain)


def set_memory_policy(low: Lowering, op: m.SetMemoryPolicy) -> None:
    words = max(op.nodes, default=-1) // 64 + 1
    mask = [0] * words
    for node in op.nodes:
        mask[node // 64] |= 1 << node % 64
    nodes = low.a.constant(pack(f"<{words}Q", *mask)) if words else 0
    # The kernel uses one bit less than the number that is passed (mm/mempolicy.c, get_nodes).
    low.a.sys(
        "set_mempolicy", MEMORY_MODES[op.mode] | op.flags, nodes, words * 64 + 1 if words else 0
    )


def set_limit(low: Lowering, op: m.SetLimit) -> None:
    low.a.sys("prlimit64", 0, RLIMITS[op.type], low.a.constant(pack("<QQ", op.soft, op.hard)), 0)


def drop_bounding(low: Lowering, op: m.DropBounding) -> None:
    keep = set(op.keep)
    for number in range(op.last + 1):
        if number not in keep:
            low.a.sys("prctl", p.PR_CAPBSET_DROP, number, 0, 0, 0)


def set_groups(low: Lowering, op: m.SetGroups) -> None:
    groups = low.a.constant(pack(f"<{len(op.groups)}I", *op.groups)) if op.groups else 0
    low.a.sys("setgroups", len(op.groups), groups)


def try_folder(low: Lowering, op: m.TryFolder) -> None:
    a, refused = low.a, low.a.label()
    low.entered = a.slot(4)
    a.sys("chdir", op.path, store=low.entered, skip={EACCES: refused, EPERM: refused})
    low.reuse(_check_folder)
    a.place(refused)


def _check_folder(low: Lowering) -> None:
    """Emit a check that getcwd(2) returns a path below the process's root. Otherwise the program
    fails with ENOENT."""
    a = low.a
    # getcwd(2) returns "(unreachable)/…" for a folder outside of the root: a descriptor of the host
    # that leaked into the path (CVE-2024-21626).
    a.sys("getcwd", low.scratch, 4096)
    first = a.field(low.scratch, 0, 1)
    macros.require(a, first, "eq", ord("/"), ENOENT, OUTSIDE)


def set_ids(low: Lowering, op: m.SetIds) -> None:
    a = low.a
    if op.keep:
        a.sys("prctl", p.PR_SET_KEEPCAPS, 1, 0, 0, 0)
    # The gid first: after setresuid CAP_SETGID is gone.
    a.sys("setresgid", op.gid, op.gid, op.gid)
    a.sys("setresuid", op.uid, op.uid, op.uid)
    if op.keep:
        # execve would clear it, too, but the process may run for long before that, waiting for
        # `start`.
        a.sys("prctl", p.PR_SET_KEEPCAPS, 0, 0, 0, 0)
    # The kernel resets the dumpable flag to fs.suid_dumpable when credentials change.
    macros.forbid_dumps(low.a)


def set_capabilities(low: Lowering, op: m.SetCapabilities) -> None:
    a, sets = low.a, (op.effective, op.permitted, op.inheritable)
    # Data, not a constant, because the kernel may write its version into it.
    header = low.a.data(pack("<II", LINUX_CAPABILITY_VERSION_3, 0))
    halves = [s & 0xFFFFFFFF for s in sets] + [s >> 32 for s in sets]
    a.sys("capset", header, low.a.constant(pack("<6I", *halves)))
    # Without permitted capabilities there are no ambient ones (capabilities(7)), so the call is
    # left out.
    if op.ambient or op.permitted:
        a.sys("prctl", p.PR_CAP_AMBIENT, p.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for number in op.ambient:
        a.sys(
            "prctl",
            p.PR_CAP_AMBIENT,
            p.PR_CAP_AMBIENT_RAISE,
            number,
            0,
            0,
            skip={EPERM: NEXT, EINVAL: NEXT},
        )


def forbid_new_privileges(low: Lowering, op: m.ForbidNewPrivileges) -> None:
    low.a.sys("prctl", p.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def enter_folder(low: Lowering, op: m.EnterFolder) -> None:
    a, entered = low.a, low.a.label()
    if low.entered is not None:
        a.compare(low.entered, "ge", 0, true=entered)
    a.sys("chdir", op.path)
    low.reuse(_check_folder)
    a.place(entered)


def load_filter(low: Lowering, op: m.LoadFilter) -> None:
    """Emit the calls that load the seccomp filter. Before that, the program closes the descriptors
    that no later operation needs and marks the others close-on-exec, because the filter may not
    allow close_range(2)."""
    a, low.filtered = low.a, True
    macros.close_all_from(a, 3 + low.preserve, cloexec=True)
    _close_all_but(low, "start", HOOK_STATE, HOOK_STDERR, "pause")
    program = a.data(pack("<HxxxxxxQ", len(op.instructions) // 8, 0))
    a.pointer(program.at(8), a.data(op.instructions))
    listener = a.slot(4)
    a.sys("seccomp", p.SECCOMP_SET_MODE_FILTER, op.flags, program, store=listener)
    if op.listener:
        a.send(LISTENER, listener, low.line)
        a.wait()


# ---- the end


def candidates(args: Sequence[str], env: Sequence[str]) -> list[str]:
    """Return the paths that execvp(3) tries for args[0], with the PATH of `env`."""
    name = args[0]
    # execve answers ENOENT for an empty path, as execvp(3) does for an empty name.
    if "/" in name or not name:
        return [name]
    path = next((v[5:] for v in env if v.startswith("PATH=")), DEFAULT_PATH)
    return [f"{entry or '.'}/{name}" for entry in path.split(":")]


def check_program(low: Lowering, op: m.CheckProgram) -> None:
    low.reuse(_check_candidates, tuple(candidates(op.args, op.env)), op.args[0])


def _check_candidates(low: Lowering, paths: tuple[str, ...], name: str) -> None:
    macros.check_program(low.a, paths, name, place=low.scratch, mark=NO_PROGRAM)


def argument_sizes(args: Sequence[str], env: Sequence[str]) -> str:
    """Return a text for E2BIG: it names the argument or variable that is too long, or the total
    length. Empty if no limit can be exceeded.

    execve(2) takes at most MAX_ARG_STRLEN bytes in one string. The limit for all strings together,
    with a pointer for each, is a quarter of RLIMIT_STACK, at least 128 KiB and at most 6 MiB.
    """
    # A bound for UTF-8, which takes a microsecond and suffices for most calls.
    if 4 * (sum(map(len, args)) + sum(map(len, env))) <= MAX_ARG_STRLEN:
        return ""
    lengths = [len(text.encode("utf-8", "surrogateescape")) + 1 for text in (*args, *env)]
    total = sum(lengths) + POINTER_BYTES * len(lengths)
    if total <= MAX_ARG_STRLEN:
        return ""
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > MAX_ARG_STRLEN:
        what = (
            f"argument {longest}"
            if longest < len(args)
            else env[longest - len(args)].partition("=")[0][:80]
        )
        return (
            f"{what} has {lengths[longest]} bytes"
            f" and the kernel takes {MAX_ARG_STRLEN} in one string"
        )
    return (
        f"{len(args)} arguments and {len(env)} environment variables have {total} bytes together"
        " and the kernel takes a quarter of the stack limit (RLIMIT_STACK) and at most 6 MiB"
    )


def execute(low: Lowering, op: m.Execute) -> None:
    """Emit calls that close descriptors and then execute the container's command. These descriptors
    stay open: stdio, `op.preserve` descriptors from 3 on and, until execve, the socket for errors.

    If execve fails, the program sends the error to the process `pyrunc start`, which is connected
    to it. In a plan without `start` it sends the error to the parent, on the synchronisation
    socket.
    """
    a = low.a
    # The socket for errors stays open; execve closes it.
    keep = [low.sync_number] if low.start is None else [low.start_number]
    macros.close_all_from(a, 3 + op.preserve, keep, may_fail=low.filtered)
    a.set(low.argv, a.pointers(op.args))
    a.set(low.envp, a.pointers(op.env))
    # Arguments and environment differ from pod to pod, the paths are mostly the same.
    low.reuse(_execute_candidates, tuple(candidates(op.args, op.env)), op.args[0])
    if low.start is None:
        a.fail(low.result, argument_sizes(op.args, op.env), mark=NO_PROGRAM)
    else:
        a.sys("write", low.start, low.result.address, 4)
        a.exit(127)


def _execute_candidates(low: Lowering, paths: tuple[str, ...], name: str) -> None:
    """Emit calls that try execve with each of `paths`, in order, until one succeeds. The arguments
    are at `low.argv`, the environment is at `low.envp`. If none succeeds, `low.result` has the
    negative errno.

    `name`: the command's name in the configuration.
    """
    a, result = low.a, low.result
    macros.execute(a, paths, low.argv, low.envp, result=result)
    if "/" not in name:
        return
    # execve answers EACCES for a directory
    folder, report = a.label(), a.label()
    a.compare(result, "eq", -EACCES, false=report)
    place = low.scratch
    a.sys("statx", f.AT_FDCWD, name, 0, f.STATX_BASIC_STATS, place, skip_any=report)
    mode = macros.status_field(a, place, "mode")
    a.compare(mode, "eq", f.S_IFDIR, mask=f.S_IFMT, true=folder, false=report)
    a.place(folder)
    a.set(result, -EISDIR)
    a.place(report)


def _close_all_but(low: Lowering, *names: str) -> None:
    """Emit calls that close all descriptors but stdio, the preserved ones, the synchronisation
    socket and the plan's descriptors `names`. A container may wait for `start` for a long time,
    and must not keep other descriptors open."""
    keep = [low.sync_number, *(low.numbers[name] for name in names if name in low.numbers)]
    macros.close_all_from(low.a, 3 + low.preserve, keep)


def ready(low: Lowering, op: m.Ready) -> None:
    low.a.send(READY)


def end_by_signals(low: Lowering, op: m.EndBySignals) -> None:
    macros.end_by_signals(low.a, op.numbers)


def await_start(low: Lowering, op: m.AwaitStart) -> None:
    """Emit the calls that accept one connection of `start` and wait for its byte. They also close
    the synchronisation socket, because the process that created the container has ended.

    `start` then reads the result from the connection: a negative errno (i32) if execve has failed,
    end of file if it has succeeded.
    """
    a, listening = low.a, low.numbers[op.descriptor]
    if not low.filtered:
        _close_all_but(low, "start", HOOK_STATE, HOOK_STDERR)
    low.start, low.start_number = a.slot(4), low.sync_number
    again = a.slot(4)
    byte = a.data(8)
    # The listening socket, and then the connection, takes the number of the socket to our parent:
    # this number is known here, and `execute` keeps it open until execve.
    a.sys("dup3", listening, low.start_number, f.O_CLOEXEC)
    a.sys("close", listening)
    # A socket, not a FIFO as in runc: `start` reads an errno from it or, after execve, end of file;
    # and a dead container refuses the connection.
    a.sys("accept4", low.start_number, 0, 0, SOCK_CLOEXEC, store=again)
    a.sys("dup3", again, low.start_number, f.O_CLOEXEC, store=low.start)
    a.sys("close", again)
    got = a.slot(8)
    a.sys("read", low.start, byte, 1, store=got)
    go = a.label()
    a.compare(got, "eq", 1, true=go)
    # End of file: `start` was killed before it sent the byte. It may have removed the socket
    # already, so no other `start` could reach this process.
    a.exit(126)
    a.place(go)


def refuse_start(low: Lowering, op: m.RefuseStart) -> None:
    assert low.start is not None
    low.a.sys("write", low.start, low.a.constant(pack("<i", -EINVAL)), 4)
    low.a.exit(127)


def run_hook(low: Lowering, op: m.RunHook) -> None:
    """Emit calls that run a startContainer hook in a child of the process. If the hook fails, the
    process ends."""
    a = low.a
    pid = low.a.slot(4)
    child = low.a.label()
    done = low.a.label()
    state, errors, keep = low.numbers[op.descriptor], low.numbers[op.errors], low.sync_number
    # clone(2), because filters need not know clone3. Not CLONE_PARENT, which the first process of a
    # pid namespace may not use (EINVAL): this process waits for the hook itself.
    a.sys("clone", SIGCHLD, 0, 0, 0, 0, store=pid)
    # The parent's half comes first, because jumps go forward only.
    a.compare(pid, "eq", 0, true=child)
    if op.timeout_s is not None:
        _kill_after_timeout(low, pid, op)
    status = a.slot(4, 0)
    a.sys("wait4", pid, status.address, 0, 0)
    a.compare(status, "eq", 0, true=done)
    _fail_hook(low, op, status)
    a.place(child)
    a.sys("lseek", state, 0, 0)
    a.sys("dup3", state, 0, 0)
    # A filter may forbid ftruncate(2). Under a filter `errors` keeps the output of earlier hooks.
    if not low.filtered:
        a.sys("ftruncate", errors, 0)
        a.sys("lseek", errors, 0, 0)
    a.sys("dup3", errors, 2, 0)
    macros.close_all_from(a, 3, [keep], may_fail=low.filtered)
    a.sys("execve", op.path, a.pointers(op.args), a.pointers(op.env), skip_any=NEXT)
    a.exit(127)
    a.place(done)


def _fail_hook(low: Lowering, op: m.RunHook, status: Operand) -> None:
    """Emit calls that send a STATUS message and end the process with exit code 1. The message has
    the hook's index and wait status (-1: killed after its timeout).

    If `start` waits, STATUS goes to `start`, followed by the hook's stderr. Otherwise STATUS goes
    to the parent, which reads the hook's stderr from the file `op.errors`.
    """
    a = low.a
    a.send(STATUS, op.index, status)
    if low.start is not None:
        errors, limit = low.numbers[op.errors], HOOK_OUTPUT_LIMIT_BYTES
        # A filter may forbid sendfile(2).
        a.sys("sendfile", low.start, errors, a.data(8), limit, skip_any=NEXT)
    a.exit(1)


def _kill_after_timeout(low: Lowering, pid: Slot, op: m.RunHook) -> None:
    a = low.a
    pidfd = low.a.slot(4)
    ready = low.a.slot(4)
    ended = low.a.label()
    a.sys("pidfd_open", pid, 0, store=pidfd)
    waited = a.data(pack("<ihh", -1, POLLIN, 0))
    a.set(a.field(waited, 0, 4), pidfd)
    a.sys(
        "ppoll", waited, 1, a.data(pack("<qq", op.timeout_s or 0, 0)), 0, SIGSET_SIZE, store=ready
    )
    a.sys("close", pidfd)
    a.compare(ready, "ne", 0, true=ended)
    # Not reaped yet, so the pid cannot have been reused.
    a.sys("kill", pid, SIGKILL)
    a.sys("wait4", pid, 0, 0, 0)
    _fail_hook(low, op, -1)
    a.place(ended)


def execute_descriptor(low: Lowering, op: m.ExecuteDescriptor) -> None:
    a, program = low.a, low.numbers[op.descriptor]
    argv, envp = a.pointers(op.args), a.pointers(op.env)
    a.sys("fcntl", program, f.F_SETFD, f.FD_CLOEXEC)
    macros.close_all_from(a, 3, [program, low.sync_number])
    a.send(READY)
    # By descriptor: the root has no file to execute.
    a.sys("execveat", program, "", argv, envp, EMPTY)


CALLS: dict[type, Callable[[Lowering, Any], None]] = {
    m.Prepare: prepare,
    m.SetOomScore: set_oom_score,
    m.SetExecLabel: set_exec_label,
    m.Join: join,
    m.JoinProcess: join_process,
    m.OffsetClocks: offset_clocks,
    m.SetAffinity: set_affinity,
    m.Clone: clone_process,
    m.Sync: sync,
    m.BecomeRoot: become_root,
    m.NewSession: new_session,
    m.NewKeyring: new_keyring,
    m.LoopbackUp: loopback_up,
    m.SetUmask: set_umask,
    m.SetHostname: set_hostname,
    m.SetDomainname: set_domainname,
    m.SetSysctl: set_sysctl,
    m.SetScheduler: set_scheduler,
    m.SetIoPriority: set_io_priority,
    m.SetPersonality: set_personality,
    m.SetMemoryPolicy: set_memory_policy,
    m.SetLimit: set_limit,
    m.DropBounding: drop_bounding,
    m.SetGroups: set_groups,
    m.TryFolder: try_folder,
    m.SetIds: set_ids,
    m.SetCapabilities: set_capabilities,
    m.ForbidNewPrivileges: forbid_new_privileges,
    m.EnterFolder: enter_folder,
    m.LoadFilter: load_filter,
    m.CheckProgram: check_program,
    m.Ready: ready,
    m.EndBySignals: end_by_signals,
    m.AwaitStart: await_start,
    m.RefuseStart: refuse_start,
    m.RunHook: run_hook,
    m.Execute: execute,
    m.ExecuteDescriptor: execute_descriptor,
}
NEEDS: dict[type, Callable[[Any], tuple[str, ...]]] = {
    m.Join: lambda op: (op.descriptor,),
    m.JoinProcess: lambda op: (op.descriptor,),
    m.Clone: lambda op: ("cgroup",) if op.cgroup else (),
    m.SetSysctl: lambda op: ("proc",),
    m.AwaitStart: lambda op: (op.descriptor,),
    m.RunHook: lambda op: (op.descriptor, op.errors),
    m.ExecuteDescriptor: lambda op: (op.descriptor,),
}
