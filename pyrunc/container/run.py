"""Attends a process until it ends, for `run` and `exec` without --detach: forwards our signals to
the process, copies its terminal to ours, reaps orphans, and returns the process's exit status."""

from __future__ import annotations

import os
import select
from _signal import SIG_BLOCK, SIG_DFL, SIG_UNBLOCK  # type: ignore[import-not-found]
from _signal import pthread_sigmask as change_mask
from _signal import signal as set_handler

from pyrunc import debug
from pyrunc.atomic_file import write_all
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.process import send_signal, wait_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIGCHLD, SIGURG, SIGWINCH, SIGKILL, SIGSTOP, SIGPIPE = 17, 23, 28, 9, 19, 13
# These cannot be caught, or are about our own child and terminal, or glibc reserves them. SIGURG as
# in runc, where Go's scheduler sends it to its own threads.
NOT_FORWARDED = (SIGKILL, SIGSTOP, SIGCHLD, SIGURG, SIGWINCH, 32, 33)
FORWARDED = [number for number in range(1, 65) if number not in NOT_FORWARDED]
SIGNAL_BASE = 128
CHUNK_BYTES = 65536


def hold_signals() -> None:
    """Block the signals that `attend` forwards, before the process is created. They then cannot end
    the runtime before `attend` begins, which forwards the blocked signals to the process."""
    # Our own writes cause SIGPIPE, which is not for the process.
    change_mask(SIG_BLOCK, [number for number in FORWARDED if number != SIGPIPE])


def attend(pid: int, pidfd: int, console_fd: int | None) -> int:
    """Wait for the end of our child `pid`, and meanwhile reap all other children. Returns its exit
    code, or 128 + the signal that ended it. `console_fd`: the master of the child's terminal, which
    this function closes."""
    _forward_signals(pidfd)
    set_handler(SIGCHLD, lambda *_: _reap_others(pid))
    try:
        # Those that have ended before the handler was set.
        _reap_others(pid)
        if console_fd is None:
            wait_end(pidfd)
        else:
            with closing_fd(console_fd):
                _Terminal(console_fd, pidfd).copy()
    finally:
        # Later children, such as hooks, have callers that wait for them.
        set_handler(SIGCHLD, SIG_DFL)
    return _reap(pidfd)


def _open_own_terminal() -> int | None:
    """Open the user's terminal: the first of stderr, stdout and stdin that is a terminal, else the
    controlling terminal. None if there is none."""
    for number in (2, 1, 0):
        if os.isatty(number):
            return os.dup(number)
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # ENXIO: there is none
        return None


def _reap_others(pid: int) -> None:
    """Reap the children that have ended. Stop at `pid`, which the caller reaps. We are a subreaper,
    so the container's orphans become our children; as zombies they would count for the container's
    pids.max."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (ended := os.waitid(os.P_ALL, 0, flags)) is not None and ended.si_pid != pid:
        try:
            os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            pass  # the handler of a later SIGCHLD, which interrupted this one, has reaped it


def _reap(pidfd: int) -> int:
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    assert result is not None
    code = result.si_status if result.si_code == os.CLD_EXITED else SIGNAL_BASE + result.si_status
    debug.say("process %d exited: %d", result.si_pid, code)
    return code


def _forward_signals(pidfd: int) -> None:
    """Forward our signals to the process. After its end our signals are ignored, so that they
    cannot interrupt the removal of the container."""

    def forward(number: int, _: object) -> None:
        debug.say("forwarding signal %d", number)
        send_signal(pidfd, number)

    for number in FORWARDED:
        # Not reset after the end: by default a late signal would end us before the cgroup and the
        # files are removed.
        set_handler(number, forward)
    change_mask(SIG_UNBLOCK, FORWARDED)


class _Terminal:
    """Copies data between the user's terminal (or stdin and stdout) and the process's terminal.
    Meanwhile the user's terminal is in raw mode, and the process's terminal has the same size."""

    def __init__(self, master: int, pidfd: int) -> None:
        self._master, self._pidfd = master, pidfd
        self._own = _open_own_terminal()
        # `_input`: read from stdin, and not taken by the process's terminal yet
        self._input, self._has_input = b"", True

    def copy(self) -> None:
        """Copy input and output until the process has ended and all its output is written."""
        before = self._make_raw()
        old = set_handler(SIGWINCH, lambda *_: self._resize())
        try:
            self._resize()
            self._loop()
        finally:
            set_handler(SIGWINCH, SIG_DFL if old is None else old)
            self._restore(before)

    def _make_raw(self) -> list[Any] | None:
        """Set the user's terminal to raw mode, so that keys reach the process unchanged. Return the
        earlier settings; None without a terminal."""
        if self._own is None:
            return None
        import termios

        before = termios.tcgetattr(self._own)
        raw = termios.tcgetattr(self._own)
        raw[0] &= ~(termios.BRKINT | termios.ICRNL | termios.INPCK | termios.ISTRIP | termios.IXON)
        # cfmakeraw(3) clears this flag. It stays, because the process's terminal does not turn a
        # newline into CR LF any more (`kernel.terminal.clear_onlcr`).
        raw[1] |= termios.OPOST
        raw[2] = raw[2] & ~(termios.CSIZE | termios.PARENB) | termios.CS8
        raw[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
        raw[6][termios.VMIN], raw[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._own, termios.TCSADRAIN, raw)
        return before

    def _restore(self, settings: list[Any] | None) -> None:
        if self._own is not None and settings is not None:
            import termios

            termios.tcsetattr(self._own, termios.TCSADRAIN, settings)
            os.close(self._own)

    def _resize(self) -> None:
        if self._own is not None:
            from pyrunc.kernel import terminal

            terminal.set_size(self._master, *terminal.size(self._own))

    def _loop(self) -> None:
        # While the process's output fills its terminal, the terminal takes no input: a write that
        # waits would wait for ever, because this thread also reads the output.
        os.set_blocking(self._master, False)
        ended = False
        while True:
            # After the end, what the terminal still holds is read without waiting: another process
            # may keep it open for ever.
            ready = self._poll(0 if ended else None)
            if ready.get(self._master, 0) & ~select.POLLOUT:
                if not self._to_us():
                    return
            elif ended:
                return
            if 0 in ready:
                self._read_input()
            if self._input:
                self._to_process()
            ended = ended or self._pidfd in ready

    def _poll(self, timeout_ms: int | None) -> dict[int, int]:
        """Wait until the process ends or has output. If `_input` is not empty, also return when the
        process's terminal accepts input; if it is empty, also return when stdin has input. Returns
        the events by descriptor."""
        waiter = select.poll()
        waiter.register(self._pidfd, select.POLLIN)
        if self._input:
            waiter.register(self._master, select.POLLIN | select.POLLOUT)
        else:
            waiter.register(self._master, select.POLLIN)
            if self._has_input:
                waiter.register(0, select.POLLIN)
        return dict(waiter.poll(timeout_ms))

    def _to_us(self) -> bool:
        try:
            chunk = os.read(self._master, CHUNK_BYTES)
        except BlockingIOError:  # the process has discarded its output (tcflush(3)) meanwhile
            return True
        except OSError:  # EIO: the other side is closed
            return False
        write_all(1, chunk)
        return bool(chunk)

    def _read_input(self) -> None:
        self._input = os.read(0, CHUNK_BYTES)
        if not self._input:
            # The terminal turns this byte into end of file.
            self._input, self._has_input = b"\x04", False

    def _to_process(self) -> None:
        try:
            self._input = self._input[os.write(self._master, self._input) :]
        except BlockingIOError:
            pass
        except OSError:  # EIO: the other side is closed
            self._input = b""
