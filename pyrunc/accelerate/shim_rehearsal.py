"""A shim's life is lived a few times in the zygote, before its heap is frozen.

Python specialises a function's code while it runs, fills type caches and allocates tables at first use. Done in the zygote, all of
this is shared by every shim; done in each shim, it is paid there, in time and in private pages. Nothing stays: the folder, the
processes (which run nothing but a few system calls, in the host's namespaces) and the descriptors go again.
"""

from __future__ import annotations

import os
import signal
import sys
from _socket import AF_UNIX, SOCK_SEQPACKET, socket

from pyrunc import ipc, records
from pyrunc.abi.prctl import PR_SET_PDEATHSIG
from pyrunc.compiler.messages import CompiledContainer, CompiledExec, CompiledPause, Io
from pyrunc.kernel.fd import close_all
from pyrunc.launch.model import Launch
from pyrunc.launch.sealed import seal
from pyrunc.program import macros
from pyrunc.program.assemble import Assembler
from pyrunc.program.model import READY
from pyrunc.shim import messages
from pyrunc.shim.pods import Pods
from pyrunc.shim.starter import LibraryStarter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from pyrunc.ipc import Message
    from pyrunc.records import Request

ROUNDS = 10  # a function's code is specialised from its eighth call on
MOST_TURNS = 1000
NO_GROUP = {"path": "/pyrunc-rehearsal", "driver": "cgroupfs"}


def rehearse() -> None:
    """Live pods' lives. A failure costs time and memory later, and is reported on stderr."""
    records.know()
    before = _descriptors()
    folder = f"/tmp/pyrunc-{os.urandom(8).hex()}"
    os.mkdir(folder, 0o700)
    try:
        for number in range(ROUNDS):
            stage = _Stage(f"{folder}/{number}")
            try:
                stage.live()
            finally:
                stage.close()
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_all(_descriptors() - before)
        _remove(folder)


class _Stage:
    """A pod in a folder of its own, and the only client it has."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        os.mkdir(folder)
        listener = socket(AF_UNIX, SOCK_SEQPACKET)
        listener.bind(f"{folder}/shim.sock")
        listener.listen(1)
        self._client = socket(AF_UNIX, SOCK_SEQPACKET)
        self._client.setblocking(False)
        self._client.connect(f"{folder}/shim.sock")
        self._pods = Pods(LibraryStarter())
        self._pods.add(folder, folder, listener.detach())

    def close(self) -> None:
        self._client.close()
        self._pods.close()

    def live(self) -> None:
        """A holder, and a container in which something is executed."""
        launch, fds = _sealed(_waiting(), 0)
        self._ask(messages.StartHolder(CompiledPause(launch, "host").to_fields()), fds)
        self.round("c")
        self._ask(messages.StopHolder())

    def round(self, name: str) -> None:
        """A container's life."""
        pid = self.start(name)
        launch, fds = _sealed(_ending(), pid)
        compiled = CompiledExec(launch).to_fields()
        self._ask(messages.StartExec(name, name, compiled, stdout=True, stderr=True), fds)
        self._hear("exec_exit")
        self._ask(messages.GetState())
        self._ask(messages.Stop(name, signal.SIGTERM, 1.0))
        self._ask(messages.Forget(name))

    def start(self, name: str) -> int:
        """A container's process, by its pid."""
        directory = f"{self._folder}/{name}"
        os.mkdir(directory)
        launch, fds = _sealed(_waiting(), 0)
        io = Io(log_path=f"{directory}/0.log", log_directory=directory)
        compiled = CompiledContainer({}, io, launch).to_fields()
        answer = self._ask(messages.StartContainer(name, compiled), fds)
        return messages.ContainerStarted.of(answer).pid

    def _ask(self, request: Request, fds: Sequence[int] = ()) -> Message:
        ipc.send(self._client, {"id": 1, **request.to_message()}, fds)
        ipc.close_all(fds)
        answer = self._hear("id")
        if "error" in answer:
            raise RuntimeError(f"{request.call}: {answer['error']}")
        return dict(answer["ok"])

    def _hear(self, word: str) -> Message:
        """The next message with this key, or the event of this name."""
        for _ in range(MOST_TURNS):
            try:
                received = ipc.receive(self._client)
            except BlockingIOError:
                self._pods.loop.turn()
                continue
            assert received is not None
            message, fds = received
            ipc.close_all(fds)
            if word in message or message.get("event") == word:
                return message
        raise RuntimeError(f"the shim never said {word}")


def _sealed(launch: Launch, container_pid: int) -> tuple[Message, list[int]]:
    """The launch's message, in a group that nobody has."""
    fields, fds = seal(launch)
    return fields | {"cgroup": NO_GROUP, "container_pid": container_pid}, fds


def _waiting() -> Launch:
    """A process that writes a line and waits for a signal."""
    a = _begun()
    a.sys("write", 1, a.string("rehearsal\n"), 10)
    a.sys("pause") if "pause" in a.arch.syscalls else a.sys("ppoll", 0, 0, 0, 0, 0)
    return _launch(a)


def _ending() -> Launch:
    """A process that ends at once."""
    return _launch(_begun())


def _begun() -> Assembler:
    a = Assembler()
    macros.prologue(a, "pyrunc:rehearse")
    macros.fork_parent(a, 0)
    # A zygote that is killed leaves none behind: before this call a process finds nobody to say READY to, after it the signal.
    a.sys("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    a.send(READY)
    a.sys("close", a.sync)
    return a


def _launch(a: Assembler) -> Launch:
    a.exit(0)
    return Launch(_Lowered(a.program()), {}, ())


class _Lowered:
    __slots__ = ("numbers", "program", "steps")

    def __init__(self, program: Any) -> None:
        self.program, self.numbers, self.steps = program, {}, {}  # type: ignore[var-annotated]


def _descriptors() -> set[int]:
    return set(map(int, os.listdir("/proc/self/fd")))


def _remove(folder: str) -> None:
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            os.unlink(f"{path}/{name}")
        os.rmdir(path)
