"""Tests subscribers of container events: each has its own bounded queue."""

from __future__ import annotations

import asyncio

import pytest

from cri_server.api import api_pb2 as api
from cri_server.observability.events import QUEUE_LIMIT, Events
from pyrunc.errors import ResourceExhausted


@pytest.mark.requirement("10.3.1")
async def test_a_subscriber_that_does_not_read_is_cut_off_and_others_are_not() -> None:
    events = Events()
    events.publish(api.ContainerEventResponse(container_id="before"))
    slow, quick = events.subscribe(), events.subscribe()
    first = [asyncio.ensure_future(anext(each)) for each in (slow, quick)]
    await asyncio.sleep(0)
    for number in range(QUEUE_LIMIT + 2):
        events.publish(api.ContainerEventResponse(container_id=str(number)))
        if number:
            assert (await anext(quick)).container_id == str(number)
        else:
            assert [(await each).container_id for each in first] == ["0", "0"], "new ones only"
    assert events.subscribers == 1
    ids = [(await anext(slow)).container_id for _ in range(QUEUE_LIMIT)]
    assert ids == [str(number) for number in range(1, QUEUE_LIMIT + 1)]
    with pytest.raises(ResourceExhausted):
        await anext(slow)
    await quick.aclose()


@pytest.mark.requirement("10.3.3", "3.4.4")
def test_time_stamps_increase() -> None:
    events = Events()
    times = [events.now_ns() for _ in range(1000)]
    assert times == sorted(set(times))
