"""Builds the features object of runtime-spec features.md, from the tables that the runtime itself
uses.

Nothing is probed and no state is needed, because containerd and CRI-O request the object at their
start, possibly without privileges. Features that this build lacks are reported as off, or left out.
"""

from __future__ import annotations

import pyrunc
from pyrunc.abi.capability import CAPABILITIES
from pyrunc.cgroups.scope_properties import ANNOTATION
from pyrunc.compile.rootfs_probe import KEEP_GROUPS
from pyrunc.errors import Error
from pyrunc.kernel import seccomp
from pyrunc.plan import mounts
from pyrunc.seccomp import profile
from pyrunc.spec import check

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAMESPACES = ("cgroup", "ipc", "mount", "network", "pid", "time", "user", "uts")
HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
BINDS = ("bind", "rbind")
# features.md: engines must not pass these from an untrusted user on, because they change what the
# runtime does.
UNSAFE = ("bundle", ANNOTATION, KEEP_GROUPS)
VERSION_MIN, VERSION_MAX = "1.0.0", "1.3.0"


def features() -> dict[str, Any]:
    """Return the features object, which `pyrunc features` prints."""
    return {
        "ociVersionMin": VERSION_MIN,
        "ociVersionMax": VERSION_MAX,
        "hooks": [*HOOKS],
        "mountOptions": mount_options(),
        "linux": {
            "namespaces": [*NAMESPACES],
            "capabilities": [*CAPABILITIES],
            "cgroup": {"v1": False, "v2": True, "systemd": True, "systemdUser": True, "rdma": True},
            "seccomp": {
                "enabled": True,
                "actions": sorted(profile.ACTIONS),
                "operators": sorted(profile.OPERATORS),
                "archs": sorted(profile.ARCHITECTURES),
                "knownFlags": sorted(profile.FLAGS),
                "supportedFlags": sorted(
                    name for name, flag in profile.FLAGS.items() if seccomp.knows_flag(flag)
                ),
            },
            "apparmor": {"enabled": True},
            "selinux": {"enabled": True},
            "intelRdt": {"enabled": True, "schemata": True, "monitoring": True},
            "memoryPolicy": {
                "modes": sorted(check.MEMORY_MODES),
                "flags": sorted(check.MEMORY_FLAGS),
            },
            "mountExtensions": {"idmap": {"enabled": True}},
            "netDevices": {"enabled": True},
        },
        "annotations": _versions(),
        "potentiallyUnsafeConfigAnnotations": [*UNSAFE],
    }


def mount_options() -> list[str]:
    """Return all supported mount options, sorted, without options of a single filesystem type."""
    single = {
        *mounts.ATTRIBUTES,
        *mounts.PROPAGATION,
        *mounts.SUPERBLOCK,
        *mounts.IGNORED,
        *mounts.EXTENSIONS,
        *BINDS,
    }
    return sorted(single | {f"r{name}" for name in mounts.ATTRIBUTES})


def _versions() -> dict[str, str]:
    # The name that runc uses, for engines that check it before they offer checkpoints.
    versions = {
        "pyrunc.version": pyrunc.__version__,
        "org.opencontainers.runc.checkpoint.enabled": "true",
    }
    try:
        versions["io.github.seccomp.libseccomp.version"] = seccomp.version()
    except Error:
        pass
    return versions
