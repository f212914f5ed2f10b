"""Stores the compiled programs of execs in files, so that a repeated exec needs no parsing,
planning or lowering.

Probes run the same command every few seconds. A compiled program has no pids and no descriptors, so
it can be run again as long as its inputs are the same. The cache `key` has these inputs: the
container's configuration, first process and keyring, the request, the runtime's own rights, the
file in which the user's home is looked up, and the runtime's version. Programs are stored in the
container's folder and removed with it.

Only plain requests are cached: without a terminal, console socket, extra descriptors or `--cgroup`.
They must also come from root of the initial user namespace: for any other user, the parent of the
new process must enter the container's user namespace first.

If a stored program fails before its execve, no error is raised. The caller then compiles the exec,
which reports the cause.
"""

from __future__ import annotations

import marshal
import os
from _imp import source_hash
from errno import ENOENT

from pyrunc import atomic_file
from pyrunc.errors import KernelError
from pyrunc.kernel.credential import is_machine_root
from pyrunc.kernel.fd import close_all, read_file
from pyrunc.launch import run
from pyrunc.launch.model import Launch
from pyrunc.program.errors import OperationFailed
from pyrunc.program.model import LoweredProgram, Program
from pyrunc.spec.value import Value
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from pyrunc.container.state import State
    from pyrunc.launch.run import ChildProcess

# Probes have few commands; more than this are commands with changing arguments.
FOLDER, AT_MOST = "programs", 16
DESCRIPTORS = {"container", "cgroup"}
SCRIPT = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "native", "pyrunc-script"
)
# The options that decide how the process is made; the others concern the runtime.
KEY_OPTIONS = (
    "additional_gids", "apparmor", "cap", "cwd", "env", "no_new_privs", "process_label", "user",
)  # fmt: skip
OWN_RIGHTS = (b"CapPrm:", b"CapBnd:", b"Cpus_allowed:", b"NoNewPrivs:")


class StoredProgram(Value):
    """A stored, compiled program of an exec.

    - `owner`: the uid on the host of the user who owns the exec's standard streams
    - `warnings`: the warnings of the exec's plan
    """

    lowered: LoweredProgram
    owner: int
    warnings: tuple[str, ...]


def key(
    state: State,
    options: Mapping[str, Any],
    arguments: Sequence[str],
    document: bytes | None = None,
) -> bytes | None:
    """Return the key under which an exec's compiled program is cached. Return None for a request
    that is never cached, and when the container's /etc or /etc/passwd is a symlink.

    - `options`, `arguments`: the command line of the exec
    - `document`: the content of --process
    """
    if options["tty"] or options["preserve_fds"] or options["cgroup"] or options["console_socket"]:
        return None
    # Another user's exec has to enter the user namespace first, which is a step of its parent.
    if not is_machine_root():
        return None
    status = read_file("/proc/self/status").splitlines()
    rights = [line for line in status if line.startswith(OWN_RIGHTS)]
    # The script stands for our version: an upgrade writes it anew.
    config, script = _identity(f"{state.folder}/config.json"), _identity(SCRIPT)
    etc = f"/proc/{state.pid}/root/etc"
    if os.path.islink(etc) or os.path.islink(f"{etc}/passwd"):
        return None  # followed on the host, the link would lead to another file
    home = _identity(f"{etc}/passwd")
    chosen = [options.get(name) for name in KEY_OPTIONS]
    parts = (config, script, home, rights, chosen, [*arguments], document, state.pid, state.keyring)
    return repr(parts).encode("utf-8", "surrogatepass")


def _identity(path: str) -> tuple[int, ...]:
    """Return numbers that change when the file's content changes: device, inode, size, mtime and
    ctime. Empty when there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _path(state: State, program_key: bytes) -> str:
    return f"{state.folder}/{FOLDER}/{source_hash(0, program_key).hex()}"


def load(state: State, program_key: bytes) -> StoredProgram | None:
    """Return the program that `store` has stored under this key; None if there is none."""
    try:
        content = marshal.loads(read_file(_path(state, program_key)))
    except FileNotFoundError:
        return None
    except (EOFError, ValueError, TypeError):
        return None  # written by another Python
    # The file's name is a hash of the key with 64 bits, so another key may have the same name.
    if content[0] != program_key:
        return None
    _, encoded, pid_op, numbers, owner, warnings = content
    lowered = LoweredProgram(Program(encoded, pid_op=pid_op), numbers)
    return StoredProgram(lowered, owner, warnings)


def store(
    state: State, program_key: bytes, lowered: Any, owner: int, warnings: tuple[str, ...]
) -> None:
    """Store the compiled program of an exec that has started, for later execs with the same key.
    Ignores a file that cannot be written.

    - `program_key`: the result of `key`
    - `owner`: the uid on the host of the user who owns the exec's standard streams
    - `warnings`: the warnings of the exec's plan

    A program is not stored if it needs other descriptors than DESCRIPTORS, or if none of its
    operations reports the new process's pid (`Program.pid_op`). If the container has AT_MOST
    programs, they are removed first.
    """
    if not set(lowered.numbers) <= DESCRIPTORS or lowered.program.pid_op is None:
        return
    folder, path = f"{state.folder}/{FOLDER}", _path(state, program_key)
    content = (
        program_key,
        lowered.program.encoded,
        lowered.program.pid_op,
        lowered.numbers,
        owner,
        warnings,
    )
    try:
        if not os.path.isdir(folder):
            # Not makedirs: after a delete the container's folder must not appear again.
            os.mkdir(folder, 0o700)
        names = os.listdir(folder)
        # All, not the oldest: a command with changing arguments would push out all others anyway.
        if len(names) >= AT_MOST:
            for name in names:
                os.unlink(f"{folder}/{name}")
        atomic_file.write_bytes(path, marshal.dumps(content))
    except OSError:
        pass  # the container was deleted meanwhile, or another exec stores its program, too


def execute(state: State, pidfd: int, program: StoredProgram) -> ChildProcess | None:
    """Run the compiled `program`, which starts a process in the container whose first process is
    `pidfd`. Return the new process; the caller closes its descriptors. Return None when the process
    did not reach execve, or when the container's cgroup is gone."""
    opened = {"container": os.dup(pidfd)}
    try:
        if "cgroup" in program.lowered.numbers:
            group = state.group()
            if group is None:
                return None
            opened["cgroup"] = group.open_directory()
        with Undo() as undo:
            launch = Launch(program.lowered, opened, (0, 1, 2), stdio_owner=program.owner)
            child = run.launch(launch, undo)
            undo.commit()
            return child
    except OperationFailed:
        return None
    except KernelError as error:
        if error.errno == ENOENT:  # the container's cgroup was removed
            return None
        raise
    finally:
        close_all(opened.values())
