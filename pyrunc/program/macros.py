"""Sequences of operations that many plans need. Each function emits operations: it appends them to
the assembler.

All descriptors that the operations open are close-on-exec. If a function returns the slot of a
descriptor, its caller may append a call that closes the descriptor.
"""

from __future__ import annotations

from errno import (
    EACCES,
    EAGAIN,
    EEXIST,
    EISDIR,
    ELIBACC,
    ENODEV,
    ENOENT,
    ENOSYS,
    ENOTDIR,
    EPERM,
)
from struct import pack

from pyrunc.abi.clone import CLONE_ARGS_SIZE, CLONE_INTO_CGROUP, CLONE_PARENT
from pyrunc.abi.file import (
    AT_EACCESS,
    AT_EMPTY_PATH,
    AT_EXECVE_CHECK,
    AT_FDCWD,
    CLOSE_RANGE_CLOEXEC,
    F_OK,
    F_SETFD,
    FD_CLOEXEC,
    O_CLOEXEC,
    O_CREAT,
    O_EXCL,
    O_PATH,
    OPEN_HOW_SIZE,
    RESOLVE_BENEATH,
    RESOLVE_IN_ROOT,
    RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_SYMLINKS,
    S_IFCHR,
    S_IFDIR,
    S_IFMT,
    STATX_BASIC_STATS,
    STATX_FIELDS,
    STATX_SIZE,
    X_OK,
)
from pyrunc.abi.prctl import PR_SET_DUMPABLE, PR_SET_NAME
from pyrunc.abi.signal import SA_RESTORER, SIGACTION_SIZE, SIGSET_SIZE
from pyrunc.kernel.path import components
from pyrunc.program.model import DESCRIPTOR, NEXT, PID, Address, Label, Operand, Slot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyrunc.program.assemble import Assembler

# openat2 with RESOLVE_IN_ROOT answers EAGAIN while anything is renamed (see kernel/path.py).
RETRY = (EAGAIN, 100)
IN_ROOT = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS
BENEATH = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS


# ---- the process


def prologue(a: Assembler, name: str = "pyrunc:init") -> None:
    """Emit the first operations of every program: make the socket close-on-exec, name the process,
    reset signals 32 and 33 to their defaults, make the process non-dumpable."""
    # dup2(2) of posix_spawn has cleared FD_CLOEXEC. If the payload had the socket, the parent would
    # never see end of file.
    a.sys("fcntl", a.sync, F_SETFD, FD_CLOEXEC)
    a.sys("prctl", PR_SET_NAME, name[:15], 0, 0, 0)
    default = a.constant(bytes(SIGACTION_SIZE))
    # posix_spawn ignores these two whatever its attributes say (glibc,
    # sysdeps/unix/sysv/linux/spawni.c), and the payload would inherit that.
    for number in (32, 33):
        a.sys("rt_sigaction", number, default, 0, SIGSET_SIZE)
    forbid_dumps(a)


def end_by_signals(a: Assembler, numbers: Sequence[int]) -> None:
    """Emit the calls that make these signals end the process. The setting lasts until execve, which
    resets their handlers.

    Without a handler, the kernel drops these signals for the first process of a pid namespace
    (pid_namespaces(7)).
    """
    action = a.data(pack("<4Q", 0, SA_RESTORER, 0, 0))
    # On x86-64 the kernel delivers no signal without a restorer; the handler never returns to it.
    for offset in (0, 16):
        a.set(a.field(action, offset, 8), a.handler)
    for number in numbers:
        a.sys("rt_sigaction", number, action, 0, SIGSET_SIZE)


