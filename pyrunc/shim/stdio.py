"""A container's streams: output goes to the log and to attached clients, input comes from attached
clients.

The container never waits for an attached client to read: each client has a bounded buffer, and a
slow client misses output until it has caught up. Clients wait for the container: while it does not
read its stdin, the shim reads nothing from them.
"""

from __future__ import annotations

import os

from pyrunc.shim.log_lines import LogLines, time_stamp
from pyrunc.shim.loop import BROKEN, READABLE, WRITABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pyrunc.shim.log_file import LogFile
    from pyrunc.shim.loop import EventLoop

# The default capacity of a pipe (pipe(7)): one read(2) empties it.
READ_BYTES = 64 * 1024
FOLLOWER_LIMIT_BYTES = 1024 * 1024
TERMINAL_RETRY_S = 0.1
# A bound, because a process in another cgroup may have the pipe open and go on writing.
MOST_PORTIONS = 64  # more than a pipe holds
DATA, NOTHING, END = range(3)


class OutputStream:
    """One output stream of a container. Owns `fd`: a pipe's reading end or a pty's master."""

    def __init__(
        self, loop: EventLoop, fd: int, stream: str, log: LogFile, on_end: Callable[[], None]
    ) -> None:
        os.set_blocking(fd, False)
        self.fd, self.stream = fd, stream
        self.followers: list[Follower] = []
        self._loop, self._log, self._on_end = loop, log, on_end
        self._lines = LogLines(stream)
        self._terminal = os.isatty(fd)
        loop.watch(fd, READABLE, self._ready)

    @property
    def ended(self) -> bool:
        """Return whether `end` has closed the stream."""
        return self.fd < 0

    def read(self) -> int:
        """Read one portion of output. Returns:

        - DATA
        - NOTHING: there is no output now
        - END: no process has the stream open for writing. A terminal may be opened again.
        """
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return NOTHING
        # A pty's master reports this instead of an end of file when the last slave is closed
        # (drivers/tty/pty.c, TTY_OTHER_CLOSED).
        except OSError:  # EIO: no process has the terminal open
            return END
        if not data:
            return END
        self._log.write(self._lines.feed(data, time_stamp()))
        for follower in list(self.followers):
            follower.write(data)
        return DATA

    def follow(self, follower: Follower) -> None:
        """Copy further output to `follower`."""
        self.followers.append(follower)
        follower.on_close = self._unfollow

    def drain(self) -> None:
        """Read the rest of the output after the writers were killed, then end the stream."""
        for _ in range(MOST_PORTIONS):
            if self.ended:
                return
            taken = self.read()
            if taken == END:
                self.end()
            if taken != DATA:
                return

    def stop_reading(self) -> None:
        """Log the unterminated last line, and read no more. The descriptor stays open."""
        if self.fd < 0:
            return
        self._loop.unwatch(self.fd)
        self._log.write(self._lines.finish(time_stamp()))

    def read_on(self) -> None:
        """Read again after `stop_reading`. Does nothing after `end`."""
        if self.fd >= 0:
            self._loop.watch(self.fd, READABLE, self._ready)

    def end(self) -> None:
        """Write the unterminated last line, let the followers finish, and close the stream."""
        if self.fd < 0:
            return
        self.stop_reading()
        os.close(self.fd)
        self.fd = -1
        for follower in list(self.followers):
            follower.finish()
        self._on_end()

    def _ready(self, events: int) -> None:
        if self.read() != END:
            return
        # EPOLLHUP cannot be masked (epoll_ctl(2)): a terminal that no process has open would wake
        # the shim without end. Another process of the container may open it again.
        if self._terminal:
            self._loop.unwatch(self.fd)
            self._loop.after(TERMINAL_RETRY_S, self.read_on)
        else:
            self.end()

    def _unfollow(self, follower: Follower) -> None:
        if follower in self.followers:
            self.followers.remove(follower)


