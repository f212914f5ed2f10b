"""A Kubernetes node in the guest: what `vagrant/provision.sh` takes is made here, at this machine's speed, and pushed.

Kubernetes comes on a read-only disk, the project as a wheel, images as archives.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.support import images
from tests.support.guest import PROJECT, Guest

GIVEN = "/root/given"
PACKAGES = ("pyrunc", "cri_server", "cni_plugins")


def provision(guest: Guest) -> str:
    """Make the guest a node; returns what the script said. The guest has the disk of `guest_disk.kubernetes()`."""
    with tempfile.TemporaryDirectory() as folder:
        push(guest, {"wheels": wheel(Path(folder)), "images": images.busybox()})
    done = guest.ssh(f"/root/project/vagrant/provision.sh {GIVEN} 2>&1", timeout_s=900)
    return done.stdout.decode(errors="replace")


def push(guest: Guest, files: dict[str, Path]) -> None:
    """Folder under GIVEN -> a file that goes there."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for target, source in files.items():
            archive.add(source, arcname=f"{target}/{source.name}")
    folders = " ".join(f"{GIVEN}/{target}" for target in files)
    guest.ssh(f"rm -rf {folders} && mkdir -p {folders} && tar xf - -C {GIVEN}", stdin=buffer.getvalue())


def wheel(folder: Path) -> Path:
    """The project's wheel in `folder`, built from a copy, so that the checkout gets no build folder."""
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(PROJECT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(PROJECT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "-w", str(folder), str(source)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip wheel: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return next(folder.glob("pyrunc-*.whl"))
