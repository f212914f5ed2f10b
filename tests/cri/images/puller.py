"""A program that pulls one image into a store: for tests that kill it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from cri_server.images.service import ImageService


async def main(store: str, *references: str) -> None:
    """Pull the references one after the other, remove each in between, for ever; stdout has `ready`, then a line per step."""
    service = ImageService(Path(store))
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
    asyncio.run(main(*sys.argv[1:]))
