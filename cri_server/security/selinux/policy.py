"""Reads the node's SELinux policy for containers. The contexts come from `lxc_contexts`, the
policy's file for container engines (selinux_lxc_contexts_path(3)); the kernel tells which contexts
it accepts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cri_server.security.selinux.context import BASE_LEVEL, SelinuxContext, parse
from pyrunc.kernel.fd import closing_fd

CONFIG, FOLDER, FILES = "/etc/selinux/config", "/etc/selinux", "contexts/lxc_contexts"
KERNEL = "/sys/fs/selinux"
PROCESS = SelinuxContext("system_u", "system_r", "container_t")
FILE = SelinuxContext("system_u", "object_r", "container_file_t")
PRIVILEGED = "spc_t"
"""The type of privileged containers: unconfined, as in container-selinux."""


@dataclass(frozen=True, slots=True)
class SelinuxPolicy:
    """The node's SELinux contexts for containers, without categories.

    - `process`: the context of a container's process.
    - `file`: the context of a container's files.
    - `privileged`: the context of a privileged container's process; None if the policy does not
      have the type spc_t.
    """

    process: SelinuxContext
    file: SelinuxContext
    privileged: SelinuxContext | None
    has_levels: bool = True


def probe(root: Path = Path("/")) -> SelinuxPolicy | None:
    """Read the policy of the running kernel; return None without SELinux."""
    kernel = root / KERNEL.lstrip("/")
    if not (kernel / "enforce").exists():
        return None
    contexts = _contexts(root)
    has_levels = _text(kernel / "mls") == "1"
    level = BASE_LEVEL if has_levels else ""
    process = (parse(contexts.get("process", "")) or PROCESS).with_level(level)
    file = (parse(contexts.get("file", "")) or FILE).with_level(level)
    # Without spc_t a privileged process stays in the server's domain, or follows the policy's
    # transitions.
    privileged = SelinuxContext(process.user, process.role, PRIVILEGED, level)
    return SelinuxPolicy(
        process, file, privileged if is_known(privileged, kernel) else None, has_levels
    )


def is_known(context: SelinuxContext, kernel: Path = Path(KERNEL)) -> bool:
    """Return whether the loaded policy accepts the context. Asks the kernel through selinuxfs."""
    try:
        with closing_fd(os.open(kernel / "context", os.O_RDWR | os.O_CLOEXEC)) as descriptor:
            os.write(descriptor, str(context).encode() + b"\0")
        return True
    except OSError:
        return False


def _contexts(root: Path) -> dict[str, str]:
    """Read the file `lxc_contexts` of the policy that SELINUXTYPE selects; return the contexts by
    name."""
    kind = _settings(root / CONFIG.lstrip("/")).get("SELINUXTYPE", "targeted")
    return _settings(root / FOLDER.lstrip("/") / kind / FILES)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _settings(path: Path) -> dict[str, str]:
    lines = _text(path).splitlines()
    pairs = (
        line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith("#")
    )
    return {name.strip(): value.strip().strip('"') for name, _, value in pairs}
