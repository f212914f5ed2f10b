"""The handlers of `pyrunc.v1.Admin` about images: pulls with progress, pushes, tags, archives,
logins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from cri_server.images.formats import platforms
from cri_server.images.model import AUTH_FIELDS, Auth, Progress
from cri_server.rpc import methods, private
from cri_server.services import Services
from pyrunc.errors import InvalidArgument

if TYPE_CHECKING:
    from pyrunc.ipc import Message

REPORT_INTERVAL_S = 0.1


class ImageAdmin:
    """The handlers of the calls of `pyrunc.v1.Admin` about images."""

    def __init__(self, services: Services) -> None:
        self._images = services.images

    async def pull(
        self, request: private.PullImage | private.PullPlatform
    ) -> AsyncGenerator[private.TransferUpdate, None]:
        name, auth = _text(request.image, "image"), _auth(request.auth)
        platform = None
        if isinstance(request, private.PullPlatform):
            platform = platforms.parse(request.platform)
        async for message in _stream_progress(
            lambda note: self._images.pull(name, auth, note, platform)
        ):
            yield message

    async def push(
        self, request: private.PushImage
    ) -> AsyncGenerator[private.TransferUpdate, None]:
        name, target = _text(request.image, "image"), _text(request.target, "target")
        auth = _auth(request.auth)
        async for message in _stream_progress(
            lambda note: self._images.push(name, target, auth, note)
        ):
            yield message

    async def tag(self, request: private.TagImage) -> None:
        await self._images.tag(_text(request.source, "source"), _text(request.target, "target"))

    async def save(self, request: private.SaveImages) -> AsyncGenerator[bytes, None]:
        if not request.images:
            raise InvalidArgument("images must be a list of names")
        async for part in self._images.save(request.images):
            yield part

    async def check_login(self, request: private.CheckLogin) -> None:
        await self._images.check_login(
            _text(request.registry, "registry"), _auth(request.auth) or Auth()
        )

    def table(self) -> methods.Table:
        """Return the gRPC methods, by path, that call this object's handlers."""
        return methods.private_table(
            {
                private.PullImage: self.pull,
                private.PullPlatform: self.pull,
                private.PushImage: self.push,
                private.TagImage: self.tag,
                private.SaveImages: self.save,
                private.CheckLogin: self.check_login,
            }
        )


async def _stream_progress(
    begin: Callable[[Callable[[Progress], None]], Coroutine[Any, Any, str]],
) -> AsyncGenerator[private.TransferUpdate, None]:
    """Run a transfer and yield its progress, at most every `REPORT_INTERVAL_S`, then its result.
    Closing the generator cancels the transfer."""
    latest: list[Progress] = []
    task = asyncio.create_task(begin(lambda progress: latest.__setitem__(slice(None), [progress])))
    reported: Progress | None = None
    try:
        # Only the latest state is sent, so that a client that reads slowly does not fall behind.
        while not task.done():
            await asyncio.wait([task], timeout=REPORT_INTERVAL_S)
            if latest and latest[0] != reported:
                reported = latest[0]
                yield private.TransferUpdate(
                    private.TransferProgress(
                        reported.stage, reported.fetched_bytes, reported.total_bytes
                    )
                )
        yield private.TransferUpdate(id=await task)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def _text(value: str, key: str) -> str:
    if not value:
        raise InvalidArgument(f"{key} must be a string")
    return value


def _auth(fields: Message | None) -> Auth | None:
    """Convert an object with AuthConfig's fields; return None if all fields are empty or missing.
    Raises InvalidArgument for a field that is not a string."""
    # Not a record: errors of records quote the value, which is secret.
    values = fields or {}
    if not all(isinstance(values.get(f, ""), str) for f in AUTH_FIELDS):
        raise InvalidArgument("auth must be an object of strings")
    auth = Auth(**{name: values.get(name, "") for name in AUTH_FIELDS})
    return None if auth.empty else auth
