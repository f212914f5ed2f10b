"""Findings, and the host that they are about."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path

from cri_server.config import Config


class Level(IntEnum):
    """How bad it is. `NOTE`: good to know; `WARNING`: some pods fail or are slow; `WRONG`: this is
    no node yet."""

    FINE = 0
    NOTE = 1
    WARNING = 2
    WRONG = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `code` is its stable name, which `explain` knows; `found` what
    is there; `follows` what that means for pods; `mend` a command or what to write where."""

    code: str
    level: Level
    found: str
    follows: str = ""
    mend: str = ""

    def to_json(self) -> dict[str, str]:
        return {**asdict(self), "level": self.level.name.lower()}


def fine(code: str, found: str) -> Finding:
    """Nothing is wrong there."""
    return Finding(code, Level.FINE, found)


@dataclass(frozen=True, slots=True)
class Host:
    """A machine and the server's configuration on it. `top` is where its file system begins, `/`
    unless a test says otherwise; paths are given as the machine has them."""

    config: Config
    top: Path = Path("/")
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def has_systemd(self) -> bool:
        """Whether systemd runs this machine (sd_booted(3))."""
        return self.path("/run/systemd/system").is_dir()

    def service(self, verb: str, unit: str, otherwise: str) -> str:
        """The command that starts or restarts a unit, or, where no systemd runs, what does it."""
        return f"systemctl {verb} {unit}" if self.has_systemd else otherwise

    def path(self, path: str | Path) -> Path:
        """Where we find `path`."""
        return self.top / str(path).lstrip("/")

    def text(self, path: str | Path) -> str:
        """The content without surrounding blanks; empty for what cannot be read."""
        try:
            return self.path(path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str | Path) -> int | None:
        """The number in a file of one number."""
        text = self.text(path)
        return int(text) if text.lstrip("-").isdecimal() else None

    def program(self, name: str) -> str:
        """The path of an executable, as a shell finds it; empty when there is none."""
        search = self.environment.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
        for folder in filter(None, search.split(":")):
            if os.access(self.path(f"{folder}/{name}"), os.X_OK):
                return f"{folder}/{name}"
        return ""


Check = Callable[[Host], Iterable[Finding]]
