"""The result of a check, and the host that the checks examine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from cri_server.config import Config


class Level(IntEnum):
    """The severity of a result. `NOTE`: information; `WARNING`: some pods fail or are slow;
    `WRONG`: the machine cannot be a node."""

    FINE = 0
    NOTE = 1
    WARNING = 2
    WRONG = 3


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check.

    - `code`: the check's stable name, which `explain` describes.
    - `observation`: the state of the machine.
    - `effect`: the consequence of this state for pods.
    - `remedy`: a command that mends the state, or the setting to change and its file."""

    code: str
    level: Level
    observation: str
    effect: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the object that `doctor --json` prints. Scripts rely on its keys."""
        return {
            "code": self.code,
            "level": self.level.name.lower(),
            "found": self.observation,
            "follows": self.effect,
            "mend": self.remedy,
        }


def fine(code: str, observation: str) -> CheckResult:
    """Return a result without a problem."""
    return CheckResult(code, Level.FINE, observation)


def note(code: str, observation: str, effect: str, remedy: str = "") -> CheckResult:
    """Return a result that only informs."""
    return CheckResult(code, Level.NOTE, observation, effect, remedy)


def warning(code: str, observation: str, effect: str, remedy: str = "") -> CheckResult:
    """Return a result of level WARNING: some pods fail or are slow."""
    return CheckResult(code, Level.WARNING, observation, effect, remedy)


def wrong(code: str, observation: str, effect: str, remedy: str) -> CheckResult:
    """Return a result of level WRONG: the machine cannot be a node."""
    return CheckResult(code, Level.WRONG, observation, effect, remedy)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine and its server's configuration. `top`: the folder that holds the machine's file
    system, `/` except in tests. The methods take absolute paths and look below `top`."""

    config: Config
    top: Path = Path("/")
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def has_systemd(self) -> bool:
        """True if systemd runs on this machine (sd_booted(3))."""
        return self.path("/run/systemd/system").is_dir()

    def service(self, verb: str, unit: str, otherwise: str) -> str:
        """Return the command `systemctl VERB UNIT`; without systemd return the text `otherwise`."""
        return f"systemctl {verb} {unit}" if self.has_systemd else otherwise

    def path(self, path: str | Path) -> Path:
        """Return the absolute path `path` of the machine, below `top`."""
        return self.top / str(path).lstrip("/")

    def text(self, path: str | Path) -> str:
        """Return the content of a file without surrounding spaces; an empty string if it cannot be
        read."""
        try:
            return self.path(path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str | Path) -> int | None:
        """Return the content of a file as an integer; None if the file cannot be read or contains
        anything else."""
        text = self.text(path)
        return int(text) if text.lstrip("-").isdecimal() else None

    def program(self, name: str) -> str:
        """Return the path of an executable, looked up as a shell does; an empty string if there is
        none."""
        # The PATH of a user on Debian has no sbin folders.
        search = self.environment.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
        for folder in filter(None, search.split(":")):
            if os.access(self.path(f"{folder}/{name}"), os.X_OK):
                return f"{folder}/{name}"
        return ""


Check = Callable[[Machine], Iterable[CheckResult]]
