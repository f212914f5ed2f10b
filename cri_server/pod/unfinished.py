"""Ends pods and containers whose creation was interrupted by the server's death. No client knows
their ids."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from cri_server.pod import orphans
from cri_server.pod.client import ShimClient
from cri_server.pod.processes import ANSWER_S
from cri_server.store.facts import ProcessIdentity
from cri_server.store.paths import Paths
from pyrunc import atomic_file
from pyrunc.compile.requests import PauseRequest
from pyrunc.errors import Error
from pyrunc.shim import messages

log = logging.getLogger(__name__)

Detach = Callable[[str | None], Awaitable[None]]
"""Detaches a pod from its network. The argument is the path of the network namespace, None if
unknown."""


async def end_sandbox(paths: Paths, identifier: str, detach: Detach) -> None:
    """End the pod's processes and remove its cgroup. The shim ends the processes if it answers;
    otherwise the server kills the shim and the processes.

    `detach` is called with the path of the network namespace before the shim ends the pod. If the
    shim does not answer or fails, `detach` is called with None.
    """
    folder = paths.sandbox_state(identifier)
    try:
        await _end_by_shim(folder, detach)
    except (Error, TimeoutError) as error:
        reason = str(error) or "its shim does not answer"
        log.info(
            "sandbox %s was partly created and its shim cannot end it; the shim is killed: %s",
            identifier,
            reason,
        )
        await detach(None)
        _kill_shim(folder)
    await orphans.wait_for_forks(paths, identifier)
    await orphans.kill_group(_pause_cgroup(folder), identifier)


async def end_container(paths: Paths, identifier: str) -> None:
    """End the container's processes and remove its cgroup."""
    group = _container_cgroup(paths.container_state(identifier))
    await orphans.kill_group(group, identifier)


async def _end_by_shim(folder: Path, detach: Detach) -> None:
    client = await ShimClient.connect(folder)
    try:
        async with asyncio.timeout(ANSWER_S):
            state = await client.state()
        # While the namespace exists: CNI plugins may enter it, although DEL has to succeed without
        # it.
        await detach(state.netns)
        await client.stop_pause()
        await client.shutdown()
    finally:
        client.close()


def _kill_shim(folder: Path) -> None:
    """Kill the shim that shim.json in `folder` names. The pause process survives the shim, so the
    caller must kill the sandbox's cgroup."""
    try:
        shim = ProcessIdentity.of(atomic_file.read_json(str(folder / messages.SHIM_RECORD)))
    except (Error, OSError):
        return
    orphans.kill_process(shim)


def _pause_cgroup(folder: Path) -> str:
    try:
        return PauseRequest.read(folder).cgroups_path
    except (Error, OSError):
        return ""


def _container_cgroup(folder: Path) -> str:
    """Return the cgroup's path from config.json in `folder`. Return "" if the file is missing,
    because the container was not compiled yet, or if the file cannot be read."""
    try:
        with open(folder / "config.json", encoding="utf-8", errors="surrogateescape") as file:
            return str(json.load(file)["linux"]["cgroupsPath"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
