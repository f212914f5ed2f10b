"""Makes a guest a Kubernetes node by `vagrant/provision.sh`. The script's input is made on the
host, at its speed, and copied: the project as a wheel, images as archives. Kubernetes comes on a
read-only disk."""

from __future__ import annotations

import io
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support import images
from tests.support.guest import PROJECT, Guest

INPUT = "/root/given"
PACKAGES = ("pyrunc", "cri_server", "cni_plugins")


def provision(
    guest: Guest,
    *,
    settings: Mapping[str, str] | None = None,
    authority: Path | None = None,
    timeout_s: float = 900,
) -> str:
    """Make the guest a node; return the script's output. The guest must have the disk of
    `guest_disk.kubernetes()`.

    - `settings`: the script's variables.
    - `authority`: a folder with ca.crt and ca.key, which sign the guest's certificates.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {"wheels": [wheel(Path(folder))], "images": [images.busybox()]}
        if authority is not None:
            files["pki"] = [authority / "ca.crt", authority / "ca.key"]
        push(guest, files)
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in (settings or {}).items())
    command = f"{variables} /root/project/vagrant/provision.sh {INPUT} 2>&1"
    return guest.ssh(command, timeout_s=timeout_s).stdout.decode(errors="replace")


def push(guest: Guest, files: Mapping[str, list[Path]]) -> None:
    """Copy files to the guest; `files` maps a folder under INPUT to the files that go there."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for target, sources in files.items():
            for source in sources:
                archive.add(source, arcname=f"{target}/{source.name}")
    folders = " ".join(f"{INPUT}/{target}" for target in files)
    guest.ssh(
        f"rm -rf {folders} && mkdir -p {folders} && tar xf - -C {INPUT}", stdin=buffer.getvalue()
    )


def wheel(folder: Path) -> Path:
    """Build the project's wheel in `folder`; return its path."""
    source = folder / "source"
    # Built from a copy, so that the checkout gets no build folder.
    for package in PACKAGES:
        shutil.copytree(
            PROJECT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "-w",
        str(folder),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip wheel: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return next(folder.glob("pyrunc-*.whl"))
