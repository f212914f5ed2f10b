"""Reads the facts on which plans depend: facts about the runtime's own process and about the
machine. Each process reads them once."""

from __future__ import annotations

import os
from errno import EINVAL, EPERM

from pyrunc.abi.capability import CAP_SYS_ADMIN
from pyrunc.abi.file import AT_EMPTY_PATH
from pyrunc.abi.mount import OPEN_TREE_CLONE
from pyrunc.errors import KernelError, Unsupported
from pyrunc.kernel import cgroup
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel.credential import in_user_namespace
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.mountinfo import mount_points
from pyrunc.plan.model import HostFacts

DETACHED_SINCE = (6, 15)
_host: HostFacts | None = None


def host() -> HostFacts:
    """Return the facts about this process and machine.

    `oom_score_adj` is this process's present value, or 0 if this process may lower the value. In
    that case plans do not depend on it.
    """
    facts = constant_facts()
    if facts.lowers_oom_score:
        return facts  # its own score does not matter then
    return facts.replace(oom_score_adj=int(_read("/proc/self/oom_score_adj")))


def constant_facts() -> HostFacts:
    """Return the facts that do not change in the life of this process: all but oom_score_adj, which
    is 0. Only the first call reads them."""
    global _host
    if _host is None:
        capabilities = _held_capabilities()
        _host = HostFacts(
            capabilities,
            int(_read("/proc/sys/kernel/cap_last_cap")),
            0,
            _read("/sys/module/apparmor/parameters/enabled")[:1] == b"Y",
            os.path.exists("/sys/fs/selinux/enforce"),
            os.path.exists("/proc/kcore"),
            _clones_detached(capabilities),
            len(os.sched_getaffinity(0)) < (os.cpu_count() or 1),
            in_user_namespace(),
            _read("/proc/self/setgroups").strip() != b"deny",
            _cgroup_root(),
            _cgroup_options(),
        )
    return _host


def _held_capabilities() -> int:
    """Return the capabilities that we can pass on: permitted and in the bounding set."""
    permitted = bounding = 0
    for line in _read("/proc/self/status").splitlines():
        if line.startswith(b"CapPrm:"):
            permitted = int(line[7:], 16)
        elif line.startswith(b"CapBnd:"):
            bounding = int(line[7:], 16)
    # Outside of the bounding set a capability is lost at execve, even if it is permitted now
    # (capabilities(7)).
    return permitted & bounding


def _cgroup_root() -> str:
    try:
        return cgroup.root()
    except Unsupported:
        return ""


def _cgroup_options() -> tuple[str, ...]:
    # All mounts of the v2 tree show one superblock, and the first comes early in the list: a node's
    # other mounts are those of its pods.
    superblocks = (mount.superblock for mount in mount_points() if mount.kind == "cgroup2")
    return tuple(word for word in next(superblocks, ()) if word not in ("rw", "ro"))


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    with closing_fd(descriptor):
        return os.read(descriptor, 8192)


def _clones_detached(capabilities: int) -> bool:
    """Return whether open_tree(2) can clone a detached mount. Linux 6.15 can; on older kernels a
    probe of 130 us detects a backport. False where we may not make mounts."""
    major, minor = os.uname().release.split(".")[:2]
    if major.isdigit() and minor.isdigit() and (int(major), int(minor)) >= DETACHED_SINCE:
        return bool(capabilities >> CAP_SYS_ADMIN & 1)
    tiny = (("nr_blocks", "1"), ("nr_inodes", "1"))
    try:
        with closing_fd(kernel_mount.open_mount("tmpfs", tiny)) as mount:
            os.close(kernel_mount.open_tree(mount, "", OPEN_TREE_CLONE | AT_EMPTY_PATH))
    except KernelError as error:
        if error.errno not in (EPERM, EINVAL):
            raise
        return False
    return True
