"""Facts of the host, found once at start: what cgroups, security modules and privileges there are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cri_server.config import Config
from cri_server.store.facts import boot_id
from pyrunc.errors import InvalidSpec

CAP_SYS_RESOURCE = 24

Limits = dict[str, tuple[int, int]]  # RLIMIT_… -> soft, hard; -1 is unlimited


@dataclass(frozen=True, slots=True)
class Node:
    """What the rest of the server asks about the host.

    `cgroup_root` is the mount point of the v2 tree; `cgroup_controllers` those that v2 has. `oom_score_adj_floor` is the
    lowest score that we may set, None when any is permitted.
    """

    boot_id: str
    hostname: str
    cgroup_root: Path
    cgroup_controllers: frozenset[str]
    cgroup_driver: str
    systemd: bool
    apparmor: bool
    selinux: bool
    oom_score_adj_floor: int | None
    limits: Limits

    @property
    def hybrid(self) -> bool:
        """Whether controllers live in v1 hierarchies beside the v2 tree."""
        return self.cgroup_root != Path("/sys/fs/cgroup")


def probe(config: Config, limits: Limits) -> Node:
    """Look at the host; `limits` are what containers get. Raises InvalidSpec when the configuration asks for what it has not."""
    root = cgroup_root()
    systemd = Path("/run/systemd/system").is_dir()
    return Node(
        boot_id=boot_id(),
        hostname=os.uname().nodename,
        cgroup_root=root,
        cgroup_controllers=frozenset(_words(root / "cgroup.controllers")),
        cgroup_driver=_driver(config.cgroup.driver, systemd),
        systemd=systemd,
        apparmor=_text(Path("/sys/module/apparmor/parameters/enabled")) == "Y"
        and Path("/sys/kernel/security/apparmor/profiles").exists(),
        selinux=Path("/sys/fs/selinux/enforce").exists(),
        oom_score_adj_floor=_floor(config.containers.restrict_oom_score_adj),
        limits=limits,
    )


def cgroup_root() -> Path:
    """Where the v2 tree is mounted. Raises InvalidSpec when there is none."""
    for path in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (path / "cgroup.controllers").exists():
            return path
    raise InvalidSpec("cgroup", "no cgroup v2 tree at /sys/fs/cgroup or /sys/fs/cgroup/unified")


def effective_capabilities() -> int:
    """The effective set of this process as a bit mask."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def loaded_apparmor_profiles() -> set[str]:
    """The names of the profiles in the kernel."""
    listing = _text(Path("/sys/kernel/security/apparmor/profiles"))
    return {line.rpartition(" (")[0] for line in listing.splitlines()}


def _driver(asked: str, systemd: bool) -> str:
    if asked == "systemd" and not systemd:
        raise InvalidSpec("cgroup.driver", "systemd does not run on this host")
    if asked == "auto":
        return "systemd" if systemd else "cgroupfs"
    return asked


def _floor(asked: str) -> int | None:
    """Lowering oom_score_adj below its own value needs CAP_SYS_RESOURCE in the initial user namespace (proc(5))."""
    if asked == "never":
        return None
    may_lower = bool(effective_capabilities() >> CAP_SYS_RESOURCE & 1)
    if asked == "auto" and may_lower:
        return None
    return int(_text(Path("/proc/self/oom_score_adj")) or 0)


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
