"""SELinux contexts as values: parsed, changed field by field, checked.

A level is `s0`, or `s0:c1,c2` with the categories that keep pods apart (MCS); the kernel's own form
is in security/selinux/ss/mls.c.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from cri_server.api import api_pb2 as api
from pyrunc.errors import InvalidArgument

# Sensitivities, and two categories or ranges of them: what containerd accepts.
LEVEL = re.compile(r"s\d{1,2}(-s\d{1,2})?(:c\d{1,4}(\.c\d{1,4})?(,c\d{1,4}(\.c\d{1,4})?)?)?")
NAME = re.compile(r"[A-Za-z0-9_.-]+")
UNSEPARATED = "s0"
"""The level without categories: its files are everybody's."""


@dataclass(frozen=True, slots=True)
class Context:
    """A context in its four parts."""

    user: str
    role: str
    type: str
    level: str = UNSEPARATED  # empty: the policy has none

    def __str__(self) -> str:
        level = f":{self.level}" if self.level else ""
        return f"{self.user}:{self.role}:{self.type}{level}"

    def at(self, level: str) -> Context:
        """The same at another level."""
        return replace(self, level=level)


def parse(text: str) -> Context | None:
    """A context in its text form; None for what is none."""
    parts = text.strip().split(":", 3)
    if len(parts) < 3 or not all(NAME.fullmatch(part) for part in parts[:3]):
        return None
    return Context(parts[0], parts[1], parts[2], parts[3] if len(parts) == 4 else "")


def check(asked: api.SELinuxOption, where: str = "selinux_options") -> None:
    """Raises InvalidArgument naming the field that is no part of a context."""
    for field in ("user", "role", "type"):
        value = getattr(asked, field)
        if value and not NAME.fullmatch(value):
            raise InvalidArgument(
                f"{where}.{field}: {value[:100]!r} is not a word of an SELinux context"
            )
    if asked.level and not LEVEL.fullmatch(asked.level):
        raise InvalidArgument(
            f"{where}.level: {asked.level[:100]!r} is not a level such as s0 or s0:c1,c2 (two categories or ranges like c1.c5 at most)"
        )


def is_asked(options: api.SELinuxOption) -> bool:
    """Whether any field is set."""
    return bool(options.user or options.role or options.type or options.level)
