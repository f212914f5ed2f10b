"""Builds the Go client for streaming URLs into the cache folder, once for each version of its
sources."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.support import toolchain

SOURCE = Path(__file__).parent


def goclient() -> Path:
    """Return the path of the Go client, which the first call builds."""
    sources = b"".join((SOURCE / name).read_bytes() for name in ("main.go", "go.mod", "go.sum"))
    program = toolchain.cache() / "goclient" / hashlib.sha256(sources).hexdigest()[:16] / "goclient"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        toolchain.run_go(
            SOURCE, "build", "-o", str(program), ".", GOFLAGS="-mod=readonly", CGO_ENABLED="0"
        )
    return program
