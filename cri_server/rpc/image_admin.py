"""The private calls about images, for which CRI has none: pulls that tell how far they are, tags, archives, logins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import asdict
from typing import Any

from cri_server.images.model import Auth, Progress
from cri_server.rpc import private
from cri_server.rpc.methods import Method, Table
from cri_server.services import Services
from pyrunc.errors import InvalidArgument

TELL_S = 0.1
AUTH_FIELDS = ("username", "password", "auth", "server_address", "identity_token", "registry_token")


class ImageAdmin:
    """The calls."""

    def __init__(self, services: Services) -> None:
        self._images = services.images

    async def pull(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """{"image", "auth"} -> {"progress": {"stage", "fetched_bytes", "total_bytes"}} again and again, then {"id"}."""
        name, auth = _text(request, "image"), _auth(request)
        async for message in _telling(lambda note: self._images.pull(name, auth, note)):
            yield message

    async def push(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """{"image", "target", "auth"} -> progress as `pull`, then {"id": the manifest's digest}."""
        name, target, auth = _text(request, "image"), _text(request, "target"), _auth(request)
        async for message in _telling(lambda note: self._images.push(name, target, auth, note)):
            yield message

    async def tag(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"source", "target"} -> {}: another name for an image."""
        await self._images.tag(_text(request, "source"), _text(request, "target"))
        return {}

    async def save(self, request: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """{"images": [name or id]} -> the archive, part by part."""
        names = request.get("images")
        if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
            raise InvalidArgument("images must be a list of names")
        async for part in self._images.save(names):
            yield part

    async def check_login(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"registry", "auth"} -> {} when the registry takes this login."""
        await self._images.check_login(_text(request, "registry"), _auth(request) or Auth())
        return {}

    def table(self) -> Table:
        """What the gRPC server takes."""
        calls: list[tuple[str, Callable[[Any], Any], Callable[[Any], bytes]]] = [
            (private.PULL_IMAGE, self.pull, private.encode),
            (private.PUSH_IMAGE, self.push, private.encode),
            (private.TAG_IMAGE, self.tag, private.encode),
            (private.SAVE_IMAGES, self.save, bytes),
            (private.CHECK_LOGIN, self.check_login, private.encode),
        ]
        return {
            private.path(name).encode(): Method(name, private.decode, answer, encode)
            for name, answer, encode in calls
        }


async def _telling(
    begin: Callable[[Callable[[Progress], None]], Coroutine[Any, Any, str]],
) -> AsyncGenerator[dict[str, Any], None]:
    """The progress of long work, at most every `TELL_S`, then its result. It is cancelled when nobody listens any more."""
    latest: list[Progress] = []
    task = asyncio.create_task(begin(lambda progress: latest.__setitem__(slice(None), [progress])))
    told: Progress | None = None
    try:
        while not task.done():
            await asyncio.wait([task], timeout=TELL_S)
            if latest and latest[0] != told:
                told = latest[0]
                yield {"progress": {k: v for k, v in asdict(told).items() if k != "reference"}}
        yield {"id": await task}
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def _text(request: dict[str, Any], key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{key} must be a string")
    return value


def _auth(request: dict[str, Any]) -> Auth | None:
    found = request.get("auth") or {}
    if not isinstance(found, dict) or not all(isinstance(found.get(f, ""), str) for f in AUTH_FIELDS):
        raise InvalidArgument("auth must be an object of strings")
    auth = Auth(**{name: found.get(name, "") for name in AUTH_FIELDS})
    return None if auth.empty else auth
