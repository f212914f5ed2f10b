"""A program that pulls images into a store, for tests that kill it.

    puller STORE REFERENCE…          pull and remove them for ever
    puller once STORE REFERENCE      pull and remove it
    puller steps NUMBER STORE REFERENCE REFERENCE
                                     the same story each time, killed before its NUMBERth change to
                                     a file

With JOBS in the environment layers are worked on in processes of their own, which outlive it for
a moment.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cri_server.images.service import ImageService
from cri_server.images.store.layer_maker import JOB_MODULES
from cri_server.zygote.client import Zygote
from pyrunc.errors import Error

STORE = "PYRUNC_TESTS_IMAGE_STORE"
JOBS = "PYRUNC_TESTS_IMAGE_ERRANDS"
_CHANGES = (
    "mkdir",
    "rename",
    "unlink",
    "rmdir",
    "link",
    "symlink",
    "write",
    "pwrite",
    "ftruncate",
    "fsync",
    "chmod",
    "chown",
    "utime",
)


def count_changes(kill_at: int) -> Callable[[], int]:
    """Count calls that change files, in all threads, and end the process before the call with the
    number `kill_at`."""
    count = itertools.count(1)
    last = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal last
            last = next(count)
            if last == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return run

    for name in _CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    return lambda: last


async def steps(kill_at: str, store: str, first: str, second: str) -> None:
    """Pulls two images with a common base side by side, removes and pulls the first again, and
    removes the second. Prints the number of changes to files."""
    jobs = await Zygote.start(JOB_MODULES) if JOBS in os.environ else None
    changes = count_changes(int(kill_at))
    service = ImageService(Path(store), store=os.environ.get(STORE, "unpacked"), zygote=jobs)
    await service.start()
    ids = await asyncio.gather(service.pull(first), service.pull(second))
    await service.remove(ids[0])
    await service.pull(first)
    await service.remove(ids[1])
    await service.close()
    if jobs:
        await jobs.close()
    print(changes(), flush=True)


async def once(store: str, reference: str) -> None:
    """Pulls, then removes an image; prints `ok` or the kind of the error."""
    try:
        service = ImageService(Path(store), store=os.environ.get(STORE, "unpacked"))
        await service.start()
        await service.remove(await service.pull(reference))
        await service.close()
    except Error as error:
        print(error.kind, error.message, flush=True)
    else:
        print("ok", flush=True)


async def main(store: str, *references: str) -> None:
    """Pull the references one after the other, remove each in between, for ever; stdout has
    `ready`, then a line per step."""
    service = ImageService(Path(store), store=os.environ.get(STORE, "unpacked"))
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
