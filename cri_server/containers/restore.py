"""CreateContainer from a checkpoint: of an archive, or of an image that holds one, as kubelet and
the peers' tools make them.

What the archive says decides little: which image the container had, and what CRIU needs to know.
Everything else, user, mounts, limits, namespaces, is the request's, and what the two cannot agree
on is refused: CRIU would find a place empty, or leave a volume out without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cri_server.checkpoints import names, read
from cri_server.checkpoints.options import OPTIONS
from cri_server.checkpoints.read import TAKE, UNPACK, Checkpoint, Take, Unpack
from cri_server.containers import anonymous_volumes
from cri_server.containers.checkpoint import require_criu, run
from cri_server.images.digests import HEX_LENGTHS, hex_of
from cri_server.images.merged import merged
from cri_server.images.reference import is_id
from cri_server.images.service import Image
from cri_server.images.unpack import TREE
from cri_server.services import Services
from cri_server.spec import sources
from cri_server.spec.mounts import Asked
from pyrunc.checkpoint import file_images
from pyrunc.errors import InvalidArgument, NotFound, WrongState, kernel_errors
from pyrunc.kernel.full import disk_errors
from pyrunc.kernel.tree import remove_path
from pyrunc.shim.files import RestoreFolders

ARCHIVE, LAYER = "archive", "layer"
SEPARATE = ("network", "pid", "ipc")
"""CRIU restores processes of the host's namespaces in the host's, whatever pod they are to be in,
and finds no place there for those of a pod's."""


async def take(
    services: Services, identifier: str, reference: str, user_specified_image: str = ""
) -> Checkpoint | None:
    """The checkpoint that an image reference means, its files in the container's folder; None for
    an ordinary image.

    kubelet's reference is an id, and `user_specified_image` what the pod has: its manifest says
    whether the image is a checkpoint.

    Raises NotFound, InvalidArgument, WrongState (no CRIU, images are not to be restored),
    ResourceExhausted, KernelError; the folder is the caller's to remove.
    """
    root = services.paths.container_root(identifier)
    if reference.startswith("/"):
        timeout_s = services.config.containers.foreign_path_timeout_s
        archive = await sources.in_time(
            timeout_s, reference, _open_archive, reference, discard=os.close
        )
        try:
            require_criu()
            await asyncio.to_thread(_make_folders, root, root / ARCHIVE)
            await _unpack(services, root / ARCHIVE, archive)
        finally:
            os.close(archive)
        await _take(services, root, [root / ARCHIVE / TREE])
        await asyncio.to_thread(remove_path, root / ARCHIVE)
    else:
        image = await services.images.status(reference)
        if image is None:
            return None
        manifests = services.images.annotations(image.id, [reference, user_specified_image])
        if not all(holds_checkpoint(annotations) for annotations in manifests):
            return None
        if not services.config.containers.restore_images:
            raise WrongState(
                f"image {reference[:200]!r} holds a checkpoint: images are restored where containers.restore_images is true"
            )
        require_criu()
        await asyncio.to_thread(_make_folders, root)
        files = await services.images.rootfs(image.id)
        await _take(services, root, files.lower_dirs)
    return await asyncio.to_thread(read.read, str(services.paths.restore_folder(identifier)))


def holds_checkpoint(annotations: Mapping[str, object]) -> bool:
    """Whether a manifest with these annotations is of one."""
    return any(name in annotations for name in names.ANNOTATIONS)


def _open_archive(path: str) -> int:
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no archive {path[:200]!r} on this node") from None
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"archive {path[:200]!r}: {error}") from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise InvalidArgument(f"{path[:200]!r} is no regular file: it is not {read.NAMES}")
    return number


def _make_folders(*folders: Path) -> None:
    with disk_errors("mkdir", str(folders[-1])):
        for folder in folders:
            folder.mkdir(mode=0o700)


async def _unpack(services: Services, folder: Path, archive: int) -> None:
    await run(services, UNPACK, Unpack(str(folder), services.images.room()), [archive])


async def _take(services: Services, root: Path, layers: Sequence[Path]) -> None:
    target = root / "restore"
    await asyncio.to_thread(_make_folders, target)
    with _opened(layers) as tree:
        await run(services, TAKE, Take(str(target)), [tree])


@contextlib.contextmanager
def _opened(layers: Sequence[Path]) -> Iterator[int]:
    with kernel_errors("open", repr(str(layers[0]))), merged(layers) as root:
        yield root


