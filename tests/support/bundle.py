"""OCI bundles for tests: a busybox root filesystem and a configuration to change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.processes import installed

CAPABILITIES = ["CAP_AUDIT_WRITE", "CAP_KILL", "CAP_NET_BIND_SERVICE"]
DEFAULT_DENY = [{"allow": False, "access": "rwm"}]


def make_root(folder: Path) -> Path:
    """Make a root filesystem with busybox and its applets."""
    binaries = folder / "bin"
    binaries.mkdir(parents=True)
    for name in ("proc", "sys", "dev", "etc", "tmp", "root"):
        (folder / name).mkdir(exist_ok=True)
    shutil.copy(shutil.which("busybox") or "/bin/busybox", binaries / "busybox")
    listing = subprocess.run(
        [str(binaries / "busybox"), "--list"], capture_output=True, text=True, check=True
    ).stdout
    for applet in listing.split():
        if applet != "busybox":
            (binaries / applet).symlink_to("busybox")
    (folder / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/tmp:/bin/sh\n"
    )
    (folder / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    return folder


def configuration(*arguments: str, **linux: Any) -> dict[str, Any]:
    """Return a configuration like that of `pyrunc spec`, without a terminal; `linux` is added to
    its `linux` object."""
    kinds = ("pid", "network", "ipc", "uts", "mount", "cgroup")
    return {
        "ociVersion": "1.2.0",
        "process": {
            "terminal": False, "user": {"uid": 0, "gid": 0}, "args": list(arguments), "cwd": "/",
            "noNewPrivileges": True,
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "TERM=xterm"],
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
        },
        "root": {"path": "rootfs", "readonly": False},
        "hostname": "bundle",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid",
            "strictatime", "mode=755", "size=65536k"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
             "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid",
            "noexec", "nodev", "mode=1777", "size=65536k"]},
            {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue",
            "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid",
            "noexec", "nodev", "ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup",
            "options": ["nosuid", "noexec", "nodev", "relatime", "ro"]},
        ],
        "linux": {"namespaces": [{"type": k} for k in kinds],
        "resources": {"devices": DEFAULT_DENY}, **linux},
    }  # fmt: skip


def make(folder: Path, config: dict[str, Any]) -> Path:
    """Make a bundle in `folder` with a root filesystem and `config`."""
    make_root(folder / "rootfs")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def runtime() -> list[str]:
    """Return the command line of the runtime under test: PYRUNC_RUNTIME, or the `pyrunc` beside
    this interpreter."""
    named = os.environ.get("PYRUNC_RUNTIME")
    return named.split() if named else installed("pyrunc")
