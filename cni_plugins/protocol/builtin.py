"""Writes and recognises the executables of pyrunc's plugins.

An executable is a Python script with a fixed import path. It ignores environment and user site (-I)
and site-packages hooks (-S). The server recognises it by the mark in its second line and runs the
plugin in a worker instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

MODULES = {
    "bridge": "cni_plugins.bridge.plugin",
    "host-local": "cni_plugins.host_local.plugin",
    "loopback": "cni_plugins.loopback.plugin",
    "portmap": "cni_plugins.portmap.plugin",
}
"""The module of each plugin; its `main` runs the plugin."""

MARK = b"# a CNI plugin of pyrunc"
HEAD_BYTES = 512
"""The number of bytes of an executable that `is_builtin_script` needs."""


def script(name: str, python: str, path: Sequence[str]) -> str:
    """Return the text of the executable that runs the plugin `name` with the interpreter `python`
    and the import path `path`."""
    return "\n".join(
        (
            # One word, because the kernel passes all that follows the interpreter as a single
            # argument (execve(2), "Interpreter scripts").
            f"#!{python} -IS",
            MARK.decode(),
            "import sys",
            f"sys.path[:] = {list(path)!r}",
            f"from {MODULES[name]} import main",
            "main()",
            "",
        )
    )


def import_path() -> list[str]:
    """Return the import path that a plugin's executable needs: the folder of this package and this
    interpreter's folders, all absolute."""
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    folders = [package_root, *(p for p in sys.path if p and os.path.isabs(p) and os.path.exists(p))]
    return list(dict.fromkeys(folders))


def is_builtin_script(head: bytes) -> bool:
    """Return whether the file that starts with `head` was written by `script`."""
    lines = head.split(b"\n", 2)
    return len(lines) > 1 and lines[1] == MARK
