"""Runs a program: spawns the launcher from a sealed copy and passes it the program as a memfd.

    running = launch(program, stdio=(0, 1, 2), fds={5: root_mount})
    while message := running.receive():      # raises OperationFailed, with the plan's line
        if message.tag == PID: ...; running.release()
    running.close()          # `receive` returned None: execve or exit has closed the socket

In the launcher, `stdio` are the descriptors 0, 1, 2, and the keys of `fds` are the numbers of the
others. The synchronisation socket has the first number above all of these, the memfd with the
program the next. The launcher starts with no signal blocked, and ignores only 32 and 33, which
glibc's posix_spawn always ignores (`macros.prologue` resets them). The program makes the launcher
non-dumpable. The launcher's executable is a sealed memfd, so no write through /proc/PID/exe reaches
a file (CVE-2019-5736).
"""

from __future__ import annotations

import os
from _socket import AF_UNIX, MSG_CMSG_CLOEXEC, SO_RCVTIMEO, SOCK_SEQPACKET, SOL_SOCKET
from _socket import socket as _Socket
from _socket import socketpair as _socketpair
from errno import EACCES
from fcntl import F_DUPFD_CLOEXEC, fcntl
from struct import Struct

from pyrunc.errors import DeadlineExceeded, Error, KernelError
from pyrunc.kernel import fd as _fd
from pyrunc.program.errors import failure
from pyrunc.program.model import FAILURE, PID, REFUSED, Program
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LAUNCHER = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "native", "launcher"
)
MESSAGE = Struct("<IIqq")
"""A message: u32 tag, u32 index of the operation, two i64 values."""

# Signals whose disposition posix_spawn resets: all but SIGKILL and SIGSTOP, which have none, and
# the two that glibc reserves.
_TO_DEFAULT = [n for n in range(1, 65) if n not in (9, 19, 32, 33)]
_TIMEVAL = Struct("@ll")

EXIT_REFUSED = 126  # of the launcher, for a program that it does not take

_executable: tuple[int, int, int] | None = None  # number, device, inode


class LauncherMessage(Value):
    """A message that the program has sent.

    - `tag`: PID, READY, …
    - `op_index`: the index of the operation that sent it
    - `value`, `extra`: the two numbers of `Assembler.send`
    - `fds`: descriptors, which the receiver closes
    """

    tag: int
    op_index: int
    value: int
    extra: int
    fds: tuple[int, ...] = ()


