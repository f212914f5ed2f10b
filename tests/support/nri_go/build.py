"""Builds an NRI plugin in Go with two versions of NRI's module: the newest one, and the one before
it, which knows fewer calls."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from tests.support import toolchain

SOURCE = Path(__file__).parent / "main.go"
MODULE = "github.com/containerd/nri"
NEW, OLD = "v0.12.3", "v0.11.0"


def plugin(version: str) -> Path:
    """Return the path of the Go plugin with this version of NRI's module."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    program = toolchain.cache() / "nri" / f"{version}-{digest}" / "plugin"
    if not program.exists():
        source = toolchain.cache() / "src" / f"nri-{version}"
        source.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCE, source)
        language = ".".join(str(part) for part in toolchain.GO_AT_LEAST)
        (source / "go.mod").write_text(f"module nriplugin\n\ngo {language}.0\n")
        toolchain.run_go(source, "get", f"{MODULE}@{version}")
        toolchain.run_go(source, "mod", "tidy")
        program.parent.mkdir(parents=True, exist_ok=True)
        toolchain.run_go(source, "build", "-o", str(program), ".", CGO_ENABLED="0")
    return program


def both() -> list[Path]:
    """Return the paths of the Go plugin on the newest version of NRI's module and on the one before
    it."""
    return [plugin(version) for version in (NEW, OLD)]
