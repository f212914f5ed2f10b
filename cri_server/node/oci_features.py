"""What the OCI runtimes of handlers can do, as they say themselves (`RUNTIME features`,
runtime-spec features.md)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.config import handlers
from cri_server.config.model import Config, Runtime
from cri_server.zygote.client import Zygote
from cri_server.zygote.jobs import FEATURES, FeaturesRequest
from pyrunc.errors import Error

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
Identity = tuple[str, int, int]


class OciFeatures:
    """Asks each program once, and again when its file has changed."""

    def __init__(self, jobs: Zygote) -> None:
        self._errands = jobs
        self._known: dict[str, tuple[Identity, dict[str, Any]]] = {}

    async def of_handlers(self, config: Config) -> dict[str, api.RuntimeHandlerFeatures]:
        """By handler. Pods with users of their own are our runtime's only."""
        found = {}
        for name in handlers.names(config):
            runtime = handlers.find(config, name)
            found[name] = api.RuntimeHandlerFeatures(
                recursive_read_only_mounts=runtime is None or await self.mounts_rro(runtime),
                user_namespaces=runtime is None or not runtime.binary,
            )
        return found

    async def mounts_rro(self, runtime: Runtime) -> bool:
        """Whether it makes mounts read-only with all that is mounted below: ours does, another one
        says so."""
        if not runtime.binary:
            return True
        said = await self._ask(runtime.binary, runtime.arguments)
        return "rro" in (said.get("mountOptions") or ())

    async def _ask(self, binary: str, arguments: list[str]) -> dict[str, Any]:
        """Nothing for a program that is not there, fails, or knows no `features`."""
        try:
            facts = await asyncio.to_thread(os.stat, binary)
        except OSError:
            return {}
        identity = (" ".join(arguments), facts.st_ino, facts.st_mtime_ns)
        known = self._known.get(binary)
        if known is None or known[0] != identity:
            known = self._known[binary] = identity, await self._run(binary, arguments)
        return known[1]

    async def _run(self, binary: str, arguments: list[str]) -> dict[str, Any]:
        try:
            command = FeaturesRequest([binary, *arguments, "features"])
            done = await self._errands.run(FEATURES, command, timeout_s=TIMEOUT_S)
            said = json.loads(done.stdout) if done.exit_code == 0 else {}
        except (Error, ValueError) as error:
            log.info("%s features: %s", binary, error)
            said = {}
        return said if isinstance(said, dict) else {}
