"""Reads the properties of the host once, at the server's start: cgroups, security modules,
privileges and limits."""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cri_server.config import Config
from cri_server.security.selinux import policy
from cri_server.security.selinux.policy import SelinuxPolicy
from cri_server.store.facts import boot_id
from pyrunc.abi.process import RLIMITS
from pyrunc.errors import InvalidSpec

CAP_SYS_RESOURCE = 24

Limits = dict[str, tuple[int, int]]  # RLIMIT_… -> soft, hard; -1 is unlimited
UNLIMITED = -1

# The limits that systemd sets for services: containerd and CRI-O have them, and images expect them.
# RLIMIT_NPROC is unlimited, because it counts a user's processes on the whole machine; pids.max
# limits a container's. The soft RLIMIT_NOFILE is low, because programs that use select(2), or that
# close all descriptors, break with a million.
DEFAULT_LIMITS: Limits = {
    "RLIMIT_AS": (UNLIMITED, UNLIMITED),
    "RLIMIT_CORE": (0, UNLIMITED),
    "RLIMIT_CPU": (UNLIMITED, UNLIMITED),
    "RLIMIT_DATA": (UNLIMITED, UNLIMITED),
    "RLIMIT_FSIZE": (UNLIMITED, UNLIMITED),
    "RLIMIT_LOCKS": (UNLIMITED, UNLIMITED),
    "RLIMIT_MEMLOCK": (8 << 20, 8 << 20),
    "RLIMIT_MSGQUEUE": (819200, 819200),
    "RLIMIT_NICE": (0, 0),
    "RLIMIT_NOFILE": (1024, 524288),
    "RLIMIT_NPROC": (UNLIMITED, UNLIMITED),
    "RLIMIT_RSS": (UNLIMITED, UNLIMITED),
    "RLIMIT_RTPRIO": (0, 0),
    "RLIMIT_RTTIME": (UNLIMITED, UNLIMITED),
    "RLIMIT_STACK": (8 << 20, UNLIMITED),
}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The properties of the host that the server reads once, at its start.

    - `cgroup_controllers`: the controllers of cgroup v2.
    - `oom_score_adj_floor`: the lowest oom_score_adj that this server may set, None without a
      limit.
    - `selinux`: None on a kernel without SELinux, or when the configuration disables it.
    """

    boot_id: str
    hostname: str
    cgroup_controllers: frozenset[str]
    cgroup_driver: str
    apparmor: bool
    selinux: SelinuxPolicy | None
    oom_score_adj_floor: int | None
    limits: Limits


def probe(config: Config) -> NodeFacts:
    """Read the properties of the host. Raises InvalidSpec when the configuration requires a feature
    that the host lacks."""
    # sd_booted(3) makes this test: systemd may be installed without being process 1.
    systemd = Path("/run/systemd/system").is_dir()
    return NodeFacts(
        boot_id=boot_id(),
        hostname=os.uname().nodename,
        cgroup_controllers=frozenset(_text(cgroup_root() / "cgroup.controllers").split()),
        cgroup_driver=_driver(config.cgroup.driver, systemd),
        # Without the list of profiles, in securityfs, the server cannot know which are loaded.
        apparmor=_text(Path("/sys/module/apparmor/parameters/enabled")) == "Y"
        and Path("/sys/kernel/security/apparmor/profiles").exists(),
        selinux=policy.probe() if config.selinux.enabled else None,
        oom_score_adj_floor=oom_score_adj_floor(config.containers.restrict_oom_score_adj),
        limits=limits(config.containers.rlimits),
    )


def limits(requested: Sequence[str]) -> Limits:
    """Return the resource limits of containers, by names such as RLIMIT_NOFILE. A default is
    lowered to what this process may set, unless a `requested` limit (`nofile=1024:524288`) replaces
    it.

    Raises InvalidSpec for a requested limit that is malformed, or whose hard limit setrlimit(2)
    would refuse with EPERM.
    """
    may_raise = bool(effective_capabilities() >> CAP_SYS_RESOURCE & 1)
    result = {}
    for name, (soft, hard) in _default_limits().items():
        hard = min(hard, _highest(name, may_raise), key=_size)
        result[name] = min(soft, hard, key=_size), hard
    for place, text in enumerate(requested):
        path = f"containers.rlimits[{place}]"
        name, soft, hard = _parse_limit(text, path)
        highest = _highest(name, may_raise)
        if _size(hard) > _size(highest):
            raise InvalidSpec(
                path, f"{text!r} is above {highest}, the highest that this server may set"
            )
        result[name] = soft, hard
    return result


def _highest(name: str, may_raise: bool) -> int:
    """Return the highest hard limit that this process may set for `name`, such as RLIMIT_NOFILE;
    above it setrlimit(2) fails with EPERM. `may_raise`: this process has CAP_SYS_RESOURCE."""
    if not may_raise:
        return resource.getrlimit(RLIMITS[name])[1]
    # The kernel answers EPERM above fs.nr_open, also with CAP_SYS_RESOURCE (do_prlimit in
    # kernel/sys.c).
    if name == "RLIMIT_NOFILE":
        return int(_text(Path("/proc/sys/fs/nr_open")) or UNLIMITED)
    return UNLIMITED


def _default_limits() -> Limits:
    """Return DEFAULT_LIMITS and the RLIMIT_SIGPENDING of process 1, which the kernel derives from
    the size of the memory."""
    return {**DEFAULT_LIMITS, "RLIMIT_SIGPENDING": resource.prlimit(1, resource.RLIMIT_SIGPENDING)}


def _parse_limit(text: str, path: str) -> tuple[str, int, int]:
    """Return name, soft and hard limit of a `text` such as `nofile=1024:524288`."""
    word, _, values = text.partition("=")
    name = f"RLIMIT_{word.upper().removeprefix('RLIMIT_')}"
    numbers = [
        UNLIMITED
        if value == "unlimited"
        else int(value)
        if value.isascii() and value.isdecimal()
        else None
        for value in values.split(":")
    ]
    if name not in RLIMITS or not 1 <= len(numbers) <= 2 or None in numbers:
        raise InvalidSpec(
            path,
            f"{text!r} is not NAME=SOFT[:HARD] with a limit of setrlimit(2), such as "
            "nofile=1024:524288",
        )
    soft, hard = numbers[0], numbers[-1]
    assert soft is not None and hard is not None
    if _size(soft) > _size(hard):
        raise InvalidSpec(path, f"{text!r}: the soft limit is above the hard one")
    return name, soft, hard


def _size(limit: int) -> float:
    return float("inf") if limit == UNLIMITED else limit


def cgroup_root() -> Path:
    """Return the mount point of cgroup v2. Raises InvalidSpec if it is not mounted."""
    # On a hybrid host systemd mounts the v2 tree at `unified`, below the tmpfs with the v1
    # hierarchies.
    for path in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (path / "cgroup.controllers").exists():
            return path
    raise InvalidSpec("cgroup", "no cgroup v2 tree at /sys/fs/cgroup or /sys/fs/cgroup/unified")


@functools.cache
def effective_capabilities() -> int:
    """Return the effective capabilities of this process as a bit mask. They do not change."""
    # capget(2) has no wrapper in Python.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def loaded_apparmor_profiles() -> set[str]:
    """Return the names of the AppArmor profiles that the kernel has loaded."""
    listing = _text(Path("/sys/kernel/security/apparmor/profiles"))
    return {line.rpartition(" (")[0] for line in listing.splitlines()}


def _driver(configured: str, systemd: bool) -> str:
    if configured == "systemd" and not systemd:
        raise InvalidSpec("cgroup.driver", "systemd does not run on this host")
    if configured == "auto":
        return "systemd" if systemd else "cgroupfs"
    return configured


def oom_score_adj_floor(mode: str) -> int | None:
    """Return the lowest oom_score_adj that the server may set for containers; None without a limit.

    A process needs CAP_SYS_RESOURCE in the initial user namespace to set an oom_score_adj below its
    own (proc(5)). With `mode` `never` there is no limit. With `always` the limit is the server's
    own oom_score_adj. With `auto` it is the same, but a server with CAP_SYS_RESOURCE has no limit.
    """
    if mode == "never":
        return None
    may_lower = bool(effective_capabilities() >> CAP_SYS_RESOURCE & 1)
    # Outside of the initial user namespace the kernel refuses a lower value even to a process with
    # this capability (__set_oom_adj in fs/proc/base.c). For this case `always` exists.
    if mode == "auto" and may_lower:
        return None
    return int(_text(Path("/proc/self/oom_score_adj")) or 0)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
