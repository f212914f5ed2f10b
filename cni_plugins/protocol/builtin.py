"""Which plugins are ours, and how an executable of ours is recognised: by the second line of its script."""

from __future__ import annotations

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


def is_ours(head: bytes) -> bool:
    """Whether an executable that starts with `head` was written by `cni_plugins.install`."""
    lines = head.split(b"\n", 2)
    return len(lines) > 1 and lines[1] == MARK
