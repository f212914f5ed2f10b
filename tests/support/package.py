"""Builds the Debian package of this tree, also under another version."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

PROJECT = Path(__file__).parents[2]


@functools.cache
def build() -> Path:
    """Run `make deb` for this machine's Debian; return the package's file."""
    for old in (PROJECT / "dist").glob("*.deb"):
        old.unlink()
    done = subprocess.run(
        ["make", "-C", PROJECT, "deb-here"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"make deb: exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
    (built,) = (PROJECT / "dist").glob("*.deb")
    return built


def field(package: Path, name: str) -> str:
    """Return a field of the package's control file."""
    return subprocess.run(
        ["dpkg-deb", "-f", package, name], capture_output=True, text=True, check=True
    ).stdout.strip()


def as_version(package: Path, version: str, folder: Path) -> Path:
    """Make a copy of the package in `folder`, with another version in its control file and code;
    return its path."""
    tree, out = folder / version, folder / f"pyrunc_{version}.deb"
    subprocess.run(["dpkg-deb", "-R", package, tree], check=True)
    control, code = tree / "DEBIAN/control", tree / "usr/lib/pyrunc/pyrunc/__init__.py"
    control.write_text(control.read_text().replace(field(package, "Version"), version))
    lines = code.read_text().splitlines()
    code.write_text(
        "\n".join(
            f'__version__ = "{version}"' if line.startswith("__version__") else line
            for line in lines
        )
    )
    # Bytecode of the other version, never compared with its source; the package's interpreter may
    # differ from ours.
    for compiled in code.parent.glob("__pycache__/__init__.*.pyc"):
        compiled.unlink()
    subprocess.run(
        ["dpkg-deb", "-b", "-Zzstd", "-z1", "--root-owner-group", tree, out],
        check=True,
        capture_output=True,
    )
    return out
