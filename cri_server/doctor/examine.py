"""All checks, in the order in which they are told."""

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
from cri_server.doctor.model import Check, Finding, Host, Level

log = logging.getLogger(__name__)

# Those that only read: a server that starts makes them beside its work.
PASSIVE: tuple[Check, ...] = (
    kernel.version, kernel.calls, kernel.namespaces, kernel.seccomp, kernel.modules, cgroups.version, cgroups.driver,
    file_systems.disk, file_systems.state, file_systems.programs, network.configuration, network.names, network.forwarding, limits.apparmor,
    limits.selinux, limits.descriptors, limits.runtimes, limits.sysctls, limits.swap, kubelet.kubelet,
)  # fmt: skip
# Those that try something out, start a program, or look for what only a server that runs can tell.
ACTIVE: tuple[Check, ...] = (
    limits.privilege, file_systems.overlay, file_systems.images, network.firewall, registries.registries, leftovers.server, leftovers.pods, leftovers.mounts,
    leftovers.names, leftovers.groups, leftovers.records,
)  # fmt: skip


def examine(host: Host, checks: tuple[Check, ...] = PASSIVE + ACTIVE) -> Iterator[Finding]:
    """What each check finds. One that fails is a finding itself."""
    for check in checks:
        try:
            yield from check(host)
        except Exception as error:
            log.debug("%s", check.__name__, exc_info=error)
            text = f"{check.__module__.rpartition('.')[2]}.{check.__name__}: {type(error).__name__}: {error}"
            yield Finding("doctor", Level.WARNING, text, "this was not looked at")


def complain(host: Host) -> None:
    """For a server that starts: log what is wrong, and nothing else."""
    for finding in examine(host, PASSIVE):
        if finding.level >= Level.WARNING:
            level = logging.WARNING if finding.level == Level.WRONG else logging.INFO
            mend = f"; {finding.mend}" if finding.mend else ""
            log.log(level, "%s: %s: %s%s", finding.code, finding.found, finding.follows, mend)
