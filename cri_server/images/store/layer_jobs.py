"""Runs work on layers in jobs (processes forked by a zygote), and limits how many run at once."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cri_server.images.layers import ring, turns
from cri_server.images.layers.inflate import LayerWork, TarStream, UnpackLimits
from cri_server.images.layers.ring import Receiver
from cri_server.images.layers.sharing import StreamLimiter
from cri_server.images.layers.turns import Turns
from cri_server.images.waiting import Watch, first_error
from cri_server.zygote.client import Zygote
from pyrunc.kernel.fd import close_all
from pyrunc.records import Record

log = logging.getLogger(__name__)

STREAMS_AT_ONCE = turns.streams_at_once(turns.memory_bytes())
_JOB_END_S = 10.0
_DECODE_JOB = "cri_server.images.layers.decode:job"


class LayerJobs:
    """Runs the jobs on layers for one image store. `zygote` should preload
    `layer_maker.JOB_MODULES`."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        processors = os.cpu_count() or 2
        self.cores = Turns(max(2, processors))  # one for each job that keeps a processor busy
        self.streams = StreamLimiter(
            STREAMS_AT_ONCE
        )  # one for each blob that is decoded as it arrives
        # One for each index that is being built. An index of partial tars only borrows its turn: it
        # must not take a processor from the jobs that write the tars, and is cancelled when an
        # index of complete tars needs the turn.
        self.indexes = Turns(turns.indexes_at_once(turns.memory_bytes(), processors))

    async def run(
        self,
        function: str,
        arguments: Record,
        fds: list[int],
        on_progress: Callable[[], None],
    ) -> None:
        """Run `function` (`module:function`) in a job with `arguments` and copies of the
        descriptors `fds`; call `on_progress` at each of the job's progress reports."""
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        loop = asyncio.get_running_loop()
        # Set when the job's end of the pipe is closed: the process is gone and writes no more.
        ended = asyncio.Event()

        def readable() -> None:
            on_progress()
            if not os.read(reading, 4096):
                loop.remove_reader(reading)
                ended.set()

        loop.add_reader(reading, readable)
        try:
            result = await self._zygote.run(function, arguments, [*fds, writing])
        finally:
            os.close(writing)
            try:
                async with asyncio.timeout(_JOB_END_S):
                    await ended.wait()
            except TimeoutError:
                log.warning("a layer job has reported its result, but its process still runs")
            finally:
                loop.remove_reader(reading)
                os.close(reading)
        result.require_success("a layer job")

    async def run_decoded(
        self,
        function: str,
        arguments: LayerWork,
        blob: int | Receiver,
        on_progress: Callable[[], None],
    ) -> None:
        """Run `function` (`module:function`) in a job that reads the blob's content from a shared
        ring buffer. A second job decodes the blob into the ring buffer."""
        async with self._decoding(blob, arguments.limits) as receiver:
            await self.run(function, arguments, [*receiver.fds], on_progress)

    @asynccontextmanager
    async def decoded(self, blob_fd: int, limits: UnpackLimits) -> AsyncIterator[TarStream]:
        """Provide the content of the blob `blob_fd` as a stream, which the `with` block must read
        in a thread. A job decodes the blob. Raises PeerError for a bad blob (BadLayer in the job),
        ResourceExhausted, KernelError."""
        async with self._decoding(blob_fd, limits) as receiver:
            yield TarStream(receiver, limits, decoded=True)

    @asynccontextmanager
    async def _decoding(
        self, blob: int | Receiver, limits: UnpackLimits
    ) -> AsyncIterator[Receiver]:
        """Decode a blob in a job, and provide a receiver from which the `with` block reads the
        content. When the job fails, the `with` block is cancelled. At the end of the block the job
        is killed, because a malicious blob could make the decoder hang."""
        sending, receiving = ring.open_ends()
        receiver = Receiver(*receiving, copying=True)
        blob_fds = [blob] if isinstance(blob, int) else blob.fds
        decoder = self.run(_DECODE_JOB, limits, [*blob_fds, *sending], lambda: None)
        try:
            async with asyncio.TaskGroup() as group:
                # When the decoder ends, this process's copies of its ends are closed, so that the
                # receiver sees the end of the content. A receiver that finds the content truncated
                # then fails after the decoder, and the decoder's error is reported.
                task = group.create_task(decoder)
                task.add_done_callback(lambda _: close_all(sending))
                try:
                    yield receiver
                finally:
                    task.cancel()
                    receiver.close()
        except BaseExceptionGroup as problems:
            raise first_error(problems) from None

    @asynccontextmanager
    async def index(self, watch: Watch) -> AsyncIterator[None]:
        """Wait until an EROFS index may be built, then run the `with` block, which builds it. The
        block holds a turn of `indexes` and one of `cores`. `watch` is paused while this call waits.
        """
        async with self.indexes.hold(watch), self.cores.hold(watch):
            yield
