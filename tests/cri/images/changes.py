"""Calls a function before each change to a file that this process makes through `os`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_CHANGES = (
    "mkdir", "mknod", "rename", "unlink", "rmdir", "link", "symlink", "write", "pwrite",
    "ftruncate", "fsync", "chmod", "fchmod", "chown", "fchown", "utime", "setxattr",
)  # fmt: skip


def before_each_change(notify: Callable[[], None]) -> None:
    """Call `notify` before each such change, in every thread of this process."""

    def wrapped(change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            notify()
            return change(*arguments, **options)

        return run

    for name in _CHANGES:
        setattr(os, name, wrapped(getattr(os, name)))
