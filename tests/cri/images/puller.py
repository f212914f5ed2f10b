"""A program that pulls one image into a store: for tests that kill it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from cri_server.images.service import ImageService
from pyrunc.errors import Error

STORE = "PYRUNC_TESTS_IMAGE_STORE"


async def once(store: str, reference: str) -> None:
    """Pull, then remove; `ok` on stdout, or the error's kind."""
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
    """Pull the references one after the other, remove each in between, for ever; stdout has `ready`, then a line per step."""
    service = ImageService(Path(store), store=os.environ.get(STORE, "unpacked"))
    await service.start()
    print("ready", flush=True)
    while True:
        for reference in references:
            found = await service.pull(reference)
            print("pulled", flush=True)
            await service.remove(found)
            print("removed", flush=True)
        for reference in references:
            await service.pull(reference)
            print("pulled", flush=True)


if __name__ == "__main__":
    asyncio.run(once(*sys.argv[2:]) if sys.argv[1] == "once" else main(*sys.argv[1:]))
