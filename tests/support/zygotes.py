"""Starts zygotes for tests."""

from __future__ import annotations

from collections.abc import Sequence

from cri_server.zygote.client import Zygote


async def start_zygote(preload: Sequence[str]) -> Zygote:
    """Start a zygote and return it when it has imported its modules. Raises PeerError if an import
    fails."""
    zygote = Zygote(preload)
    zygote.begin()
    try:
        await zygote.ready()
    except BaseException:
        await zygote.close()
        raise
    return zygote
