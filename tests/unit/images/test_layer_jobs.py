"""Tests jobs on layers that are cancelled at any moment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import cast

import pytest

from cri_server.images.layers.inflate import LayerWork, UnpackLimits
from cri_server.images.store.layer_jobs import LayerJobs
from cri_server.zygote.client import JobResult, Zygote
from pyrunc.records import Record


class Ended:
    """A zygote whose job succeeds at once, but leaves its progress pipe open."""

    async def run(self, function: str, arguments: Record, fds: Sequence[int]) -> JobResult:
        self.pipe = os.dup(fds[-1])
        return JobResult(0, b"", b"", [])


@pytest.mark.parametrize("turns", range(8))
async def test_a_cancellation_at_the_end_of_a_job_is_not_lost(turns: int) -> None:
    zygote = Ended()
    jobs = LayerJobs(cast(Zygote, zygote))
    work = asyncio.create_task(
        jobs.run("m:f", LayerWork("/", UnpackLimits(), "x"), [], lambda: None)
    )
    for _ in range(10):
        await asyncio.sleep(0)
    assert not work.done()
    os.close(zygote.pipe)
    for _ in range(turns):
        await asyncio.sleep(0)
    if not work.done():
        # asyncio.wait_for() of Python 3.11 would lose a cancellation that arrives with the result.
        # The task would then wait for a layer that no other task of its pull makes any more.
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    else:
        assert turns > 1
