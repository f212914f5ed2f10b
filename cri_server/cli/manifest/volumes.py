"""A pod's volumes on the host: hostPath by the rules of its type, emptyDir in the pod's folder,
subPath beneath either.

The content of a volume is the containers', and a link in it may point anywhere: a subPath is
resolved by the kernel, which refuses to leave the volume (CVE-2017-1002101, CVE-2021-25741).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from cri_server.cli.manifest import pod_model
from pyrunc.errors import KernelError, NotFound, WrongState, kernel_errors
from pyrunc.kernel.path import open_beneath

# hostPath.type -> what must be there, and its name for people. `OrCreate` makes what is missing.
KINDS: dict[str, tuple[Callable[[int], bool], str]] = {
    "DirectoryOrCreate": (stat.S_ISDIR, "directory"),
    "Directory": (stat.S_ISDIR, "directory"),
    "FileOrCreate": (stat.S_ISREG, "regular file"),
    "File": (stat.S_ISREG, "regular file"),
    "Socket": (stat.S_ISSOCK, "socket"),
    "CharDevice": (stat.S_ISCHR, "character device"),
    "BlockDevice": (stat.S_ISBLK, "block device"),
}


def prepare(pod: pod_model.Pod, folder: Path) -> None:
    """Check and make the pod's volumes before anything runs. Raises NotFound, WrongState,
    KernelError."""
    for i, volume in enumerate(pod.spec.volumes):
        if volume.files is not None:
            _make_files(_empty(volume, folder), volume.files, pod.spec.security_context.fs_group)
        elif volume.host_path is None:
            _make_empty(_empty(volume, folder), pod.spec.security_context.fs_group)
        elif volume.host_path.type:
            _check_host_path(volume.host_path, f"spec.volumes[{i}].hostPath")


def source(volume: pod_model.Volume, sub_path: str, folder: Path) -> str:
    """The host path to mount; a missing subPath becomes a directory with the volume's mode.

    Raises WrongState for a subPath that leaves the volume over a link, KernelError.
    """
    base = Path(volume.host_path.path) if volume.host_path is not None else _empty(volume, folder)
    if not sub_path:
        return str(base)
    root = _open(base)
    try:
        _make_beneath(root, sub_path)
        found = _open_beneath(root, sub_path)
        try:
            return os.readlink(f"/proc/self/fd/{found}")
        finally:
            os.close(found)
    finally:
        os.close(root)


def _empty(volume: pod_model.Volume, folder: Path) -> Path:
    return folder / "volumes" / volume.name


def _make_empty(path: Path, group: int | None) -> None:
    """As kubelet's: everybody may write; with an fsGroup what is made in it belongs to that."""
    path.mkdir(parents=True)
    if group is not None:
        os.chown(path, -1, group)
    path.chmod(0o777 if group is None else 0o2777)


def _make_files(path: Path, files: list[pod_model.File], group: int | None) -> None:
    """A ConfigMap's or a Secret's; with an fsGroup that group may read them, as kubelet has it."""
    path.mkdir(parents=True)
    path.chmod(0o755)
    for file in files:
        place = path / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.content)
        if group is not None:
            os.chown(place, -1, group)
        place.chmod(file.mode if group is None else file.mode | 0o440)


def _check_host_path(asked: pod_model.HostPath, where: str) -> None:
    matches, name = KINDS[asked.type]
    try:
        mode = os.stat(asked.path).st_mode
    except FileNotFoundError:
        if not asked.type.endswith("OrCreate"):
            raise NotFound(
                f"{where}: {asked.path!r} does not exist, its type is {asked.type}"
            ) from None
        return _create(asked)
    except OSError as error:
        raise KernelError.of(error, "stat", repr(asked.path)) from None
    if not matches(mode):
        raise WrongState(f"{where}: {asked.path!r} is not a {name}")


def _create(asked: pod_model.HostPath) -> None:
    """kubelet's modes, 0755 and 0644; the folder of a file must be there."""
    before = os.umask(0o022)
    try:
        if asked.type == "DirectoryOrCreate":
            os.makedirs(asked.path, 0o755, exist_ok=True)
        else:
            os.close(os.open(asked.path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    except OSError as error:
        raise KernelError.of(error, "create", repr(asked.path)) from None
    finally:
        os.umask(before)


def _make_beneath(root: int, sub_path: str) -> None:
    """What is missing of the path, level by level, with the mode of the volume."""
    mode = stat.S_IMODE(os.fstat(root).st_mode)
    names = [name for name in sub_path.split("/") if name]
    for depth, name in enumerate(names):
        parent = _open_beneath(root, "/".join((".", *names[:depth])))
        try:
            _make_folder(parent, name, mode)
        finally:
            os.close(parent)


def _make_folder(parent: int, name: str, mode: int) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        return
    except OSError as error:
        raise KernelError.of(error, "mkdir", repr(name)) from None
    made = open_beneath(parent, name)
    try:
        os.chmod(f"/proc/self/fd/{made}", mode)
    finally:
        os.close(made)


def _open(path: Path) -> int:
    with kernel_errors("open", repr(str(path))):
        return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _open_beneath(root: int, path: str) -> int:
    try:
        return open_beneath(root, path, links=True)
    except KernelError as error:
        if error.errno in (errno.EXDEV, errno.ELOOP):
            raise WrongState(
                f"subPath {path.removeprefix('./')!r} leaves its volume over a link"
            ) from None
        raise
