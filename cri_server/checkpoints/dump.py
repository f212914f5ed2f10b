"""The jobs that make a checkpoint: dump a frozen container with CRIU, copy its writable layer, and
pack the archive.

Each job runs in a separate process. A file system that does not answer blocks only that process.
"""

from __future__ import annotations

import json
import os
import stat
import tarfile
from collections.abc import Mapping
from typing import Any

from cri_server.checkpoints import layer, names
from cri_server.checkpoints.dump_requests import Pack, TakeDump, WriteTree
from cri_server.checkpoints.options import OPTIONS
from pyrunc import atomic_file
from pyrunc.checkpoint.checkpoint import CriuOptions, DumpOptions, checkpoint
from pyrunc.compile.descriptors import NamedDescriptors
from pyrunc.compile.image_mount import open_image
from pyrunc.compile.requests import Overlay
from pyrunc.compile.sources import open_overlay
from pyrunc.container import state as states
from pyrunc.errors import Unsupported
from pyrunc.kernel.full import disk_errors
from pyrunc.shim.files import LaunchFile
from pyrunc.spec.model import Linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message


def dump(arguments: Message, fds: list[int]) -> int:
    """Job: write CRIU's dump files, the writable layer and `spec.dump` of a frozen container to the
    folder `TakeDump.work`. The container stays frozen. `arguments`: a `TakeDump`. `fds`: for each
    container image in `TakeDump.images`, in the same order, a descriptor of its mount. Raises
    Error."""
    request = TakeDump.of(arguments)
    directory, work = request.directory, request.work
    mounts = dict(zip(request.images, fds, strict=True))
    with disk_errors("checkpoint", work):
        document = atomic_file.read_json(f"{directory}/{states.CONFIG}")
        launch = LaunchFile.read(directory)
        root, _, container = directory.rpartition("/")
        state = states.find(root, container)
        # CRIU's images are the container's memory, with its secrets.
        os.mkdir(f"{work}/{names.IMAGES}", 0o700)
        options = CriuOptions(image_path=f"{work}/{names.IMAGES}", work_path=work, **OPTIONS)
        # By default CRIU kills the processes that it has dumped (criu(8), --leave-running).
        checkpoint(state, options, DumpOptions(leave_running=True))
        binds = list(_binds(document))
        removed = layer.write(
            request.upper,
            f"{work}/{names.LAYER}",
            lambda: _open_lower(launch.rootfs, mounts),
            [bind["destination"] for bind in binds],
            request.volumes,
        )
        _write(work, names.DELETED, removed)
        _write(work, names.BIND_MOUNTS, binds)
        _write(work, names.SPEC, document)
    return 0


def pack(arguments: Message, fds: list[int]) -> int:
    """Job: pack the content of the folder `work` into the new file `target`, and sync `target` to
    disk. The arguments are a `Pack`. On an error, removes `target` and raises Error."""
    request = Pack.of(arguments)
    work, target = request.work, request.target
    with disk_errors("checkpoint", target):
        number = os.open(
            target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            with open(number, "wb") as file:
                write_archive(work, file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            os.unlink(target)
            raise
    return 0


def write_tree(arguments: Message, fds: list[int]) -> int:
    """Job: write the files of a folder to the new tar file `target`. The arguments are a
    `WriteTree`; `fds[0]`: the folder. Raises Error."""
    target = WriteTree.of(arguments).target
    with disk_errors("checkpoint", target):
        layer.write(f"/proc/self/fd/{fds[0]}", target, _refuse_opaque)
    return 0


def _refuse_opaque() -> int:
    raise Unsupported(
        "cannot save the pod's /dev/shm: a folder in it has the attribute trusted.overlay.opaque"
    )


def write_archive(work: str, file: Any) -> None:
    """Write the checkpoint in the folder `work` to `file` as a tar. The metadata files come first,
    so that a reader finds them quickly."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        present = os.listdir(work)
        for name in (*(n for n in names.FILES if n in present), names.IMAGES):
            _add(tar, f"{work}/{name}", name)


def _add(tar: tarfile.TarFile, path: str, name: str) -> None:
    status = os.stat(path, follow_symlinks=False)
    member = tarfile.TarInfo(name)
    member.mtime = int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        member.type, member.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(member)
        for entry in sorted(os.listdir(path)):
            _add(tar, f"{path}/{entry}", f"{name}/{entry}")
    elif stat.S_ISREG(status.st_mode):
        member.size, member.mode = status.st_size, 0o600
        with open(path, "rb") as content:
            tar.addfile(member, content)


def _binds(document: Mapping[str, Any]) -> Any:
    for mount in document["mounts"]:
        if mount.get("type") != "bind":
            continue
        source = mount.get("source", "")
        try:
            status = os.stat(source)
        except OSError:  # in the pod's namespaces, or gone
            kind, permissions = "", 0
        else:
            kind = "directory" if stat.S_ISDIR(status.st_mode) else "file"
            permissions = stat.S_IMODE(status.st_mode)
        yield {
            "source": source,
            "destination": mount["destination"],
            "file_type": kind,
            "permissions": permissions,
        }


def _open_lower(rootfs: Overlay, mounts: Mapping[str, int]) -> int:
    """Open a mount of the image alone, without the container's writable layer. Returns the
    descriptor."""
    if rootfs.image is not None:
        return open_image(rootfs.image, mounts)
    with NamedDescriptors() as descriptors:
        return open_overlay(Overlay(rootfs.lower), Linux(), descriptors)


def _write(folder: str, name: str, content: object) -> None:
    with open(f"{folder}/{name}", "x", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(content, file)
