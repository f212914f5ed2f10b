"""Starts and replaces the node's shim processes. The zygote forks `[shims] count` shims when the
server starts, before any pod needs them; each shim serves many pods.

A shim with pods outlives the server. The next server uses it for new pods only if both have the
same version. When a shim dies, a new one replaces it, and `cri_server.pod.shims` moves its pods to
another shim.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Coroutine, Mapping
from pathlib import Path

import pyrunc
from cri_server.pod import orphans
from cri_server.pod.client import ShimClient, start_shim
from cri_server.store.facts import ProcessIdentity, entries
from cri_server.zygote.client import Zygote
from pyrunc.errors import Error, NotFound, ResourceExhausted, Unavailable
from pyrunc.shim.messages import PROTOCOL

log = logging.getLogger(__name__)

DEFAULT_LIMIT = 8
ANSWER_S = 2.0
ENDED_POLL_S = 0.005  # between two checks whether a shim has ended
RENEW_POLL_S = 0.02  # between two checks whether a shim has taken its last pod
RESTART_S = 1.0  # between two attempts to replace a shim


def default_count() -> int:
    """Return how many shims to run by default: one per processor, because a shim is
    single-threaded, but at most `DEFAULT_LIMIT`."""
    return min(os.cpu_count() or 1, DEFAULT_LIMIT)


class ShimProcess:
    """A living shim.

    - `folder`: the folder with its socket.
    - `client`: a connection to this socket.
    - `process`: its pid and start time.
    - `silent`: the shim does not answer at the moment.
    - `taking`: the number of unfinished `take_pod` calls.
    """

    def __init__(self, folder: Path, client: ShimClient, process: ProcessIdentity) -> None:
        self.folder, self.client, self.process = folder, client, process
        self.silent, self.taking = False, 0

    async def await_answer(self) -> None:
        """Wait until the shim answers again or is dead."""
        try:
            await self.client.shim()
        except Error:
            return
        self.silent = False


class ShimProcesses:
    """The shims of one server. Use from one event loop."""

    def __init__(self, zygote: Zygote, folder: Path, count: int = 0) -> None:
        """`folder` contains a folder for each shim. `count`: how many shims to run; 0 means
        `default_count`."""
        self._zygote, self._folder, self._count = zygote, folder, count or default_count()
        self._shims: list[ShimProcess] = []
        self.of_this_version: set[ProcessIdentity] = set()
        """The shims of this server's version, including those that get no new pods because `renew`
        has replaced them."""
        self._outdated: dict[ProcessIdentity, Path] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._started: asyncio.Task[None] | None = None
        self._closed = False

    def begin(self) -> None:
        """Connect to the shims of an earlier server and fork the missing ones, in the background.
        Further calls do nothing."""
        if self._started is None:
            self._started = self._in_background(self._start())

    async def ready(self) -> None:
        """Wait until all shims run. Raises Error when a shim cannot be forked."""
        self.begin()
        assert self._started is not None
        await asyncio.shield(self._started)

    async def end_outdated(self, process: ProcessIdentity) -> bool:
        """End `process`, a shim of another version, and remove its folder. The shim first logs all
        output that it has read. It is killed if it does not know the request to end, or has not
        ended after `ANSWER_S`. If it cannot write a log, the output would be lost: then the shim
        continues, and the result is False."""
        folder = self._outdated.get(process)
        if folder is not None:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._end(process, folder)
            except ResourceExhausted as error:
                log.warning("shim %d of another version continues: %s", process.pid, error)
                return False
            except (Error, TimeoutError) as error:
                why = str(error) or "it does not end"
                log.warning("shim %d is killed, output may be lost: %s", process.pid, why)
        orphans.kill_process(process)
        if folder is not None:
            del self._outdated[process]
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return True

    async def _end(self, process: ProcessIdentity, folder: Path) -> None:
        client = await ShimClient.connect(folder)
        try:
            await client.end_shim()
            while process.alive():
                await asyncio.sleep(ENDED_POLL_S)
        finally:
            client.close()

    async def renew(self) -> None:
        """Fork new shims as descendants of the current keeper; they get all new pods from now on.
        The old shims keep their pods, and each ends with its last pod.

        Raises Error when a shim cannot be forked.
        """
        old = list(self._shims)
        for _ in old:
            await self._fork()
        for shim in old:
            while shim.taking:
                await asyncio.sleep(RENEW_POLL_S)
            if shim in self._shims:
                self._shims.remove(shim)
                shim.client.close()

    def close(self) -> None:
        """Close the connections. Shims without pods end."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for shim in self._shims:
            shim.client.close()
        self._shims.clear()

    async def take_pod(
        self,
        sandbox_dir: Path,
        containers_dir: Path,
        pods: Mapping[ProcessIdentity, int],
        *,
        network: bool,
    ) -> tuple[ProcessIdentity, str | None]:
        """Have the least loaded shim serve a new pod; fork a shim if none lives. `pods`: the number
        of pods of each shim. Return the shim and, with `network`, the path of the pod's new network
        namespace.

        Raises Unavailable when no shim answers, and Error when a shim cannot be forked.
        """
        await self.ready()
        while True:
            shim = self._least_loaded(pods) or await self._fork()
            shim.taking += 1
            try:
                path = await shim.client.take_pod(
                    sandbox_dir, containers_dir, network=network, timeout_s=ANSWER_S
                )
                return shim.process, path
            except TimeoutError:
                shim.silent = True
                self._in_background(shim.await_answer())
                if all(other.silent for other in self._shims):
                    raise Unavailable(f"the shim {shim.process.pid} does not answer") from None
            except Unavailable:
                if not shim.client.closed:
                    raise
            finally:
                shim.taking -= 1

    def _least_loaded(self, pods: Mapping[ProcessIdentity, int]) -> ShimProcess | None:
        living = [shim for shim in self._shims if not shim.client.closed]
        answering = [shim for shim in living if not shim.silent] or living
        # `taking` counts too, because simultaneous calls would otherwise all choose the same shim.
        return min(
            answering, key=lambda shim: pods.get(shim.process, 0) + shim.taking, default=None
        )

    async def _start(self) -> None:
        for name in entries(self._folder):
            await self._use_again(self._folder / name)
        while len(self._shims) < self._count:
            try:
                await self._fork()
            except Unavailable as error:  # the zygote was killed; the next fork starts another one
                log.warning("cannot start a shim: %s", error)
                await self._fork()

    async def _use_again(self, folder: Path) -> None:
        """Connect to the shim in `folder`, which an earlier server has started. The shim gets new
        pods if it is of this version; otherwise it is registered as outdated. A dead shim's folder
        is deleted."""
        try:
            client = await ShimClient.connect(folder)
        except NotFound:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            return
        except Error as error:
            log.warning("cannot connect to the shim in %s: %s", folder, error)
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                info = await client.shim()
        except (Error, TimeoutError) as error:
            # Its folder stays: the shim may have pods, and answer again later.
            log.warning("cannot use the shim in %s: %s", folder, str(error) or "it does not answer")
            client.close()
            return
        if (info.protocol, info.version) != (PROTOCOL, pyrunc.__version__):
            log.info("shim %d is of version %s and gets no more pods", info.pid, info.version)
            client.close()
            self._outdated[ProcessIdentity(info.pid, info.start_time)] = folder
            return
        self._add(ShimProcess(folder, client, ProcessIdentity(info.pid, info.start_time)))

    async def _fork(self) -> ShimProcess:
        folder = self._folder / os.urandom(4).hex()
        folder.mkdir(mode=0o700)
        try:
            _, client = await start_shim(self._zygote, folder, pyrunc.__version__)
            try:
                info = await client.shim()
            except BaseException:
                client.close()
                raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shim = ShimProcess(folder, client, ProcessIdentity(info.pid, info.start_time))
        self._add(shim)
        return shim

    def _add(self, shim: ShimProcess) -> None:
        shim.client.on_close = lambda: self._lost(shim)
        self._shims.append(shim)
        self.of_this_version.add(shim.process)

    def _lost(self, shim: ShimProcess) -> None:
        self._shims.remove(shim)
        if not self._closed:
            log.warning("shim %d has ended", shim.process.pid)
            self._in_background(self._replace(shim))

    async def _replace(self, lost: ShimProcess) -> None:
        await asyncio.to_thread(shutil.rmtree, lost.folder, ignore_errors=True)
        while len(self._shims) < self._count:
            try:
                await self._fork()
            except (Error, OSError) as error:
                log.error("cannot start another shim: %s", error)
                await asyncio.sleep(RESTART_S)

    def _in_background(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
