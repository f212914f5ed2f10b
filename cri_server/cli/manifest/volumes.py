"""Prepares a pod's volumes on the host: hostPath by the rules of its type, emptyDir in the pod's
folder, and subPaths of both.

Each subPath is opened with RESOLVE_BENEATH (openat2(2)), which fails if the path leaves the volume:
a container may have put a symbolic link there that leads to a file of the host (CVE-2017-1002101,
CVE-2021-25741).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from cri_server.cli.manifest import pod_model
from pyrunc.errors import KernelError, NotFound, WrongState, kernel_errors
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.path import open_beneath

# hostPath.type, without `OrCreate` -> test of the file's mode, and the kind's name in errors
KINDS: dict[str, tuple[Callable[[int], bool], str]] = {
    "Directory": (stat.S_ISDIR, "directory"),
    "File": (stat.S_ISREG, "regular file"),
    "Socket": (stat.S_ISSOCK, "socket"),
    "CharDevice": (stat.S_ISCHR, "character device"),
    "BlockDevice": (stat.S_ISBLK, "block device"),
}


def prepare(pod: pod_model.PodManifest, folder: Path) -> None:
    """Check the volumes of a pod that is about to start, and create the missing ones. Raises
    KernelError, NotFound if a hostPath does not exist, and WrongState if it has the wrong type."""
    for i, volume in enumerate(pod.spec.volumes):
        if volume.files is not None:
            _make_files(_empty(volume, folder), volume.files, pod.spec.security_context.fs_group)
        elif volume.host_path is None:
            _make_empty(_empty(volume, folder), pod.spec.security_context.fs_group)
        elif volume.host_path.type:
            _check_host_path(volume.host_path, f"spec.volumes[{i}].hostPath")


def source(volume: pod_model.Volume, sub_path: str, folder: Path) -> str:
    """Return the host path that a container mounts. Creates a missing subPath as a directory with
    the volume's mode.

    Raises KernelError, and WrongState if the subPath leaves the volume through a symbolic link."""
    base = Path(volume.host_path.path) if volume.host_path is not None else _empty(volume, folder)
    if not sub_path:
        return str(base)
    with closing_fd(_open(base)) as root:
        _make_beneath(root, sub_path)
        with closing_fd(_open_beneath(root, sub_path)) as target:
            # CRI takes a path, which a container could replace by a link meanwhile;
            # `containers.sources` compares it afterwards with what the server has mounted.
            return os.readlink(f"/proc/self/fd/{target}")


def _empty(volume: pod_model.Volume, folder: Path) -> Path:
    return folder / "volumes" / volume.name


def _make_empty(path: Path, group: int | None) -> None:
    """Create an emptyDir with kubelet's mode, which lets everyone write. `group`: the fsGroup; new
    files in the emptyDir get this group."""
    path.mkdir(parents=True)
    if group is not None:
        os.chown(path, -1, group)
    path.chmod(0o777 if group is None else 0o2777)


def _make_files(path: Path, files: list[pod_model.VolumeFile], group: int | None) -> None:
    """Write the files of a ConfigMap or Secret. `group`: the fsGroup, which gets read access, as in
    kubelet."""
    path.mkdir(parents=True)
    path.chmod(0o755)  # mkdir's mode would be reduced by the umask
    for file in files:
        place = path / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.content)
        if group is not None:
            os.chown(place, -1, group)
        place.chmod(file.mode if group is None else file.mode | 0o440)


def _check_host_path(volume: pod_model.HostPath, where: str) -> None:
    matches, name = KINDS[volume.type.removesuffix("OrCreate")]
    try:
        mode = os.stat(volume.path).st_mode
    except FileNotFoundError:
        if not volume.type.endswith("OrCreate"):
            raise NotFound(
                f"{where}: {volume.path!r} does not exist; type {volume.type} requires it"
            ) from None
        return _create(volume)
    except OSError as error:
        raise KernelError.of(error, "stat", repr(volume.path)) from None
    if not matches(mode):
        raise WrongState(f"{where}: {volume.path!r} is not a {name}")


def _create(volume: pod_model.HostPath) -> None:
    """Create what a hostPath requires, unless it exists: the folder of a DirectoryOrCreate (mode
    0755, with missing parents), or the file of a FileOrCreate (mode 0644), as kubelet does. Raises
    KernelError."""
    before = os.umask(0o022)
    try:
        if volume.type == "DirectoryOrCreate":
            os.makedirs(volume.path, 0o755, exist_ok=True)
        else:
            os.close(os.open(volume.path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    except OSError as error:
        raise KernelError.of(error, "create", repr(volume.path)) from None
    finally:
        os.umask(before)


def _make_beneath(root: int, sub_path: str) -> None:
    """Create the missing folders of `sub_path` below the volume `root`, with the volume's mode."""
    mode = stat.S_IMODE(os.fstat(root).st_mode)
    names = [name for name in sub_path.split("/") if name]
    for depth, name in enumerate(names):
        with closing_fd(_open_beneath(root, "/".join((".", *names[:depth])))) as parent:
            _make_folder(parent, name, mode)


def _make_folder(parent: int, name: str, mode: int) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        return
    except OSError as error:
        raise KernelError.of(error, "mkdir", repr(name)) from None
    with closing_fd(open_beneath(parent, name)) as created:
        os.chmod(f"/proc/self/fd/{created}", mode)


def _open(path: Path) -> int:
    with kernel_errors("open", repr(str(path))):
        # O_PATH: the volume may be a socket, which open(2) refuses, or a pipe, on which it waits.
        return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _open_beneath(root: int, path: str) -> int:
    try:
        return open_beneath(root, path, links=True)
    except KernelError as error:
        if error.errno in (errno.EXDEV, errno.ELOOP):
            raise WrongState(
                f"subPath {path.removeprefix('./')!r} leaves its volume through a symbolic link"
            ) from None
        raise
