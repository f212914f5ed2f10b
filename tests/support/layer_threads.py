"""Works on layers in threads of the test's process, to which monkeypatches apply, instead of in the
server's jailed jobs."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

from cri_server.images.erofs import build as index_builder
from cri_server.images.erofs import layer_tar
from cri_server.images.formats.digests import algorithm_of
from cri_server.images.layers import unpack
from cri_server.images.layers.inflate import LayerWork, TarStream, UnpackLimits
from cri_server.images.layers.ring import Receiver
from cri_server.images.store.layer_jobs import LayerJobs
from cri_server.images.store.layer_maker import INDEX_JOB, TAR_JOB, UNPACK_JOB
from cri_server.images.waiting import Abandoned, in_thread
from cri_server.zygote.client import Zygote
from pyrunc.records import Record

Tick = Callable[[], None]


class LayerThreads(LayerJobs):
    """Runs the server's jobs for layers in threads."""

    def __init__(self) -> None:
        super().__init__(cast(Zygote, None))

    async def run(
        self, function: str, arguments: Record, fds: list[int], on_progress: Tick
    ) -> None:
        assert function == INDEX_JOB and isinstance(arguments, index_builder.IndexWork)
        await _in_thread(lambda tick: index_builder.build_in(arguments, tick, fds), on_progress)

    async def run_decoded(
        self, function: str, arguments: LayerWork, blob: int | Receiver, on_progress: Tick
    ) -> None:
        stream = TarStream(blob, arguments.limits, algorithm=algorithm_of(arguments.diff_id))
        work = {TAR_JOB: _write_tar, UNPACK_JOB: _unpack}[function]
        await _in_thread(lambda tick: work(stream, arguments, tick), on_progress)

    @asynccontextmanager
    async def decoded(self, blob_fd: int, limits: UnpackLimits) -> AsyncIterator[TarStream]:
        yield TarStream(blob_fd, limits)


def _write_tar(stream: TarStream, work: LayerWork, tick: Tick) -> None:
    layer_tar.write_tar(stream, work.folder, work.diff_id, tick)


def _unpack(stream: TarStream, work: LayerWork, tick: Tick) -> None:
    unpack.unpack(stream, work.folder, work.diff_id, work.limits, tick)


async def _in_thread(work: Callable[[Tick], object], on_progress: Tick) -> None:
    is_abandoned = threading.Event()

    def tick() -> None:
        on_progress()
        if is_abandoned.is_set():
            raise Abandoned

    await in_thread(lambda: work(tick), is_abandoned.set)
