"""An unpatched static busybox, built once into the cache folder.

Debian's busybox drops environment variables whose names no shell accepts, such as `data-1`.
Kubernetes' tests set such variables.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from tests.support import debian, toolchain

# Needs constants that newer kernel headers no longer have.
LEFT_OUT = ("TC",)


def program() -> Path:
    """Return the path of busybox, which the first call builds; its version is that of the machine's
    Debian."""
    out = toolchain.cache() / "busybox" / debian.suite() / "busybox"
    if not out.exists():
        work = out.parent.with_name(f"{out.parent.name}.{os.getpid()}")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        built = _build(_source(work))
        out.parent.mkdir(exist_ok=True)
        built.rename(out)
        shutil.rmtree(work)
    return out


def _source(work: Path) -> Path:
    with tarfile.open(debian.upstream_source("busybox", work)) as tarball:
        tarball.extractall(work)
    (source,) = (path for path in work.glob("busybox-*") if path.is_dir())
    return source


def _build(source: Path) -> Path:
    """Build the default configuration without the applets LEFT_OUT, as a static program."""
    _make(source, "defconfig")
    config = (
        (source / ".config").read_text().replace("# CONFIG_STATIC is not set", "CONFIG_STATIC=y")
    )
    for name in LEFT_OUT:
        config = re.sub(
            rf"^CONFIG_{name}=y$", f"# CONFIG_{name} is not set", config, flags=re.MULTILINE
        )
    (source / ".config").write_text(config)
    _make(source, "oldconfig")
    _make(source, f"-j{os.cpu_count()}", "busybox")
    return source / "busybox"


def _make(source: Path, *words: str) -> None:
    """Run make in the folder `source`."""
    # Line ends accept the proposed answers to new questions of `oldconfig`.
    done = subprocess.run(
        ["make", *words], cwd=source, input="\n" * 200, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(
            f"make {' '.join(words)} of busybox: exit code "
            f"{done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )


if __name__ == "__main__":
    print(program())