class Follower:
    """A pipe by which an attached client gets a copy of an output stream. Owns the writing end."""

    def __init__(self, loop: EventLoop, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.on_close: Callable[[Follower], None] = lambda follower: None
        self._loop = loop
        self._buffer = bytearray()
        self._finishing = self._lagging = False
        # No events are requested: EPOLLERR and EPOLLHUP are always reported (epoll_ctl(2)), so the
        # end of a client is noticed.
        loop.watch(fd, 0, self._ready)

    def write(self, data: bytes) -> None:
        """Write `data` to the client, or buffer it until the client reads. Drop `data` when the
        buffer is full."""
        if self.fd < 0 or self._lagging:
            return
        if not self._buffer:
            data = data[self._write(data) :]
            if not data or self.fd < 0:
                return
            self._loop.watch(self.fd, WRITABLE, self._ready)
        self._buffer += data
        self._lagging = len(self._buffer) >= FOLLOWER_LIMIT_BYTES

    def finish(self) -> None:
        """Close the pipe once the buffer is written."""
        self._finishing = True
        if not self._buffer:
            self.close()

    def close(self) -> None:
        """Close the pipe now, without writing the buffer."""
        if self.fd >= 0:
            self._loop.unwatch(self.fd)
            os.close(self.fd)
            self.fd = -1
            self._buffer.clear()
            self.on_close(self)

    def _ready(self, events: int) -> None:
        if events & BROKEN:
            self.close()
            return
        del self._buffer[: self._write(self._buffer)]
        if self._buffer or self.fd < 0:
            return
        self._lagging = False
        self._loop.watch(self.fd, 0, self._ready)
        if self._finishing:
            self.close()

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return os.write(self.fd, data)
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            return 0


class InputStream:
    """A container's stdin, into which attached clients write. Owns `fd`: a pipe's writing end or a
    copy of a pty's master."""

    def __init__(self, loop: EventLoop, fd: int, close_with_first: bool) -> None:
        """Make a stdin without clients. `close_with_first`: close the container's stdin when the
        first client's input ends."""
        os.set_blocking(fd, False)
        self.fd = fd
        self._loop, self._close_with_first = loop, close_with_first
        self._sources: list[int] = []
        self._pending = b""
        self._rest()

    def feed_from(self, fd: int) -> None:
        """Copy the input from `fd` to the container until the input ends. This object closes
        `fd`."""
        if self.fd < 0:
            os.close(fd)  # the container's stdin is closed: its writer learns it by EPIPE
            return
        os.set_blocking(fd, False)
        self._sources.append(fd)
        if not self._pending:
            self._watch(fd)

    def close(self) -> None:
        """End the container's input, and close the pipes of all clients."""
        if self.fd >= 0:
            self._loop.unwatch(self.fd)
            os.close(self.fd)
            self.fd = -1
        while self._sources:
            self._drop(self._sources[-1])

    def _rest(self) -> None:
        """Stop waiting for room to write. If stdin is a pipe, still watch for the close of its
        reading end. Do not watch a terminal."""
        self._loop.unwatch(self.fd)
        if not os.isatty(self.fd):
            self._loop.watch(self.fd, 0, self._ready)

    def _watch(self, source: int) -> None:
        self._loop.watch(source, READABLE, lambda events: self._copy(source))

    def _copy(self, source: int) -> None:
        try:
            data = os.read(source, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(source)
            if self._close_with_first:
                self.close()
            return
        self._pending = data
        self._flush()
        if self._pending:
            for waiting in self._sources:
                self._loop.unwatch(waiting)
            self._loop.watch(self.fd, WRITABLE, self._ready)

    def _ready(self, events: int) -> None:
        if events & BROKEN:
            self.close()
            return
        self._flush()
        if not self._pending and self.fd >= 0:
            self._rest()
            for source in self._sources:
                self._watch(source)

    def _flush(self) -> None:
        try:
            self._pending = self._pending[os.write(self.fd, self._pending) :]
        except BlockingIOError:
            pass
        except OSError:  # the container has closed its stdin
            self._pending = b""
            self.close()

    def _drop(self, source: int) -> None:
        self._sources.remove(source)
        self._loop.unwatch(source)
        os.close(source)
