"""Makes read-only disks, by which big files reach a guest faster than by ssh under emulation.

A disk is a named ext4 image in the cache folder, made by `mke2fs -d` without mounting anything. It
is made again only if paths, sizes or times of change of its files differ.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support import toolchain
from tests.support.flannel import programs as flannel_programs

CONTROL_PLANE = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kubectl",
)
SPARE_BYTES = 32 << 20


def kubernetes() -> Path:
    """Return the disk with Kubernetes' programs."""
    folder = toolchain.kubernetes()
    return of_files("kubernetes", {name: folder / name for name in CONTROL_PLANE})


def kubelet_arm64() -> Path:
    """Return the disk with arm64's kubelet."""
    return of_files("kubelet", {"kubelet": toolchain.kubelet("arm64")})


def flannel() -> Path:
    """Return the disk with flannel's daemon and plugin."""
    folder = flannel_programs()
    return of_files("flannel", {name: folder / name for name in ("flanneld", "flannel")})


def kubeadm() -> Path:
    """Return the disk with kubeadm."""
    return of_files("kubeadm", {"kubeadm": toolchain.kubeadm()})


def containerd() -> Path:
    """Return the disk with containerd, ctr, its shim and runc in bin/, and the reference CNI
    plugins in cni/."""
    folder = toolchain.peer()
    files = [file for part in ("bin", "cni") for file in (folder / part).iterdir()]
    return of_files("containerd", {str(file.relative_to(folder)): file for file in files})


def of_files(name: str, files: Mapping[str, Path]) -> Path:
    """Return the disk called `name` with `files` (path on the disk -> file here)."""
    facts = [(target, str(source), source.stat()) for target, source in sorted(files.items())]
    key = hashlib.sha256(
        repr([(t, s, f.st_size, f.st_mtime_ns) for t, s, f in facts]).encode()
    ).hexdigest()
    disk = toolchain.cache() / "vm" / f"{name}-{key[:12]}.img"
    if disk.exists():
        return disk
    for old in disk.parent.glob(f"{name}-*.img"):
        old.unlink()
    work = disk.with_suffix(f".{os.getpid()}")
    try:
        for target, source in files.items():
            (work / "files" / target).parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(source, work / "files" / target)
        with open(work / "disk", "wb") as image:
            image.truncate(sum(f.st_size for _, _, f in facts) * 17 // 16 + SPARE_BYTES)
        command = [
            "mke2fs",
            "-q",
            "-t",
            "ext4",
            "-O",
            "^has_journal",
            "-m",
            "0",
            "-L",
            name[:16],
            "-d",
            str(work / "files"),
            str(work / "disk"),
        ]
        subprocess.run(command, check=True, capture_output=True)
        (work / "disk").rename(disk)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return disk


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
