"""What the server keeps of its pods for the case that a shim is killed, and how another shim goes on with them.

A kept thing is descriptors that only shims use (`pyrunc.shim.kept`): with them open here nothing in a pod notices that its shim is
gone. It comes with each start, is asked for after a restart of the server, and is closed when what it belongs to has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from cri_server.network.names import after_take_over
from cri_server.store.model import Container, Sandbox
from pyrunc.errors import Error
from pyrunc.shim.client import ExecSession, Kept, ShimClient
from pyrunc.shim.messages import KeptContainer, KeptHolder

log = logging.getLogger(__name__)


class Keeper:
    """By the ids of sandboxes (their holders) and of containers."""

    def __init__(self) -> None:
        self._holders: dict[str, Kept[KeptHolder]] = {}
        self._containers: dict[str, Kept[KeptContainer]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def holds(self, identifier: str) -> bool:
        return identifier in self._holders or identifier in self._containers

    def keep_holder(self, sandbox: Sandbox, kept: Kept[KeptHolder]) -> None:
        """It belongs to the keeper from here on; what has ended meanwhile is not kept. Here and below."""
        self.let_go(sandbox.id)
        if sandbox.holder_alive:
            self._holders[sandbox.id] = kept
        else:
            kept.close()

    def keep_container(self, container: Container, kept: Kept[KeptContainer]) -> None:
        self.let_go(container.id)
        if container.exit is None:
            self._containers[container.id] = kept
        else:
            kept.close()

    def let_go(self, identifier: str) -> None:
        """It has ended; fine when nothing is kept."""
        for kept in (self._holders.pop(identifier, None), self._containers.pop(identifier, None)):
            if kept is not None:
                kept.close()

    def close(self) -> None:
        for task in self._asking:
            task.cancel()
        for identifier in [*self._holders, *self._containers]:
            self.let_go(identifier)

    def ask(self, sandbox: Sandbox, containers: Iterable[Container], client: ShimClient) -> None:
        """In the background: all that a shim, found again, has to give."""
        wanted: list[Sandbox | Container] = [c for c in containers if c.running and not self.holds(c.id)]
        if sandbox.holder_alive and not self.holds(sandbox.id):
            wanted.append(sandbox)
        if wanted:
            task = asyncio.get_running_loop().create_task(self._ask(sandbox, wanted, client))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, sandbox: Sandbox, wanted: Sequence[Sandbox | Container], client: ShimClient) -> None:
        for one in wanted:
            try:
                if isinstance(one, Container):
                    self.keep_container(one, await client.keep_container(one.id))
                else:
                    self.keep_holder(one, await client.keep_holder())
            except Error as error:  # it has ended meanwhile, or its shim has, or is of an older version
                log.debug("sandbox %s: %s: nothing to keep: %s", sandbox.id, one.id, error)

    async def hand_over(
        self,
        sandbox: Sandbox,
        containers: Iterable[Container],
        client: ShimClient,
        sessions: Sequence[ExecSession],
    ) -> None:
        """Give all to the shim behind `client`, which has taken the place of a dead one. Raises Error."""
        if holder := self._holders.get(sandbox.id):
            path = await client.adopt_holder(holder)
            sandbox.netns_path = after_take_over(sandbox.netns_path, path or "")
        for container in containers:
            if kept := self._containers.get(container.id):
                await client.adopt_container(
                    container.id, kept, [one for one in sessions if one.container == container.id]
                )
