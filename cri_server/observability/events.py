"""Container events of CRI's GetContainerEvents: a bounded queue per subscriber, new events only.

If a subscriber does not keep up, its stream ends with an error, but it never misses an event before
this error. Other subscribers are not affected.
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
    """Publishes the events of sandboxes and containers."""

    def __init__(self) -> None:
        self._queues: set[Queue] = set()
        self._latest_ns = 0

    def now_ns(self) -> int:
        """Return the current time in ns. The result is always greater than that of the previous
        call, even if the clock was set back: kubelet compares the times of a pod's status and of
        its event, and uses the newer one."""
        self._latest_ns = max(time.time_ns(), self._latest_ns + 1)
        return self._latest_ns

    @property
    def subscribers(self) -> int:
        """The number of subscribers."""
        return len(self._queues)

    def publish(self, event: api.ContainerEventResponse) -> None:
        """Queue `event` for every subscriber. A subscriber whose queue is full gets no more events:
        its stream ends with ResourceExhausted."""
        for queue in list(self._queues):
            if queue.qsize() >= QUEUE_LIMIT:
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)

    async def subscribe(self) -> AsyncIterator[api.ContainerEventResponse]:
        """Yield new events until the caller stops. Raises ResourceExhausted when the caller did not
        keep up."""
        # The queue has no maximum size: `publish` enforces `QUEUE_LIMIT`, and then adds None, which
        # ends the stream.
        queue: Queue = asyncio.Queue()
        self._queues.add(queue)
        try:
            while True:
                event = await queue.get()
                if event is None:
                    raise ResourceExhausted(f"the client is more than {QUEUE_LIMIT} events behind")
                yield event
        finally:
            self._queues.discard(queue)
