"""Builds CRI-O, with which benchmarks compare the server, from its Go module; crun and conmon are
those of Debian 13."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tests.support import debian, toolchain

MODULE, VERSION = "github.com/cri-o/cri-o", "v1.34.0"
SUITE = "trixie"
"""Its crun is 1.21; that of Debian 12, 1.8.1, takes no bundle of CRI-O 1.34 ("unknown version
specified")."""
TAGS = ",".join(
    (
        "containers_image_openpgp",
        "containers_image_ostree_stub",
        "exclude_graphdriver_btrfs",
        "btrfs_noversion",
        "seccomp",
    )
)
FROM_DEBIAN = ("crun", "conmon")


def peer() -> Path:
    """Return the folder with crio, pinns, crun and conmon; building them needs libseccomp's
    headers."""
    out = toolchain.cache() / "peer" / f"crio-{VERSION}-{SUITE}"
    out.mkdir(parents=True, exist_ok=True)
    if not all((out / name).exists() for name in ("crio", "pinns")):
        _build(out)
    if not all((out / name).exists() for name in FROM_DEBIAN):
        _unpack(out)
    return out


def _build(out: Path) -> None:
    """Compile CRI-O and its C program pinns, which pins namespaces."""
    source = toolchain.cache() / "src" / f"crio-{VERSION}"
    source.mkdir(parents=True, exist_ok=True)
    answer = toolchain.run_go(source.parent, "mod", "download", "-json", f"{MODULE}@{VERSION}")
    # In a copy of the module its own go.sum counts. It has checksums of modules that the checksum
    # database does not serve.
    shutil.copytree(
        json.loads(answer)["Dir"], source, dirs_exist_ok=True, copy_function=shutil.copyfile
    )
    toolchain.run_go(source, "build", "-tags", TAGS, "-o", f"{out}/", "./cmd/crio", CGO_ENABLED="1")
    pinns = ["gcc", "-std=c99", "-O3", "-static", "-s", "-o", str(out / "pinns")]
    subprocess.run([*pinns, *map(str, sorted(source.glob("pinns/src/*.c")))], check=True)


def _unpack(out: Path) -> None:
    """Put crun and conmon into `out` with the loader and libraries of the Debian release that they
    come from."""
    system = out / "debian"
    system.mkdir(exist_ok=True)
    layer = debian.unpacked("crun,conmon,patchelf", SUITE)
    subprocess.run(["tar", "-x", "-C", str(system)], input=layer, check=True)
    (loader,) = system.glob("usr/lib/*-linux-gnu/ld-linux-*.so.*")
    libraries = str(loader.parent)
    patchelf = [str(loader), "--library-path", libraries, str(system / "usr/bin/patchelf")]
    for name in FROM_DEBIAN:
        unpacked = out / f"{name}.new"
        unpacked.write_bytes((system / "usr/bin" / name).read_bytes())
        unpacked.chmod(0o755)
        # With the loader as interpreter, /proc/self/exe is crun itself and not the loader.
        change = ["--set-interpreter", str(loader), "--force-rpath", "--set-rpath", libraries]
        subprocess.run([*patchelf, *change, str(unpacked)], check=True)
        unpacked.rename(out / name)