async def find_image(services: Services, checkpoint: Checkpoint) -> Image:
    """The image of which the container was made; pulled where it is not here. Raises NotFound, and
    what a pull raises."""
    for reference in checkpoint.images:
        if (image := await services.images.status(reference)) is not None:
            return image
    for reference in checkpoint.images:
        if not _is_whole_id(reference):
            image = await services.images.status(await services.images.pull(reference))
            if image is not None:
                return image
    raise NotFound(
        f"the image of the checkpoint is not on this node: {', '.join(checkpoint.images)[:300] or 'it has no name'}"
    )


def _is_whole_id(reference: str) -> bool:
    """Of an image, which no registry knows by it: CRI-O's are without `sha256:`."""
    return is_id(reference) and len(hex_of(reference)) in HEX_LENGTHS


def check(checkpoint: Checkpoint, spec: Mapping[str, Any], wanted: Sequence[Asked]) -> None:
    """Whether the container that is asked for can be the one of the checkpoint. Raises
    InvalidArgument."""
    if checkpoint.terminal != bool(spec["process"].get("terminal")):
        had = "had a terminal" if checkpoint.terminal else "had no terminal"
        raise InvalidArgument(f"the container of the checkpoint {had}: config.tty must say so, too")
    has = {namespace["type"] for namespace in spec["linux"]["namespaces"]}
    for kind in SEPARATE:
        if kind in checkpoint.namespaces - has:
            raise InvalidArgument(
                f"the container of the checkpoint had its pod's {kind} namespace: it cannot go on in the host's"
            )
        if kind in has - checkpoint.namespaces:
            raise InvalidArgument(
                f"the container of the checkpoint had the host's {kind} namespace: it cannot go on in the pod's"
            )
    places = {
        mount["destination"] for mount in spec["mounts"] if mount.get("type") in ("bind", "overlay")
    }
    missing = [place for place in checkpoint.binds if place not in places]
    if missing:
        raise InvalidArgument(
            f"the container of the checkpoint had mounts of the host at {', '.join(missing)[:300]}: the configuration must have them, too"
        )
    more = [mount.destination for mount in wanted if mount.destination not in checkpoint.binds]
    if more:
        raise InvalidArgument(
            f"the container of the checkpoint had nothing mounted at {', '.join(more)[:300]}: nothing can be mounted there now"
        )


async def fill_layer(services: Services, identifier: str, volumes: Sequence[Asked]) -> None:
    """Put what the container had written into its new writable layer and its own volumes. Raises
    Error."""
    root = services.paths.container_root(identifier)
    folder = services.paths.restore_folder(identifier)
    deleted = await asyncio.to_thread(read.deleted, str(folder))
    await asyncio.to_thread(_make_folders, root / LAYER)
    archive = folder / names.LAYER
    if archive.exists():
        number = os.open(archive, os.O_RDONLY | os.O_CLOEXEC)
        try:
            await _unpack(services, root / LAYER, number)
        finally:
            os.close(number)
        await asyncio.to_thread(_install, root, deleted, volumes)
    await asyncio.to_thread(_set_root_mode, root / "upper", folder / names.IMAGES)
    await asyncio.to_thread(remove_path, root / LAYER)


def _install(root: Path, deleted: Sequence[str], volumes: Sequence[Asked]) -> None:
    """The unpacked layer takes the place of the empty one. Blocking."""
    layer = read.finish_layer(str(root / LAYER), deleted)
    tree, upper = root / LAYER / TREE, root / "upper"
    with disk_errors("rename", str(upper)):
        if "" in layer.implicit:  # the root is the image's, as `upper` has it
            found = os.stat(upper)
            os.chown(tree, found.st_uid, found.st_gid)
            os.chmod(tree, stat.S_IMODE(found.st_mode))
        upper.rmdir()
        tree.rename(upper)
    anonymous_volumes.take_from(volumes, upper)


def _set_root_mode(upper: Path, images: Path) -> None:
    """As the container had it: CRIU takes no other, and an image that does not say it has another
    one under each engine. Blocking."""
    with disk_errors("chmod", str(upper)):
        mode = file_images.root_mode(str(images))
        if mode is not None:
            upper.chmod(mode)


def bundle(services: Services, identifier: str) -> RestoreFolders:
    """What launch.json says of it."""
    folder = services.paths.restore_folder(identifier)
    return RestoreFolders(str(folder / names.IMAGES), str(folder), OPTIONS)


async def forget(services: Services, identifier: str) -> None:
    """The container runs: what it was made from goes. Fine when there is nothing."""
    await asyncio.to_thread(remove_path, services.paths.restore_folder(identifier))
