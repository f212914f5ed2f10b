"""What the node's policy has for containers: the contexts of `lxc_contexts`, the file that policies
keep for container engines (selinux_lxc_contexts_path(3)), and whether the kernel knows a context.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cri_server.security.selinux.context import UNSEPARATED, Context, parse

CONFIG, FOLDER, FILES = "/etc/selinux/config", "/etc/selinux", "contexts/lxc_contexts"
KERNEL = "/sys/fs/selinux"
PROCESS = Context("system_u", "system_r", "container_t")
FILE = Context("system_u", "object_r", "container_file_t")
PRIVILEGED = "spc_t"
"""The type of privileged containers: unconfined, as container-selinux has it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """`process` and `file` are contexts at the lowest level; `privileged`: the process of a
    privileged container, None where the policy has no type for it, so that it stays in the server's
    domain or goes where the policy sends it."""

    process: Context
    file: Context
    privileged: Context | None
    has_levels: bool = True


def probe(root: Path = Path("/")) -> Policy | None:
    """The policy of the running kernel; None without SELinux."""
    kernel = root / KERNEL.lstrip("/")
    if not (kernel / "enforce").exists():
        return None
    found = _contexts(root)
    has_levels = _text(kernel / "mls") == "1"
    level = UNSEPARATED if has_levels else ""
    process = (parse(found.get("process", "")) or PROCESS).at(level)
    file = (parse(found.get("file", "")) or FILE).at(level)
    privileged = Context(process.user, process.role, PRIVILEGED, level)
    return Policy(process, file, privileged if is_known(privileged, kernel) else None, has_levels)


def is_known(context: Context, kernel: Path = Path(KERNEL)) -> bool:
    """Whether the loaded policy has it: the kernel takes the text in selinuxfs' file `context`, or
    refuses it."""
    try:
        descriptor = os.open(kernel / "context", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(descriptor, str(context).encode() + b"\0")
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _contexts(root: Path) -> dict[str, str]:
    """`name = "context"` lines of the policy that SELINUXTYPE names."""
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
