"""Reads the settings of a systemd unit from its unit file and its drop-ins on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Earlier folders take precedence (systemd.unit(5)).
FOLDERS = (
    "etc/systemd/system",
    "run/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
)


def unit_files(root: Path, unit: str) -> list[Path]:
    """Return the paths of the unit's files below the root directory `root`, in the order in which
    systemd reads them. The unit file is first, if it exists; the drop-ins follow by name."""
    files = [root / folder / unit for folder in FOLDERS]
    # If several files have the same name, the one in the folder with the highest precedence counts.
    drop_ins: dict[str, Path] = {}
    for folder in reversed(FOLDERS):
        drop_ins |= {path.name: path for path in (root / folder / f"{unit}.d").glob("*.conf")}
    return [file for file in files if file.is_file()][:1] + [
        drop_ins[name] for name in sorted(drop_ins)
    ]


def service_settings(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, value) for each assignment in the section [Service] of a unit file. A byte that
    is not UTF-8 becomes U+FFFD. Raises OSError."""
    section = ""
    for line in _joined_lines(file.read_text(encoding="utf-8", errors="replace")):
        if line.startswith("["):
            section = line
        elif section == "[Service]":
            key, equals, value = line.partition("=")
            if equals:
                yield key.rstrip(), value.strip()


def _joined_lines(text: str) -> Iterator[str]:
    """Yield the lines of a unit file, without comments and with continued lines joined. A comment
    may be between two continued lines, and is never continued itself (systemd.syntax(7))."""
    parts: list[str] = []
    for line in text.split("\n"):
        if line.lstrip().startswith(("#", ";")):
            continue
        # Two backslashes at the end are an escaped one.
        continued = (len(line) - len(line.rstrip("\\"))) % 2
        parts.append((line[:-1] if continued else line).strip())
        if not continued:
            yield " ".join(parts).strip()
            parts = []
    if parts:
        yield " ".join(parts).strip()