class RunningProgram:
    """A program that was launched. Its owner must call `close`, which reaps the launcher. The owner
    must also reap the processes that the program has cloned."""

    def __init__(self, program: Program, launcher_pid: int, socket: _Socket) -> None:
        self.program, self.launcher_pid = program, launcher_pid
        self.launcher_status: int | None = None
        """The launcher's wait status (waitpid(2)) after it was reaped."""
        self._socket: _Socket | None = socket
        self._pid_seen = program.pid_op is None
        self._early: list[tuple[bytes, tuple[int, ...]]] = []

    def fileno(self) -> int:
        """Return the synchronisation socket's descriptor, for poll(2); -1 after `close`."""
        return self._socket.fileno() if self._socket else -1

    @property
    def queued(self) -> bool:
        """Return whether the next message was read already, so that `receive` returns without
        waiting."""
        return bool(self._early) and self._pid_seen

    def receive(self, timeout_s: float | None = None) -> LauncherMessage | None:
        """Return the next message. None when every process with the program's socket has closed it,
        by exit or execve.

        The launcher's message PID comes before all messages of the cloned process, even if it was
        sent later. So the caller knows which pid to reap when the cloned process fails.

        Raises OperationFailed for a failed operation, Error when the launcher refused the program
        or died, DeadlineExceeded after `timeout_s`.
        """
        while self._socket is not None:
            early = self._early.pop(0) if self._early and self._pid_seen else None
            packet, fds = early or self._packet(timeout_s)
            # The launcher died between its clone and its message: the child's messages are handled
            # without the pid.
            if not packet and self._early:
                self._pid_seen = True  # it will not come any more
                continue
            if not packet:
                self._check_launcher()
                return None
            tag, op_index, value, extra = MESSAGE.unpack(packet)
            if not self._pid_seen and self._is_from_cloned(tag, op_index):
                self._early.append((packet, fds))
                continue
            if tag in (FAILURE, REFUSED):
                _fd.close_all(fds)
            if tag == FAILURE:
                raise failure(self.program, op_index, abs(value))
            if tag == REFUSED:
                why = _REFUSALS.get(value, str(value))
                raise Error(f"the launcher refused the program: {why}, operation {op_index}")
            self._pid_seen = self._pid_seen or tag == PID
            return LauncherMessage(tag, op_index, value, extra, fds)
        return None

    def _is_from_cloned(self, tag: int, op_index: int) -> bool:
        first = self.program.pid_op
        return first is not None and tag != REFUSED and op_index > first

    def expect(self, tag: int, timeout_s: float | None = None) -> LauncherMessage:
        """Return the next message, which must have the tag `tag`. Raises Error if the message has
        another tag or the program has ended, and the errors of `receive`."""
        message = self.receive(timeout_s)
        if message is None:
            raise Error(f"the program ended before it sent message {tag}{self._how_it_ended()}")
        if message.tag != tag:
            _fd.close_all(message.fds)
            raise Error(
                f"received message {message.tag} instead of {tag} from operation {message.op_index}"
            )
        return message

    def release(self) -> None:
        """Let the program continue after a `wait`. Does nothing if the program has ended already,
        because `receive` reports that."""
        if self._socket is None:
            raise Error("the program's socket is closed")
        try:
            self._socket.send(b"\1")
        except (BrokenPipeError, ConnectionResetError):
            pass

    def reap_launcher(self) -> int:
        """Wait for the launcher's end and return its wait status. Blocks as long as the launcher
        runs: until it has sent PID, or the program has ended."""
        if self.launcher_status is None:
            # By pid, never -1: the caller has other children, such as the cloned process itself.
            self.launcher_status = os.waitpid(self.launcher_pid, 0)[1]
        return self.launcher_status

    def close(self) -> None:
        """Close our end of the socket, which ends a program that waits, and reap the launcher.
        Blocks until the launcher ends. If the program clones no process, the launcher itself
        executes the user's command, so `close` blocks until that command ends."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for _, fds in self._early:
            _fd.close_all(fds)
        self._early.clear()
        self.reap_launcher()

    def __enter__(self) -> RunningProgram:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _packet(self, timeout_s: float | None) -> tuple[bytes, tuple[int, ...]]:
        assert self._socket is not None
        whole, part = (0, 0) if timeout_s is None else divmod(max(timeout_s, 1e-6), 1)
        # The kernel's timeout, because Python's makes the socket non-blocking and polls before each
        # call.
        if timeout_s is not None:
            self._socket.setsockopt(
                SOL_SOCKET, SO_RCVTIMEO, _TIMEVAL.pack(int(whole), int(part * 1e6) or 1)
            )
        try:
            packet, ancillary, _, _ = self._socket.recvmsg(
                MESSAGE.size, 4 * 64 + 16, MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            # AF_UNIX answers this when the other side ended with a byte of ours unread; the queue
            # is empty by then.
            return b"", ()
        except BlockingIOError:
            raise DeadlineExceeded(f"the program sent nothing for {timeout_s} s") from None
        finally:
            if timeout_s is not None:
                self._socket.setsockopt(SOL_SOCKET, SO_RCVTIMEO, _TIMEVAL.pack(0, 0))
        fds = _fd.received(ancillary)
        if len(packet) != MESSAGE.size:
            _fd.close_all(fds)
            fds = ()
        if len(packet) not in (0, MESSAGE.size):
            raise Error(f"the launcher sent {len(packet)} bytes, not a message")
        return packet, fds

    def _check_launcher(self) -> None:
        """Raise Error if the launcher was killed or refused the program. Called when no more
        messages can come."""
        if self.launcher_status is None:
            pid, status = os.waitpid(self.launcher_pid, os.WNOHANG)
            if pid:
                self.launcher_status = status
        if self.launcher_status is not None and os.WIFEXITED(self.launcher_status):
            if os.WEXITSTATUS(self.launcher_status) == EXIT_REFUSED:
                raise Error("the launcher refused the program without giving a reason")
        elif self.launcher_status is not None and os.WIFSIGNALED(self.launcher_status):
            raise Error(f"the launcher was killed by signal {os.WTERMSIG(self.launcher_status)}")

    def _how_it_ended(self) -> str:
        if self.launcher_status is None:
            return ""
        return (
            f" (the launcher's exit status was {os.waitstatus_to_exitcode(self.launcher_status)})"
        )


_REFUSALS = {
    1: "it is too short or not a program",
    2: "its version is unknown",
    3: "its sizes do not fit",
    4: "unknown kind of operation",
    5: "unknown kind of argument",
    6: "a place outside of the data",
    7: "a skip outside of the program",
    8: "a bad relocation",
    9: "it does not end in an exit",
    10: "it cannot be mapped",
}


def launch(
    program: Program,
    *,
    stdio: Sequence[int] = (0, 1, 2),
    fds: Mapping[int, int] | None = None,
) -> RunningProgram:
    """Spawn the launcher with this program. Raises KernelError with the call, never OSError.

    - `stdio`: our three descriptors that become the launcher's stdio
    - `fds`: number in the launcher -> our descriptor, for all other descriptors

    The caller must close its descriptors; the launcher has copies. The launcher's environment is
    empty.
    """
    numbers = {0: stdio[0], 1: stdio[1], 2: stdio[2], **(fds or {})}
    first_free = max(numbers) + 1
    # Packets keep messages of two senders apart: for a moment the launcher and its child write to
    # one socket.
    ours, theirs = _socketpair(AF_UNIX, SOCK_SEQPACKET, 0)
    opened: list[int] = []
    try:
        numbers[first_free] = theirs.fileno()
        # A memfd, not a pipe: the launcher maps it privately and stores results in place, and it
        # may be larger than a pipe.
        opened.append(image := _fd.open_memfd("pyrunc:program", program.encoded))
        numbers[first_free + 1] = image

        def above_targets(number: int) -> int:
            """Return the descriptor `number`, or a copy above all descriptor numbers of the
            launcher. Otherwise a dup2 to one of these numbers could overwrite a descriptor that is
            copied later."""
            if number < first_free + 2:
                opened.append(number := _fd.duplicate(number, first_free + 2))
            return number

        actions = []
        for target, source in numbers.items():
            actions.append((os.POSIX_SPAWN_DUP2, above_targets(source), target))
        # posix_spawn(3) looks up the executable's path after the file actions.
        exe = above_targets(executable())
        # posix_spawn(3) borrows our memory as vfork(2) does: 0.16 ms whatever our size, where
        # fork(2) of a process of 190 MB takes 4.3 ms.
        pid = os.posix_spawn(
            f"/proc/self/fd/{exe}",
            ["launcher", str(first_free)],
            {},
            file_actions=actions,
            # A blocked signal is inherited over execve: the user's program could not be stopped by
            # it.
            setsigmask=[],
            setsigdef=_TO_DEFAULT,
        )
    except BaseException as error:
        ours.close()
        if isinstance(error, OSError):
            raise KernelError.of(error, "posix_spawn", "launcher") from None
        raise
    finally:
        theirs.close()
        _fd.close_all(opened)
    return RunningProgram(program, pid, ours)


def executable(lowest: int = 0) -> int:
    """Return a read-only descriptor of the sealed launcher; the caller must not close it. Each
    process opens one descriptor, with a number from `lowest` up, and keeps it open.

    A fork may have closed the inherited descriptor, and may have given its number to another file.
    Such a fork opens a new descriptor.
    """
    global _executable
    if _executable is not None:
        number, device, inode = _executable
        try:
            status = os.fstat(number)
            if (status.st_dev, status.st_ino) == (device, inode):
                return number
        except OSError:
            pass
    # This process copies the launcher (2 KB) to a sealed memfd once. runc copies its executable for
    # each start, which takes some 9 ms (runc PR 4448).
    number = open_program(LAUNCHER)
    if number < lowest:
        low, number = number, fcntl(number, F_DUPFD_CLOEXEC, lowest)
        os.close(low)
    status = os.fstat(number)
    _executable = (number, status.st_dev, status.st_ino)
    return number


def open_program(path: str) -> int:
    """Open one of our executables, such as the launcher, as a sealed memfd. Where memfds cannot be
    executed, the result is a detached read-only mount of the file. Raises KernelError, OSError."""
    try:
        name = f"pyrunc:{os.path.basename(path)}"
        return _fd.open_sealed_executable(name, _fd.read_file(path))
    except KernelError as error:
        if error.errno != EACCES:
            raise
        from pyrunc.kernel import mount as _mount

        # vm.memfd_noexec=2 refuses executable memfds (kernel,
        # Documentation/userspace-api/mfd_noexec.rst).
        return _mount.open_read_only_clone(path)
