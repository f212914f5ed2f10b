"""Reloads the configuration on SIGHUP.

All checks come first, so that an invalid file changes nothing. Settings that need a restart are
logged and keep their values.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cri_server.config import Config
from cri_server.config.changes import ConfigChange, after_reload, changes
from cri_server.network.configuration import builtin_network
from cri_server.node import host
from cri_server.observability.logs.setup import configure
from cri_server.services import Services
from cri_server.systemd import notify
from pyrunc.errors import Error

log = logging.getLogger(__name__)

Read = Callable[[], Config]


async def reload_on_request(services: Services, read: Read, requested: asyncio.Event) -> None:
    """Call `read` and apply its configuration each time `requested` is set, until cancelled.
    Signals that arrive together cause one reload."""
    while True:
        await requested.wait()
        # The event is cleared before the read, so that a signal that arrives during it causes
        # another one.
        requested.clear()
        notify.send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            report(apply(services, await asyncio.to_thread(read)))
        except Error as error:
            log.error("the configuration is not reloaded, nothing has changed: %s", error)
        except Exception:
            log.exception("the configuration is not reloaded: unexpected error")
        notify.send("READY=1")


def apply(services: Services, changed: Config) -> list[ConfigChange]:
    """Apply the settings of `changed` that a running server can change; return all differences from
    the previous configuration. Before any change, raises InvalidSpec for an invalid limit, and
    WrongState when the log is to go to journald but journald does not run."""
    before = services.config
    differences = changes(before, changed)
    config = after_reload(before, changed)
    # Everything that can fail comes before the first change.
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


def report(differences: list[ConfigChange]) -> None:
    """Log which settings have changed, and which need a restart."""
    for change in differences:
        before, after = json.dumps(change.before), json.dumps(change.after)
        if change.reloads:
            log.info("%s is now %s, it was %s", change.key, after, before)
        else:
            log.warning(
                "%s stays %s until the server is restarted; the file says %s",
                change.key,
                before,
                after,
            )
    count = sum(change.reloads for change in differences)
    log.info(
        "the configuration is reloaded: %d of %d changed settings applied", count, len(differences)
    )


def configure_log(config: Config) -> None:
    """Configure format, level and rate limit of the log. Raises WrongState when the log is to go to
    journald but journald does not run."""
    configure(config.server.log_level, config.server.log_format, config.server.log_limit_per_s)


def certificate_folders(config: Config) -> tuple[Path, ...]:
    """Return the folders that hold HOST/hosts.toml, in order of precedence."""
    return tuple(Path(folder) for folder in config.registry.config_path.split(":") if folder)


def default_network(config: Config, root: Path) -> dict[str, Any] | None:
    """Return the configuration of the built-in network, for a node without CNI configuration; None
    if the built-in network is disabled."""
    network = config.network
    if not network.builtin:
        return None
    leases = str(root / "network" / "leases")
    return builtin_network(leases, bridge=network.builtin_bridge, subnets=tuple(network.builtin))
