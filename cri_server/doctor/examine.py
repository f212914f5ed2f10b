"""Runs the checks of doctor, in the order of its output."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from cri_server.doctor import (
    cgroups,
    file_systems,
    kernel,
    kubelet,
    leftovers,
    limits,
    network,
    registries,
)
from cri_server.doctor.model import Check, CheckResult, Level, Machine, warning

log = logging.getLogger(__name__)

# Checks that only read; a starting server makes them, too.
PASSIVE: tuple[Check, ...] = (
    kernel.version,
    kernel.calls,
    kernel.namespaces,
    kernel.seccomp,
    kernel.modules,
    cgroups.version,
    cgroups.driver,
    file_systems.disk,
    file_systems.state,
    file_systems.programs,
    network.configuration,
    network.names,
    network.forwarding,
    limits.apparmor,
    limits.selinux,
    limits.descriptors,
    limits.runtimes,
    limits.sysctls,
    limits.swap,
    kubelet.kubelet,
)
# Checks that mount something, start a program, or need a running server's files.
ACTIVE: tuple[Check, ...] = (
    limits.privilege,
    file_systems.overlay,
    file_systems.images,
    network.firewall,
    registries.registries,
    leftovers.server,
    leftovers.pods,
    leftovers.mounts,
    leftovers.names,
    leftovers.groups,
    leftovers.records,
)


def examine(host: Machine, checks: tuple[Check, ...] = PASSIVE + ACTIVE) -> Iterator[CheckResult]:
    """Run the checks and yield their results. A check that raises an exception yields a warning."""
    for check in checks:
        try:
            yield from check(host)
        except Exception as error:
            log.debug("the check %s failed", check.__name__, exc_info=error)
            name = f"{check.__module__.rpartition('.')[2]}.{check.__name__}"
            text = f"the check {name} failed: {type(error).__name__}: {error}"
            yield warning("doctor", text, "its subject was not checked")


def problems(host: Machine) -> Iterator[tuple[int, str]]:
    """Run the PASSIVE checks, which mount nothing and execute no command. Yield the logging level
    and the text of each problem, for the log of a starting server."""
    for result in examine(host, PASSIVE):
        if result.level >= Level.WARNING:
            level = logging.WARNING if result.level == Level.WRONG else logging.INFO
            remedy = f"; {result.remedy}" if result.remedy else ""
            yield level, f"{result.code}: {result.observation}: {result.effect}{remedy}"
