"""The client's end of a socket: sends requests and receives answers (pyrunc.ipc's messages). For
asyncio, without threads.

A request is {"id": n, …}, its answer {"id": n, "ok": {…}} + descriptors or {"id": n, "error": …}.
What has no id is no answer and goes to `on_other`. Nothing blocks: what the socket does not take is
queued. A socket that closes, or receives something else than a message, breaks every waiting
request; `on_lost` is then called once."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyrunc import ipc
from pyrunc.errors import PeerError, Unavailable, error_of

Answer = tuple[dict[str, Any], list[int]]
"""The fields of an answer and its descriptors, which are the caller's to close."""


class Peer:
    """The other side. Use from one event loop; requests may overlap."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        on_other: Callable[[dict[str, Any]], None],
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """Takes over `sock`, which must be non-blocking. `name`: for error messages."""
        self.lost = False
        self._socket = sock
        self._name = name
        self._on_other = on_other
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._unsent: list[tuple[bytes, list[int]]] = []
        # The number: asyncio describes an unknown socket object in an error that it ignores.
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def busy(self) -> bool:
        """Whether a request waits for its answer."""
        return bool(self._waiting)

    def ask(
        self, request: Mapping[str, Any], fds: Sequence[int] = ()
    ) -> tuple[int, asyncio.Future[Answer]]:
        """Queue a request; returns its id and the future answer, for `answered`.

        The caller keeps its descriptors and may close them at once. Raises Unavailable when the
        other side is gone.
        """
        if self.lost:
            raise Unavailable(f"{self._name} is gone")
        self._next_id += 1
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[self._next_id] = future
        self.tell({"id": self._next_id, **request}, fds)
        return self._next_id, future

    def tell(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue a message that has no answer; nothing happens when the other side is gone."""
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
        """Hang up; what waits gets Unavailable(`why`). `on_lost` is not called."""
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for _, fds in self._unsent:
            ipc.close_all(fds)
        for future in self._waiting.values():
            fail(future, why)
        self._unsent.clear()
        self._waiting.clear()

    def _ended(self) -> None:
        if not self.lost:
            self.close(f"{self._name} is gone")
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
            ipc.close_all(fds)
            del self._unsent[0]
        self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        while not self.lost:
            try:
                received = ipc.receive(self._socket)
            except BlockingIOError:
                return
            except Exception:  # it is gone, or does not speak our language: the same to us
                received = None
            if received is None:
                self._ended()
                return
            self._received(*received)

    def _received(self, message: dict[str, Any], fds: list[int]) -> None:
        if "id" not in message:
            ipc.close_all(fds)
            self._on_other(message)
            return
        number, fields, error = message["id"], message.get("ok"), message.get("error")
        future = self._waiting.pop(number, None) if isinstance(number, int) else None
        if future is not None and not future.done() and isinstance(fields, dict) and error is None:
            future.set_result((fields, fds))
            return
        ipc.close_all(fds)
        if future is None or future.done():  # the caller was cancelled meanwhile
            return
        if isinstance(error, dict):
            future.set_exception(error_of(error))
        else:
            future.set_exception(PeerError(f"{self._name} sent neither a result nor an error"))


async def answered(answer: asyncio.Future[Answer]) -> Answer:
    """Wait for the answer to a request. Raises the error that was answered.

    A caller can be cancelled after its answer has come and before it runs again: the descriptors
    have no owner then, and are closed.
    """
    try:
        return await answer
    except asyncio.CancelledError:
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            ipc.close_all(answer.result()[1])
        raise


async def answered_without_fds(answer: asyncio.Future[Answer]) -> dict[str, Any]:
    """The fields of an answer that has no descriptors; those that came all the same are closed.

    Raises the error that was answered.
    """
    fields, fds = await answered(answer)
    ipc.close_all(fds)
    return fields


def fail(future: asyncio.Future[Any], why: str) -> None:
    """Set Unavailable on a future, if it is not done; asyncio does not warn if it is never
    awaited."""
    if not future.done():
        future.set_exception(Unavailable(why))
        future.exception()
