"""A program that pulls one image into a store: for tests that kill it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from cri_server.images.service import ImageService


async def main(store: str, *references: str) -> None:
    """Pull the references one after the other, remove each in between, for ever; `ready` on stdout says that it begins."""
    service = ImageService(Path(store))
    await service.start()
    print("ready", flush=True)
    while True:
        for reference in references:
            await service.remove(await service.pull(reference))
        for reference in references:
            await service.pull(reference)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
