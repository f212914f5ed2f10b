"""A program that pulls images into a store, for tests that kill it.

puller STORE REFERENCE…          pull and remove the images for ever
puller once STORE REFERENCE      pull the image and remove it
puller steps NUMBER STORE REFERENCE REFERENCE
                                 pull and remove the images in a fixed order; the program
                                 kills itself before its NUMBERth change to a file
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from cri_server.images.service import ImageService
from cri_server.images.store.layer_jobs import LayerJobs
from cri_server.images.store.layer_maker import JOB_MODULES
from pyrunc.errors import Error
from tests.cri.images.changes import before_each_change
from tests.support.layer_threads import LayerThreads
from tests.support.zygotes import start_zygote

STORE = "PYRUNC_TESTS_IMAGE_STORE"
JOBS = "PYRUNC_TESTS_IMAGE_ERRANDS"  # set: jobs of a zygote unpack the layers, else threads


def count_changes(kill_at: int) -> Callable[[], int]:
    """Kill this process before its change to a file with the number `kill_at`. Return a function
    that returns the number of changes so far."""
    numbers = itertools.count(1)
    last = 0

    def count() -> None:
        nonlocal last
        last = next(numbers)
        if last == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    before_each_change(count)
    return lambda: last


async def steps(kill_at: str, store: str, first: str, second: str) -> None:
    """Pull two images at the same time, remove the first and pull it again, and remove the second.
    Print the number of changes to files."""
    zygote = await start_zygote(JOB_MODULES) if JOBS in os.environ else None
    jobs = LayerJobs(zygote) if zygote else LayerThreads()
    changes = count_changes(int(kill_at))
    service = ImageService(Path(store), store=os.environ.get(STORE, "unpacked"), jobs=jobs)
    await service.start()
    ids = await asyncio.gather(service.pull(first), service.pull(second))
    await service.remove(ids[0])
    await service.pull(first)
    await service.remove(ids[1])
    await service.close()
    if zygote:
        await zygote.close()
    print(changes(), flush=True)


async def once(store: str, reference: str) -> None:
    """Pull an image and remove it; print `ok` or the error."""
    try:
        service = ImageService(
            Path(store), store=os.environ.get(STORE, "unpacked"), jobs=LayerThreads()
        )
        await service.start()
        await service.remove(await service.pull(reference))
        await service.close()
    except Error as error:
        print(error.kind, error.message, flush=True)
    else:
        print("ok", flush=True)


async def main(store: str, *references: str) -> None:
    """Pull and remove the images one after the other, for ever. Print `ready`, then a line after
    each pull and each removal."""
    service = ImageService(
        Path(store), store=os.environ.get(STORE, "unpacked"), jobs=LayerThreads()
    )
    await service.start()
    print("ready", flush=True)
    while True:
        for reference in references:
            image = await service.pull(reference)
            print("pulled", flush=True)
            await service.remove(image)
            print("removed", flush=True)
        for reference in references:
            await service.pull(reference)
            print("pulled", flush=True)


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "once":
        asyncio.run(once(*words))
    elif verb == "steps":
        asyncio.run(steps(*words))
    else:
        asyncio.run(main(verb, *words))
