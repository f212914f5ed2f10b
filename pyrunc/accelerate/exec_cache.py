"""An exec of what this container has executed before: its program is on file, and nothing needs to
be parsed, planned or lowered.

Probes run the same command every few seconds. A program holds no pids and no descriptors, so it can
be run again as long as all that it was made from is the same; that is its `key`: the container's
configuration, the request, our own rights, the file in which the user's home is looked up, this
version of ours. Programs lie in the container's folder and go with it. Only plain requests take
this way: no terminal, no extra descriptors, nothing for the parent to do while the process is on
its way.

A failure here is no answer: nothing of the command has run then, and the whole way is gone, which
has the words.
"""

from __future__ import annotations

import marshal
import os
from _imp import source_hash
from errno import ENOENT

from pyrunc import atomic_file
from pyrunc.errors import KernelError
from pyrunc.kernel.credential import is_machine_root
from pyrunc.kernel.fd import open_memfd
from pyrunc.launch import run
from pyrunc.launch.model import Launch
from pyrunc.program.errors import OperationFailed
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from pyrunc.container.state import State
    from pyrunc.launch.run import ChildProcess

FOLDER, AT_MOST = "programs", 16
DESCRIPTORS = {"container", "cgroup"}
SCRIPT = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "native", "pyrunc-script"
)
# What of the options says how the process is made; the others are about us.
ASKED = (
    "additional_gids", "apparmor", "cap", "cwd", "env", "no_new_privs", "process_label", "user", "restrict_oom_score_adj",
)  # fmt: skip
OURS = (b"CapPrm:", b"CapBnd:", b"Cpus_allowed:", b"NoNewPrivs:")


class Program:
    """Bytes that the launcher takes, in place of a `program.model.Program`."""

    __slots__ = (
        "_encoded",
        "arch",
        "calls",
        "lines",
        "notes",
        "numbers",
        "owner",
        "pid_op",
        "program",
        "steps",
        "warnings",
    )

    def __init__(
        self,
        encoded: bytes,
        pid_op: int,
        numbers: dict[str, int],
        owner: int,
        warnings: tuple[str, ...],
    ) -> None:
        self._encoded = encoded
        self.pid_op = pid_op
        self.numbers = numbers
        self.owner = owner
        self.warnings = warnings
        self.program, self.arch = self, ""
        self.steps: dict[int, Any] = {}
        self.calls, self.lines, self.notes = (), (), {}  # type: tuple[str, ...], tuple[Any, ...], dict[int, Any]

    def __len__(self) -> int:
        return 0

    def open_image(self) -> int:
        return open_memfd("pyrunc:program", self._encoded)


def key(
    state: State,
    options: Mapping[str, Any],
    arguments: Sequence[str],
    document: bytes | None = None,
) -> bytes | None:
    """All that the program is made from; None when the request is none for this way. `document`:
    the content of --process."""
    if options["tty"] or options["preserve_fds"] or options["cgroup"] or options["console_socket"]:
        return None
    if not is_machine_root():
        return None
    with open("/proc/self/status", "rb", buffering=0) as file:
        ours = [line for line in (file.readall() or b"").splitlines() if line.startswith(OURS)]
    with open("/proc/self/oom_score_adj", "rb", buffering=0) as file:
        ours.append(file.readall() or b"")
    config, ours_is = _identity(f"{state.folder}/config.json"), _identity(SCRIPT)
    etc = f"/proc/{state.pid}/root/etc"
    if os.path.islink(etc) or os.path.islink(f"{etc}/passwd"):
        return None  # a link of the container's leads somewhere else for us
    home = _identity(f"{etc}/passwd")
    wanted = [options.get(name) for name in ASKED]
    parts = (config, ours_is, home, ours, wanted, [*arguments], document, state.pid, state.keyring)
    return repr(parts).encode("utf-8", "surrogatepass")


def _identity(path: str) -> tuple[int, ...]:
    """Of a file's content: a change makes another one. Empty when there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _path(state: State, wanted: bytes) -> str:
    return f"{state.folder}/{FOLDER}/{source_hash(0, wanted).hex()}"


def recall(state: State, wanted: bytes) -> Program | None:
    """The program with this key."""
    try:
        with open(_path(state, wanted), "rb", buffering=0) as file:
            found = marshal.loads(file.readall() or b"")
    except FileNotFoundError:
        return None
    except (EOFError, ValueError, TypeError):
        return None  # written by another Python
    return Program(*found[1:]) if found[0] == wanted else None


def remember(
    state: State, wanted: bytes, lowered: Any, owner: int, warnings: tuple[str, ...]
) -> None:
    """Keep a program that did its work. `owner`: the host's id of the user that gets stdio."""
    if not set(lowered.numbers) <= DESCRIPTORS or lowered.program.pid_op is None:
        return
    folder, path = f"{state.folder}/{FOLDER}", _path(state, wanted)
    content = (
        wanted,
        lowered.program.encode(),
        lowered.program.pid_op,
        lowered.numbers,
        owner,
        warnings,
    )
    try:
        if not os.path.isdir(folder):
            # not the container's folder with it, which would be a container again
            os.mkdir(folder, 0o700)
        kept = os.listdir(folder)
        if len(kept) >= AT_MOST:
            for name in kept:
                os.unlink(f"{folder}/{name}")
        atomic_file.write_bytes(path, marshal.dumps(content))
    except OSError:
        pass  # the container was deleted meanwhile, or another exec keeps its own


def execute(state: State, pidfd: int, program: Program) -> ChildProcess | None:
    """Run it in the container behind `pidfd`; None when that did not come to execve. The
    descriptors are the caller's."""
    opened = {"container": os.dup(pidfd)}
    try:
        if "cgroup" in program.numbers:
            group = state.cgroup()
            if group is None:
                return None
            opened["cgroup"] = group.open_directory()
        with Undo() as undo:
            launch = Launch(program, opened, (0, 1, 2), stdio_owner=program.owner)  # type: ignore[arg-type]
            child = run.launch(launch, undo)
            undo.commit()
            return child
    except OperationFailed:
        return None
    except KernelError as error:
        if error.errno == ENOENT:  # its cgroup is gone
            return None
        raise
    finally:
        for number in opened.values():
            os.close(number)
