"""Sends requests over a socket and receives the answers (messages of pyrunc.ipc). For asyncio,
without threads.

A request is {"id": n, …}. Its answer is {"id": n, "ok": {…}} with descriptors, or {"id": n,
"error": …}. A message without an id is not an answer; it is passed to `on_other`. Sending never
blocks: messages are queued while the socket is full. When the other end closes the socket or sends
anything but a message, every waiting request raises Unavailable, and `on_lost` is called once.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyrunc import ipc
from pyrunc.errors import PeerError, Unavailable, error_of
from pyrunc.kernel.fd import close_all

Answer = tuple[dict[str, Any], list[int]]
"""The fields of an answer, and its descriptors. The caller must close the descriptors."""


class Peer:
    """Sends requests to the other end of a socket and matches the answers to them. Use from one
    event loop; requests may overlap."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        on_other: Callable[[dict[str, Any]], None],
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """Take over `sock`, which must be non-blocking. `name`: the other end's name in errors.
        `on_other` is called with each message that is not an answer, `on_lost` when the other end
        is gone."""
        self.lost = False
        self._socket = sock
        self._name = name
        self._on_other = on_other
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._unsent: list[tuple[bytes, list[int]]] = []
        # Not the socket: asyncio would format it for the text of an error that is then ignored.
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def busy(self) -> bool:
        """Return whether a request waits for its answer."""
        return bool(self._waiting)

    def ask(
        self, request: Mapping[str, Any], fds: Sequence[int] = ()
    ) -> tuple[int, asyncio.Future[Answer]]:
        """Queue a request. Return its id and a future, which `wait_answer` takes.

        The caller keeps its descriptors and may close them at once. Raises Unavailable when the
        other end is gone.
        """
        if self.lost:
            raise Unavailable(f"{self._name} has ended")
        self._next_id += 1
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[self._next_id] = future
        self.send({"id": self._next_id, **request}, fds)
        return self._next_id, future

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue a message that has no answer; does nothing when the other end is gone."""
        if self.lost:
            return
        text = ipc.encode(dict(message))
        if not self._unsent:
            try:
                ipc.send_text(self._socket, text, fds)
                return
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._writable)
            except OSError:
                self._ended()
                return
        # Copies, because the caller may close its own as soon as `ask` has returned.
        self._unsent.append((text, [os.dup(fd) for fd in fds]))

    def close(self, why: str) -> None:
        """Close the connection; waiting requests raise Unavailable(`why`). `on_lost` is not
        called."""
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for _, fds in self._unsent:
            close_all(fds)
        for future in self._waiting.values():
            fail(future, why)
        self._unsent.clear()
        self._waiting.clear()

    def _ended(self) -> None:
        if not self.lost:
            self.close(f"{self._name} has ended")
            if self._on_lost:
                self._on_lost()

    def _writable(self) -> None:
        while self._unsent:
            text, fds = self._unsent[0]
            try:
                ipc.send_text(self._socket, text, fds)
            except BlockingIOError:
                return
            except OSError:
                self._ended()
                return
            close_all(fds)
            del self._unsent[0]
        self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        while not self.lost:
            try:
                received = ipc.receive(self._socket)
            except BlockingIOError:
                return
            except Exception:  # it is gone, or has sent something else than a message
                received = None
            if received is None:
                self._ended()
                return
            self._received(*received)

    def _received(self, message: dict[str, Any], fds: list[int]) -> None:
        if "id" not in message:
            close_all(fds)
            self._on_other(message)
            return
        number, fields, error = message["id"], message.get("ok"), message.get("error")
        future = self._waiting.pop(number, None) if isinstance(number, int) else None
        if future is not None and not future.done() and isinstance(fields, dict) and error is None:
            future.set_result((fields, fds))
            return
        close_all(fds)
        if future is None or future.done():  # the caller was cancelled meanwhile
            return
        if isinstance(error, dict):
            future.set_exception(error_of(error))
        else:
            future.set_exception(PeerError(f"{self._name} sent neither a result nor an error"))


async def wait_answer(answer: asyncio.Future[Answer]) -> Answer:
    """Wait for the answer to a request and return it. Raises the error that the other end
    answered, Unavailable when the other end is gone, PeerError for a malformed answer."""
    try:
        return await answer
    except asyncio.CancelledError:
        # Cancelled after the answer has come and before this task runs again: no other code closes
        # the answer's descriptors.
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            close_all(answer.result()[1])
        raise


async def wait_fields(answer: asyncio.Future[Answer]) -> dict[str, Any]:
    """Wait for the answer to a request and return the answer's fields; the answer's descriptors
    are closed. Raises the errors of `wait_answer`."""
    fields, fds = await wait_answer(answer)
    close_all(fds)
    return fields


def fail(future: asyncio.Future[Any], why: str) -> None:
    """Make `future` raise Unavailable(`why`), unless it is done. asyncio does not warn if nothing
    awaits the future."""
    if not future.done():
        future.set_exception(Unavailable(why))
        future.exception()
