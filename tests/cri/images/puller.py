"""A program that pulls images into a store, for tests that kill it.

    puller STORE REFERENCE…          pull and remove the images for ever
    puller once STORE REFERENCE      pull the image and remove it
    puller steps NUMBER STORE REFERENCE REFERENCE
                                     pull and remove the images in a fixed order; the program is
                                     killed before its NUMBERth change to a file

With JOBS in the environment, jobs of a zygote work on the layers; they outlive the program for a
moment.
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
JOBS = "PYRUNC_TESTS_IMAGE_ERRANDS"


def count_changes(kill_at: int) -> Callable[[], int]:
    """Counts the changes to files, and kills this process before the change with the number
    `kill_at`. Returns a function that returns the count."""
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
    """Pulls two images with a common base at the same time, removes the first and pulls it again,
    and removes the second. Prints the number of changes to files."""
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
    """Pulls, then removes an image; prints `ok` or the kind of the error."""
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
    """Pulls and removes the images one after the other, for ever. Prints `ready`, then a line for
    each step."""
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
