"""The private calls about images, for which CRI has none: pulls that tell how far they are, tags,
archives, logins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from cri_server.images import platforms
from cri_server.images.model import Auth, Progress
from cri_server.rpc import private
from cri_server.rpc.methods import Method, Table
from cri_server.services import Services
from pyrunc.errors import InvalidArgument
from pyrunc.records import Request

if TYPE_CHECKING:
    from pyrunc.ipc import Message

TELL_S = 0.1
AUTH_FIELDS = ("username", "password", "auth", "server_address", "identity_token", "registry_token")


class ImageAdmin:
    """The calls."""

    def __init__(self, services: Services) -> None:
        self._images = services.images

    async def pull(self, asked: private.PullImage) -> AsyncGenerator[private.Told, None]:
        name, auth = _text(asked.image, "image"), _auth(asked.auth)
        async for message in _telling(lambda note: self._images.pull(name, auth, note)):
            yield message

    async def pull_platform(
        self, request: private.PullPlatform
    ) -> AsyncGenerator[private.Told, None]:
        name, auth = _text(request.image, "image"), _auth(request.auth)
        platform = platforms.parse(request.platform)
        async for message in _telling(lambda note: self._images.pull(name, auth, note, platform)):
            yield message

    async def push(self, asked: private.PushImage) -> AsyncGenerator[private.Told, None]:
        name, target = _text(asked.image, "image"), _text(asked.target, "target")
        auth = _auth(asked.auth)
        async for message in _telling(lambda note: self._images.push(name, target, auth, note)):
            yield message

    async def tag(self, asked: private.TagImage) -> private.Done:
        await self._images.tag(_text(asked.source, "source"), _text(asked.target, "target"))
        return private.Done()

    async def save(self, asked: private.SaveImages) -> AsyncGenerator[bytes, None]:
        if not asked.images:
            raise InvalidArgument("images must be a list of names")
        async for part in self._images.save(asked.images):
            yield part

    async def check_login(self, asked: private.CheckLogin) -> private.Done:
        await self._images.check_login(
            _text(asked.registry, "registry"), _auth(asked.auth) or Auth()
        )
        return private.Done()

    def table(self) -> Table:
        """What the gRPC server takes."""
        calls: list[tuple[type[Request], Callable[[Any], Any], Callable[[Any], bytes]]] = [
            (private.PullImage, self.pull, private.encode_record),
            (private.PullPlatform, self.pull_platform, private.encode_record),
            (private.PushImage, self.push, private.encode_record),
            (private.TagImage, self.tag, private.encode_record),
            (private.SaveImages, self.save, bytes),
            (private.CheckLogin, self.check_login, private.encode_record),
        ]
        return {
            private.path(kind.call).encode(): Method(
                kind.call, private.decoder(kind), answer, encode
            )
            for kind, answer, encode in calls
        }


async def _telling(
    begin: Callable[[Callable[[Progress], None]], Coroutine[Any, Any, str]],
) -> AsyncGenerator[private.Told, None]:
    """The progress of long work, at most every `TELL_S`, then its result. It is cancelled when
    nobody listens any more."""
    latest: list[Progress] = []
    task = asyncio.create_task(begin(lambda progress: latest.__setitem__(slice(None), [progress])))
    told: Progress | None = None
    try:
        while not task.done():
            await asyncio.wait([task], timeout=TELL_S)
            if latest and latest[0] != told:
                told = latest[0]
                yield private.Told(
                    private.Progress(told.stage, told.fetched_bytes, told.total_bytes)
                )
        yield private.Told(id=await task)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def _text(value: str, key: str) -> str:
    if not value:
        raise InvalidArgument(f"{key} must be a string")
    return value


def _auth(given: Message | None) -> Auth | None:
    """No record reads it: its errors would show what is secret."""
    found = given or {}
    if not all(isinstance(found.get(f, ""), str) for f in AUTH_FIELDS):
        raise InvalidArgument("auth must be an object of strings")
    auth = Auth(**{name: found.get(name, "") for name in AUTH_FIELDS})
    return None if auth.empty else auth
