"""The errands of a checkpoint: CRIU and the writable layer while the container stands still, the
archive when it runs again.

Each runs in a process of its own (`zygote`): CRIU is its child, and a source that does not answer
holds nobody up.
"""

from __future__ import annotations

import json
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

from cri_server.checkpoints import layer, names
from cri_server.checkpoints.options import OPTIONS
from pyrunc import atomic_file
from pyrunc.checkpoint.checkpoint import Choices, Dump, checkpoint
from pyrunc.compile.descriptors import NamedDescriptors
from pyrunc.compile.image_mount import open_image
from pyrunc.compile.sources import Overlay, open_overlay
from pyrunc.container import state as states
from pyrunc.errors import Unsupported
from pyrunc.kernel.full import disk_errors
from pyrunc.records import Record
from pyrunc.shim.files import LaunchFile
from pyrunc.spec.model import Linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath

DUMP = "cri_server.checkpoints.dump:dump"
WRITE_TREE = "cri_server.checkpoints.dump:write_tree"
PACK = "cri_server.checkpoints.dump:pack"


class TakeDump(Record):
    """Of `dump`. `directory`: the container's state; `upper`: its writable layer; `work`: an
    existing folder; `volumes`: the container's own folders by their places in it; `images`: paths
    of indexes."""

    directory: AbsolutePath
    upper: AbsolutePath
    work: AbsolutePath
    volumes: dict[str, str]
    images: Sequence[str]


class Pack(Record):
    """Of `pack`. `target`: a new file."""

    work: AbsolutePath
    target: AbsolutePath


class WriteTree(Record):
    """Of `write_tree`. `target`: a new file."""

    target: AbsolutePath


def dump(arguments: Message, fds: list[int]) -> int:
    """A `TakeDump` + the mounts of the indexes.

    The container stands still and goes on doing so. Leaves CRIU's images, its log, the writable
    layer and `spec.dump` in `work`. Raises Error.
    """
    wanted = TakeDump.of(arguments)
    directory, work = wanted.directory, wanted.work
    held = dict(zip(wanted.images, fds, strict=True))
    with disk_errors("checkpoint", work):
        document = atomic_file.read_json(f"{directory}/{states.CONFIG}")
        asked = LaunchFile.read(directory)
        root, _, container = directory.rpartition("/")
        state = states.find(root, container)
        os.mkdir(f"{work}/{names.IMAGES}", 0o700)
        chosen = Choices(image_path=f"{work}/{names.IMAGES}", work_path=work, **OPTIONS)
        checkpoint(state, chosen, Dump(leave_running=True))
        binds = list(_binds(document))
        removed = layer.write(
            wanted.upper,
            f"{work}/{names.LAYER}",
            lambda: _open_lower(asked.rootfs, held),
            [bind["destination"] for bind in binds],
            wanted.volumes,
        )
        _write(work, names.DELETED, removed)
        _write(work, names.BIND_MOUNTS, binds)
        _write(work, names.SPEC, document)
    return 0


def pack(arguments: Message, fds: list[int]) -> int:
    """A `Pack`: the content of `work` as the new file `target`, synced. Raises Error; the file is
    gone then."""
    wanted = Pack.of(arguments)
    work, target = wanted.work, wanted.target
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
    """A `WriteTree` + a folder: its files as the new tar `target`. Raises Error."""
    target = WriteTree.of(arguments).target
    with disk_errors("checkpoint", target):
        layer.write(f"/proc/self/fd/{fds[0]}", target, _refuse_opaque)
    return 0


def _refuse_opaque() -> int:
    raise Unsupported("a folder that is no overlay's has trusted.overlay.opaque")


def write_archive(work: str, file: Any) -> None:
    """The files of a folder and its folders as a tar: small ones first, so that what a checkpoint
    is need not be searched for."""
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
        except OSError:  # of the pod, or gone
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


def _open_lower(rootfs: Overlay, held: Mapping[str, int]) -> int:
    """The image's tree without the writable layer."""
    if rootfs.image is not None:
        return open_image(rootfs.image, held)
    with NamedDescriptors() as descriptors:
        return open_overlay(Overlay(rootfs.lower), Linux(), descriptors)


def _write(folder: str, name: str, content: object) -> None:
    with open(f"{folder}/{name}", "x", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(content, file)
