"""SIGHUP: the configuration is read again, and what a running server can change is changed.

All that can fail comes first, so that a file that is wrong changes nothing. What cannot change is
named and stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cri_server.config import Config
from cri_server.config.changes import Change, changes, taken
from cri_server.network.configuration import builtin_network
from cri_server.node import host
from cri_server.observability.logs.setup import configure
from cri_server.services import Services
from cri_server.systemd import notify
from pyrunc.errors import Error

log = logging.getLogger(__name__)

Read = Callable[[], Config]


@contextlib.asynccontextmanager
async def reloading(services: Services, read: Read, wanted: asyncio.Event) -> AsyncIterator[None]:
    """While inside, each time that `wanted` is set the configuration is `read` and taken. Several
    in a row are one."""
    task = asyncio.create_task(_reload_when_wanted(services, read, wanted), name="reload")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _reload_when_wanted(services: Services, read: Read, wanted: asyncio.Event) -> None:
    while True:
        await wanted.wait()
        wanted.clear()
        notify.tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            report(take(services, await asyncio.to_thread(read)))
        except Error as error:
            log.error("the configuration is not reloaded, all stays as it is: %s", error)
        except Exception:
            log.exception("the configuration is not reloaded")
        notify.tell("READY=1")


def take(services: Services, found: Config) -> list[Change]:
    """Change to `found` what can be changed; all differences. Raises InvalidSpec, WrongState:
    nothing has changed then."""
    before = services.config
    differences = changes(before, found)
    config = taken(before, found)
    limits = host.limits(config.containers.rlimits)
    floor = host.oom_score_adj_floor(config.containers.restrict_oom_score_adj)
    network = default_network(config, services.paths.root)
    if any(change.key.startswith("server.log_") for change in differences):
        configure_log(config)
    services.node = replace(services.node, limits=limits, oom_score_adj_floor=floor)
    if any(change.key.startswith("network.") for change in differences):
        services.network.reconfigure(config.network.conf_dir, config.network.bin_dir, network)
    services.images.reconfigure(
        certificate_folders(config), config.images.pinned, config.registry.no_progress_timeout_s
    )
    services.shims.time_operations(config.timeline.operations)
    services.images.policy = config.registry.signature_policy
    services.config = config
    return differences


def report(differences: list[Change]) -> None:
    """Log what has changed and what would need a restart."""
    for change in differences:
        before, after = json.dumps(change.before), json.dumps(change.after)
        if change.reloads:
            log.info("%s is now %s, it was %s", change.key, after, before)
        else:
            log.warning(
                "%s stays %s until the server is restarted: %s was read", change.key, before, after
            )
    count = sum(change.reloads for change in differences)
    log.info("the configuration is reloaded: %d of %d differences taken", count, len(differences))


def configure_log(config: Config) -> None:
    """Where and what the server logs. Raises WrongState."""
    configure(config.server.log_level, config.server.log_format, config.server.log_limit_per_s)


def certificate_folders(config: Config) -> tuple[Path, ...]:
    """The folders of HOST/hosts.toml, the first wins."""
    return tuple(Path(folder) for folder in config.registry.config_path.split(":") if folder)


def default_network(config: Config, root: Path) -> dict[str, Any] | None:
    """The network of a node whose folder has none, when that is configured."""
    given = config.network
    if not given.builtin:
        return None
    leases = str(root / "network" / "leases")
    return builtin_network(leases, bridge=given.builtin_bridge, subnets=tuple(given.builtin))