def forbid_dumps(a: Assembler) -> None:
    """Emit the call that makes the process non-dumpable. The kernel resets this at every change of
    credentials, so each change must be followed by this call."""
    a.sys("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def clone_sibling(a: Assembler, flags: int, pid: Slot, cgroup: int | None = None) -> None:
    """Emit clone3(2) with CLONE_PARENT: the new process is a child of the launcher's parent.

    - `pid`: the slot for the new process's pid; 0 in the new process
    - `cgroup`: descriptor of the new process's cgroup v2 directory
    """
    # Without CLONE_PIDFD, which would put the pidfd into the launcher's table: the parent opens one
    # by the pid of its child.
    flags |= CLONE_PARENT | (CLONE_INTO_CGROUP if cgroup is not None else 0)
    # exit_signal 0: with CLONE_PARENT the child gets the caller's, which is SIGCHLD, and another
    # value is EINVAL.
    args = a.data(pack("<11Q", flags, *[0] * 9, cgroup or 0))
    a.sys("clone3", args, CLONE_ARGS_SIZE, store=pid)


def fork_parent(a: Assembler, flags: int, cgroup: int | None = None) -> None:
    """Emit calls that clone a new process as a child of the process that called `launch`. The new
    process runs the operations that are appended afterwards. The launcher sends PID (the new
    process's pid in the launcher's pid namespace) and exits.

    `flags`: CLONE_NEW* flags; `cgroup`: descriptor of the new process's cgroup v2 directory.
    """
    # No PR_SET_PDEATHSIG: the signal comes when the thread that made the child ends, not when the
    # process ends (prctl(2)). The child notices a dead parent as end of file at its next wait.
    pid, child = a.slot(4), a.label("child")
    clone_sibling(a, flags, pid, cgroup)
    a.compare(pid, "eq", 0, true=child)
    a.send(PID, pid)
    a.exit(0)
    a.place(child)


def close_all_from(
    a: Assembler,
    first: int,
    keep: Sequence[int] = (),
    *,
    cloexec: bool = False,
    may_fail: bool = False,
) -> None:
    """Emit calls that close every descriptor from `first` on, except those in `keep`.

    - `cloexec`: mark the descriptors close-on-exec instead
    - `may_fail`: ignore a failure of close_range(2), which a seccomp filter may forbid
    """
    ends = sorted(number for number in set(keep) if number >= first)
    for end in (*ends, 1 << 32):
        if end > first:
            flags = CLOSE_RANGE_CLOEXEC if cloexec else 0
            skip_any = NEXT if may_fail else None
            a.sys("close_range", first, end - 1, flags, skip_any=skip_any)
        first = end + 1


def send_fd(a: Assembler, fd: Operand) -> None:
    """Emit a DESCRIPTOR message with a copy of `fd` (SCM_RIGHTS), for example the console's master.
    Without this message the parent would need pidfd_getfd(2), which requires the right to ptrace.

    The caller must emit this message before the calls that load a seccomp filter, because a filter
    may forbid sendmsg(2). Messages of `Assembler.send` use write(2).
    """
    message = a.data(pack("<IIqq", DESCRIPTOR, a.here, 0, 0))
    iovec = a.data(pack("<QQ", 0, 24))
    a.pointer(iovec, message)
    # struct cmsghdr {u64 len, i32 level, i32 type} and one int, padded to 24 bytes
    control = a.data(pack("<QiiiI", 20, 1, 1, 0, 0))
    a.set(a.field(control, 16, 4), fd)
    # struct msghdr {name, u32 namelen, iov, iovlen, control, controllen, i32 flags}
    header = a.data(pack("<QQQQQQQ", 0, 0, 0, 1, 0, 24, 0))
    a.pointer(header.at(16), iovec)
    a.pointer(header.at(32), control)
    a.sys("sendmsg", a.sync, header, 0x4000)  # MSG_NOSIGNAL


def require(
    a: Assembler,
    value: Operand,
    relation: str,
    constant: int,
    errno: int,
    note: str,
) -> None:
    """Emit a comparison of `value` with `constant`; `relation` is eq, ne, lt or ge. If it is not
    true, the program fails with `errno` and `note`."""
    good = a.label("as required")
    a.compare(value, relation, constant, true=good)
    a.fail(errno, note)
    a.place(good)


# ---- paths


def open_at(
    a: Assembler,
    root: Operand,
    path: str | Slot,
    flags: int = O_PATH,
    *,
    resolve: int = IN_ROOT,
    store: Slot | None = None,
    skip: Mapping[int, Label] | None = None,
    ok: Label = NEXT,
) -> Slot:
    """Emit openat2(2) of `path` beneath the directory `root`; return the slot of the new
    descriptor, which is close-on-exec. The program repeats the call after EAGAIN.

    - `root`: the directory's descriptor
    - `resolve`: IN_ROOT treats `root` as `/`; BENEATH forbids symbolic links and leaving `root`
    - `store`: the slot to use; None for a new slot
    - `skip`: errno -> label to jump to. The slot then has the negative errno.
    - `ok`: the label to jump to after success
    """
    fd = a.slot(4) if store is None else store
    how = a.constant(pack("<3Q", flags | O_CLOEXEC, 0, resolve))  # struct open_how
    a.sys("openat2", root, path or ".", how, OPEN_HOW_SIZE, store=fd, skip=skip, ok=ok, retry=RETRY)
    return fd


def make_directories(a: Assembler, root: Operand, path: str) -> Slot:
    """Emit the calls that make directories (0755) inside the root like `mkdir -p`; return the slot
    of an O_PATH descriptor of the last one.

    Existing symbolic links are followed inside the root. A missing directory is made below the
    directory that was just opened, and is then opened without following links. If another process
    swaps names meanwhile, the program fails, but makes nothing outside the root.
    """
    flags = O_PATH | a.arch.o_directory
    names = components(path)
    if not names:
        return open_at(a, root, ".", flags)
    result = a.slot(4)
    done = a.label("directory is there")
    missing = a.label("directory is missing")
    open_at(a, root, "/".join(names), flags, store=result, skip={ENOENT: missing}, ok=done)
    a.place(missing)
    parent: Operand = root
    for index, name in enumerate(names[:-1]):
        child = a.slot(4)
        opened = a.label(f"component {index}")
        make = a.label(f"make component {index}")
        open_at(
            a,
            root,
            "/".join(names[: index + 1]),
            flags,
            store=child,
            skip={ENOENT: make},
            ok=opened,
        )
        a.place(make)
        # EEXIST: another process made it meanwhile, or it is a dangling link, which the next call
        # refuses.
        a.sys("mkdirat", parent, name, 0o755, skip={EEXIST: NEXT})
        open_at(a, parent, name, flags, resolve=BENEATH, store=child)
        a.place(opened)
        if index:
            a.sys("close", parent)
        parent = child
    a.sys("mkdirat", parent, names[-1], 0o755, skip={EEXIST: NEXT})
    open_at(a, parent, names[-1], flags, resolve=BENEATH, store=result)
    if len(names) > 1:
        a.sys("close", parent)
    a.place(done)
    return result


def make_file(a: Assembler, root: Operand, path: str) -> Slot:
    """Emit calls that open the file at the path (O_PATH); return its slot. If it is missing, they
    make an empty file (0644) and the missing directories above it."""
    names = components(path)
    result, done, missing = a.slot(4), a.label("file is there"), a.label("file is missing")
    open_at(a, root, "/".join(names), O_PATH, store=result, skip={ENOENT: missing}, ok=done)
    a.place(missing)
    parent = make_directories(a, root, "/".join(names[:-1]))
    exists = a.label("made meanwhile")
    a.sys("close", create_file(a, parent, names[-1], {EEXIST: exists}))
    a.place(exists)
    open_at(a, parent, names[-1], O_PATH, resolve=BENEATH, store=result)
    a.sys("close", parent)
    a.place(done)
    return result


def create_file(
    a: Assembler, folder: Operand, name: str, skip: Mapping[int, Label] | None = None
) -> Slot:
    """Emit a call that creates an empty file (0644); return the slot of its descriptor. The call
    fails with EEXIST if `name` exists, also as a symbolic link or a FIFO."""
    new_file = a.slot(4)
    flags = O_CREAT | O_EXCL | a.arch.o_nofollow | O_CLOEXEC
    a.sys("openat", folder, name, flags, 0o644, store=new_file, skip=skip)
    return new_file


def status(a: Assembler, fd: Operand) -> Address:
    """Emit statx(2) of a descriptor; returns the address of its result, for `status_field`."""
    place = a.data(STATX_SIZE)
    a.sys("statx", fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, place)
    return place


def status_field(a: Assembler, place: Address, name: str) -> Slot:
    """Return the field `name` of `place`, the result of `status`, as a slot: `ino`, `size` and
    `mnt_id` have 8 bytes, all other fields have 4. The field `mode` must be compared with a mask
    such as S_IFMT, because the slot's upper two bytes are padding."""
    offset, width = STATX_FIELDS[name]
    return a.field(place, offset, max(width, 4))


def require_device(a: Assembler, fd: Operand, major: int, minor: int, what: str) -> None:
    """Emit a check that the descriptor is the character device of these numbers (/dev/null is 1:3).
    If not, the program fails with ENODEV."""
    place = status(a, fd)
    wrong, good = a.label("wrong device"), a.label("right device")
    a.compare(status_field(a, place, "mode"), "eq", S_IFCHR, mask=S_IFMT, false=wrong)
    a.compare(status_field(a, place, "rdev_major"), "eq", major, false=wrong)
    a.compare(status_field(a, place, "rdev_minor"), "eq", minor, true=good)
    a.place(wrong)
    a.fail(ENODEV, f"{what} is not the character device {major}:{minor}")
    a.place(good)


# ---- execve


def check_program(
    a: Assembler,
    candidates: Sequence[str],
    name: str = "",
    *,
    place: Address | None = None,
    mark: str = "program",
) -> None:
    """Emit a check that one of `candidates` can be executed with the present credentials. If none
    can, the program fails with the errno that execvp would report.

    `candidates` are tried in order: `dir/name` for every PATH entry, or the command alone if it
    contains a slash. If one exists but cannot be executed, the errno is EACCES (EISDIR for a
    directory), not ENOENT. `place`: the address of a buffer of STATX_SIZE bytes that the check may
    overwrite; if None, a new buffer is added to the program's data.

    The check uses execveat(2) with AT_EXECVE_CHECK (Linux 6.14). It uses access(2) instead if the
    kernel is older, if a filter forbids execveat(2), or if execveat(2) fails with an unusual errno
    such as ENOTDIR. If a filter forbids access(2) as well, the program goes on without a check.
    """
    argv, env = a.pointers([name or "check"]), a.pointers([])
    place = place or a.data(STATX_SIZE)
    # The last path that answered EACCES or is a directory.
    denied = a.slot(8, 0)
    program_ok, by_access, report = a.label("program found"), a.label("access"), a.label("report")
    for path in candidates:
        after, refused = a.label("next candidate"), a.label("refused")
        a.sys(
            "execveat", AT_FDCWD, path, argv, env, AT_EXECVE_CHECK,
            ok=program_ok, skip={ENOENT: after, EACCES: refused}, skip_any=by_access,
        )  # fmt: skip
        a.place(refused)
        # execvp(3) goes on after EACCES, and reports it in the end although other folders answered
        # ENOENT.
        a.set(denied, a.string(path))
        a.place(after)
    a.goto(report)
    a.place(by_access)
    for path in candidates:
        _check_by_access(a, path, place, denied, program_ok)
    a.place(report)
    missing, directory, refused = a.label("missing"), a.label("directory"), a.label("refused")
    a.compare(denied, "eq", 0, true=missing)
    a.sys("statx", AT_FDCWD, denied, 0, STATX_BASIC_STATS, place, skip_any=refused)
    a.compare(status_field(a, place, "mode"), "eq", S_IFDIR, mask=S_IFMT, true=directory)
    a.place(refused)
    a.fail(EACCES, mark=mark)
    a.place(directory)
    a.fail(EISDIR, "is a directory", mark=mark)
    a.place(missing)
    a.fail(ENOENT, mark=mark)
    a.place(program_ok)


def _check_by_access(
    a: Assembler, path: str, place: Address, denied: Slot, program_ok: Label
) -> None:
    """Emit a check of one candidate with access(2) and statx(2). The program jumps to `program_ok`
    if the candidate can be executed, or if a filter forbids these calls. Otherwise the program goes
    on; for a directory and after EACCES, it first stores the path in `denied`."""
    after, granted, refused = a.label("next candidate"), a.label("granted"), a.label("refused")
    result = a.slot(4)
    a.sys(
        "faccessat2", AT_FDCWD, path, X_OK, AT_EACCESS,
        ok=granted, skip={ENOENT: after, EACCES: refused}, skip_any=NEXT,
    )  # fmt: skip
    # A filter that forbids this call, too, leaves nothing to check with.
    a.sys(
        "faccessat", AT_FDCWD, path, X_OK,
        store=result, ok=granted, skip={ENOSYS: program_ok, EPERM: program_ok}, skip_any=NEXT,
    )  # fmt: skip
    a.compare(result, "eq", -EACCES, true=refused, false=after)
    a.place(granted)
    a.sys("statx", AT_FDCWD, path, 0, STATX_BASIC_STATS, place, skip_any=program_ok)
    a.compare(status_field(a, place, "mode"), "ne", S_IFDIR, mask=S_IFMT, true=program_ok)
    a.place(refused)
    a.set(denied, a.string(path))
    a.place(after)


def execute(
    a: Assembler,
    candidates: Sequence[str],
    argv: Address | Slot,
    envp: Address | Slot,
    *,
    result: Slot,
) -> None:
    """Emit calls that try execve with each path, in order, until one succeeds. As with execvp, the
    next path is tried after ENOENT, ENOTDIR and EACCES; if none succeeds, EACCES is reported rather
    than ENOENT. `argv`, `envp`: arrays that `Assembler.pointers` has made.

    On success the operations that follow do not run. On failure `result` (4 bytes) has the negative
    errno. execve answers ENOENT also for a file whose loader or `#!` interpreter is missing. The
    program replaces this ENOENT by ELIBACC, an errno that execve itself does not return, and tries
    no further path.
    """
    failed, code = a.label("execve failed"), a.slot(4)
    a.set(result, -ENOENT)
    for path in candidates:
        after, missing, refused = a.label("next candidate"), a.label("ENOENT"), a.label("refused")
        a.sys(
            "execve",
            path,
            argv,
            envp,
            store=code,
            skip={ENOENT: missing, ENOTDIR: after},
            skip_any=refused,
        )
        a.place(missing)
        # ENOENT is ambiguous: if the file is there, its interpreter or loader is missing.
        a.sys("faccessat", AT_FDCWD, path, F_OK, skip_any=after)
        a.set(code, -ELIBACC)
        a.place(refused)
        a.set(result, code)
        a.compare(code, "eq", -EACCES, false=failed)
        a.place(after)
    a.place(failed)
