"""Container events for those who asked: a bounded queue per subscriber, new events only.

A subscriber that does not read loses its stream with an error, never an event in the middle; the
others do not notice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from cri_server.api import api_pb2 as api
from pyrunc.errors import ResourceExhausted

QUEUE_LIMIT = 1000

CREATED = api.CONTAINER_CREATED_EVENT
STARTED = api.CONTAINER_STARTED_EVENT
STOPPED = api.CONTAINER_STOPPED_EVENT
DELETED = api.CONTAINER_DELETED_EVENT

Queue = asyncio.Queue[api.ContainerEventResponse | None]


class Events:
    """Publishes what happened to sandboxes and containers."""

    def __init__(self) -> None:
        self._queues: set[Queue] = set()
        self._latest_ns = 0

    @property
    def wanted(self) -> bool:
        """Whether anybody listens: the statuses in an event are not free."""
        return bool(self._queues)

    def now_ns(self) -> int:
        """A time stamp later than all before: kubelet keeps the newer of a status and an event."""
        self._latest_ns = max(time.time_ns(), self._latest_ns + 1)
        return self._latest_ns

    @property
    def subscribers(self) -> int:
        """How many are told."""
        return len(self._queues)

    def publish(self, event: api.ContainerEventResponse) -> None:
        """Hand `event` to every subscriber; one whose queue is full is cut off."""
        for queue in list(self._queues):
            if queue.qsize() >= QUEUE_LIMIT:
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)

    async def subscribe(self) -> AsyncIterator[api.ContainerEventResponse]:
        """Events from now on, until the caller stops. Raises ResourceExhausted for one that did not
        keep up."""
        queue: Queue = asyncio.Queue()
        self._queues.add(queue)
        try:
            while True:
                event = await queue.get()
                if event is None:
                    raise ResourceExhausted(f"more than {QUEUE_LIMIT} events were not read")
                yield event
        finally:
            self._queues.discard(queue)
