"""Which plugins are ours, what an executable of ours looks like, and how it is recognised: by its
second line.

An executable is a script for an isolated interpreter (-I: no environment, no user site; -S: no
site-packages hooks) whose import path is fixed when it is written. The mark tells it from foreign
ones: our server need not run what it has built in.
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
"""The plugin's name and the module whose `main` is the plugin."""

MARK = b"# a CNI plugin of pyrunc"
HEAD_BYTES = 512
"""How much of an executable `is_ours` wants to see."""


def script(name: str, python: str, path: Sequence[str]) -> str:
    """The executable `name` for the interpreter `python` with the import path `path`."""
    return "\n".join(
        (
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
    """This interpreter's standard library and site-packages, and the folder that holds this
    package; absolute."""
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    found = [own, *(p for p in sys.path if p and os.path.isabs(p) and os.path.exists(p))]
    return list(dict.fromkeys(found))


def is_ours(head: bytes) -> bool:
    """Whether an executable that starts with `head` is a `script`."""
    lines = head.split(b"\n", 2)
    return len(lines) > 1 and lines[1] == MARK
