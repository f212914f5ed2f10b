"""Runs `RUNTIME features` (runtime-spec, features.md) to read the features of the OCI runtimes that
handlers use in place of pyrunc."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.config import handlers
from cri_server.config.model import Config, RuntimeConfig
from cri_server.zygote.client import Zygote
from cri_server.zygote.jobs import FEATURES, FeaturesRequest
from pyrunc.errors import Error

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
Identity = tuple[str, int, int]


class OciFeatures:
    """Runs `RUNTIME features` and caches the output until the runtime's executable changes."""

    def __init__(self, jobs: Zygote) -> None:
        self._jobs = jobs
        self._cache: dict[str, tuple[Identity, dict[str, Any]]] = {}

    async def of_handlers(self, config: Config) -> dict[str, api.RuntimeHandlerFeatures]:
        """Return the features of each handler, by the handler's name. Reports user namespaces only
        for handlers whose OCI runtime is pyrunc, even if another runtime supports them."""
        features = {}
        for name in handlers.names(config):
            runtime = handlers.find(config, name)
            features[name] = api.RuntimeHandlerFeatures(
                recursive_read_only_mounts=runtime is None or await self.mounts_rro(runtime),
                user_namespaces=runtime is None or not runtime.binary,
            )
        return features

    async def mounts_rro(self, runtime: RuntimeConfig) -> bool:
        """Return whether the runtime supports recursive read-only mounts; always True for
        pyrunc."""
        if not runtime.binary:
            return True
        features = await self._ask(runtime.binary, runtime.arguments)
        return "rro" in (features.get("mountOptions") or ())

    async def _ask(self, binary: str, arguments: list[str]) -> dict[str, Any]:
        """Return what `BINARY features` prints, parsed and cached; empty if the runtime is missing,
        fails, or lacks the command `features`."""
        try:
            status = await asyncio.to_thread(os.stat, binary)
        except OSError:
            return {}
        # The time alone does not tell a new file, because packaged files may have the time of their
        # build. A replacement by rename(2) has another inode.
        identity = (" ".join(arguments), status.st_ino, status.st_mtime_ns)
        cached = self._cache.get(binary)
        if cached is None or cached[0] != identity:
            cached = self._cache[binary] = identity, await self._run(binary, arguments)
        return cached[1]

    async def _run(self, binary: str, arguments: list[str]) -> dict[str, Any]:
        try:
            command = FeaturesRequest([binary, *arguments, "features"])
            done = await self._jobs.run(FEATURES, command, timeout_s=TIMEOUT_S)
            features = json.loads(done.stdout) if done.exit_code == 0 else {}
        except (Error, ValueError) as error:
            log.info("cannot read the output of `%s features`: %s", binary, error)
            features = {}
        return features if isinstance(features, dict) else {}
