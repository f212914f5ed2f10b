"""SELinux contexts: parses, changes and checks them.

A level is `s0`, or `s0:c1,c2` with the categories that separate pods (MCS). The kernel writes
levels in the same form (security/selinux/ss/mls.c).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from cri_server.api import api_pb2 as api
from pyrunc.errors import InvalidArgument

# As in containerd: sensitivities, and at most two categories or ranges of categories.
LEVEL = re.compile(r"s\d{1,2}(-s\d{1,2})?(:c\d{1,4}(\.c\d{1,4})?(,c\d{1,4}(\.c\d{1,4})?)?)?")
NAME = re.compile(r"[A-Za-z0-9_.-]+")
BASE_LEVEL = "s0"
"""The level without categories: processes of every level may access files that have this level."""


@dataclass(frozen=True, slots=True)
class SelinuxContext:
    """An SELinux context: user, role, type and level."""

    user: str
    role: str
    type: str
    level: str = BASE_LEVEL  # empty: the policy has none

    def __str__(self) -> str:
        level = f":{self.level}" if self.level else ""
        return f"{self.user}:{self.role}:{self.type}{level}"

    def with_level(self, level: str) -> SelinuxContext:
        """Return a copy of the context with the level `level`."""
        return replace(self, level=level)


def parse(text: str) -> SelinuxContext | None:
    """Parse a context; None for an invalid one."""
    parts = text.strip().split(":", 3)
    if len(parts) < 3 or not all(NAME.fullmatch(part) for part in parts[:3]):
        return None
    return SelinuxContext(parts[0], parts[1], parts[2], parts[3] if len(parts) == 4 else "")


def check(options: api.SELinuxOption) -> None:
    """Raise InvalidArgument if a field is invalid in an SELinux context. The error names the field,
    such as `selinux_options.level`."""
    for field in ("user", "role", "type"):
        value = getattr(options, field)
        if value and not NAME.fullmatch(value):
            raise InvalidArgument(
                f"selinux_options.{field}: {value[:100]!r} is not valid in an SELinux context"
            )
    if options.level and not LEVEL.fullmatch(options.level):
        raise InvalidArgument(
            f"selinux_options.level: {options.level[:100]!r} is not a level such as s0 or s0:c1,c2"
            " (at most two categories or ranges like c1.c5)"
        )


def is_set(options: api.SELinuxOption) -> bool:
    """Return whether the options set any field of a context."""
    return bool(options.user or options.role or options.type or options.level)
