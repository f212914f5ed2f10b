"""Restores containers in CreateContainer: from a checkpoint archive, or an image that contains a
checkpoint, made by this or another runtime.

Only the container's image and CRIU's data come from the archive; user, mounts, limits and
namespaces come from the request. If archive and request contradict each other, the call fails:
CRIU would silently leave out a mount.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cri_server.checkpoints import names, read
from cri_server.checkpoints.options import OPTIONS
from cri_server.checkpoints.read import TAKE, UNPACK, Checkpoint, Take, Unpack
from cri_server.containers import anonymous_volumes
from cri_server.containers.checkpoint import require_criu, run
from cri_server.images.formats.digests import HEX_LENGTHS, hex_of
from cri_server.images.formats.reference import is_id
from cri_server.images.layers.unpack import TREE
from cri_server.images.service import Image
from cri_server.images.store.merged import merged
from cri_server.services import Services
from cri_server.spec import sources
from cri_server.spec.mounts import MountRequest
from pyrunc.checkpoint import file_images
from pyrunc.errors import InvalidArgument, NotFound, WrongState, kernel_errors
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.full import disk_errors
from pyrunc.kernel.tree import remove_path
from pyrunc.shim.files import RestoreFolders

ARCHIVE, LAYER = "archive", "layer"
SEPARATE = ("network", "pid", "ipc")
"""Kinds of namespaces that CRIU cannot change. If the checkpointed container used the host's
namespace, so must the restored one; if it used its pod's, the restored one must use its pod's."""


async def load_checkpoint(
    services: Services, identifier: str, reference: str, user_specified_image: str = ""
) -> Checkpoint | None:
    """Load a checkpoint into the folder of the container `identifier`. `reference` is the absolute
    path of an archive, or names an image. Returns None for an image without a checkpoint.

    kubelet passes an image id as `reference`, and the image reference of the pod's specification as
    `user_specified_image`. An image is a checkpoint if the manifest that these references name has
    a checkpoint's annotations. If the references name no manifest, every manifest of the image must
    have such annotations.

    Raises NotFound, InvalidArgument, WrongState (no CRIU, restoring images is disabled),
    DeadlineExceeded (opening the archive), ResourceExhausted, KernelError. After an error the
    caller removes the folder.
    """
    root = services.paths.container_root(identifier)
    if reference.startswith("/"):
        timeout_s = services.config.containers.foreign_path_timeout_s
        with closing_fd(
            await sources.run_with_deadline(
                timeout_s, reference, _open_archive, reference, discard=os.close
            )
        ) as archive:
            require_criu()
            await asyncio.to_thread(_make_folder, root)
            await unpack(services, root / ARCHIVE, archive)
        await _load(services, root, [root / ARCHIVE / TREE])
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
                f"image {reference[:200]!r} holds a checkpoint: restoring images is disabled"
                " (containers.restore_images = false)"
            )
        require_criu()
        await asyncio.to_thread(_make_folder, root)
        files = await services.images.rootfs(image.id, identifier)
        await _load(services, root, files.lower_dirs)
    return await asyncio.to_thread(read.read, str(services.paths.restore_folder(identifier)))


def holds_checkpoint(annotations: frozenset[str]) -> bool:
    """Return whether an image's manifest describes a checkpoint. `annotations`: the names of the
    manifest's annotations."""
    return not annotations.isdisjoint(names.ANNOTATIONS)


def _open_archive(path: str) -> int:
    try:
        # O_NONBLOCK: a FIFO without a writer would hold the thread (fifo(7)). O_NOCTTY: a terminal.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"archive {path[:200]!r} does not exist on this node") from None
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"archive {path[:200]!r}: {error}") from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise InvalidArgument(f"{path[:200]!r} is not a regular file: it is not {read.NAMES}")
    return number


def _make_folder(folder: Path) -> None:
    with disk_errors("mkdir", str(folder)):
        folder.mkdir(mode=0o700)


async def unpack(services: Services, folder: Path, archive: int) -> None:
    """Create `folder`, and unpack a tar of a checkpoint into its subfolder `tree`. `archive`: an
    open file. Raises ResourceExhausted, KernelError, PeerError, and InvalidArgument for a damaged
    or hostile tar."""
    await asyncio.to_thread(_make_folder, folder)
    await run(services, UNPACK, Unpack(str(folder), services.images.archive_limits()), [archive])


async def _load(services: Services, root: Path, layers: Sequence[Path]) -> None:
    target = root / "restore"
    await asyncio.to_thread(_make_folder, target)
    with kernel_errors("open", repr(str(layers[0]))), merged(layers) as tree:
        await run(services, TAKE, Take(str(target)), [tree])


async def find_image(services: Services, checkpoint: Checkpoint) -> Image:
    """Return the image that the checkpointed container was created from; pull it if it is not on
    this node. Raises NotFound and a pull's errors."""
    for reference in checkpoint.images:
        if (image := await services.images.status(reference)) is not None:
            return image
    for reference in checkpoint.images:
        if not _is_whole_id(reference):
            image = await services.images.status(await services.images.pull(reference))
            if image is not None:
                return image
    raise NotFound(
        "the image of the checkpoint is not on this node:"
        f" {', '.join(checkpoint.images)[:300] or 'the checkpoint does not name it'}"
    )


def _is_whole_id(reference: str) -> bool:
    """Return whether the reference is a complete image id, with or without `sha256:` (CRI-O omits
    it). No registry resolves an id, so it cannot be pulled."""
    return is_id(reference) and len(hex_of(reference)) in HEX_LENGTHS


def check(
    checkpoint: Checkpoint, spec: Mapping[str, Any], requested: Sequence[MountRequest]
) -> None:
    """Raise InvalidArgument unless the requested container has the same terminal setting, the same
    namespaces and host mounts at the same paths as the checkpoint's container."""
    if checkpoint.terminal != bool(spec["process"].get("terminal")):
        had = "had a terminal" if checkpoint.terminal else "had no terminal"
        raise InvalidArgument(f"the container of the checkpoint {had}: config.tty must match")
    kinds = {namespace["type"] for namespace in spec["linux"]["namespaces"]}
    for kind in SEPARATE:
        if kind in checkpoint.namespaces - kinds:
            raise InvalidArgument(
                f"the container of the checkpoint used its pod's {kind} namespace:"
                " it cannot be restored into the host's"
            )
        if kind in kinds - checkpoint.namespaces:
            raise InvalidArgument(
                f"the container of the checkpoint used the host's {kind} namespace:"
                " it cannot be restored into the pod's"
            )
    places = {
        mount["destination"] for mount in spec["mounts"] if mount.get("type") in ("bind", "overlay")
    }
    missing = [place for place in checkpoint.binds if place not in places]
    if missing:
        raise InvalidArgument(
            f"the container of the checkpoint had host mounts at {', '.join(missing)[:300]}:"
            " the configuration must request them"
        )
    extra = [mount.destination for mount in requested if mount.destination not in checkpoint.binds]
    if extra:
        raise InvalidArgument(
            f"the container of the checkpoint had no mount at {', '.join(extra)[:300]}:"
            " the configuration must not request one"
        )


async def fill_layer(services: Services, identifier: str, volumes: Sequence[MountRequest]) -> None:
    """Write the checkpoint's files into the new writable layer and volumes. Raises Error."""
    root = services.paths.container_root(identifier)
    folder = services.paths.restore_folder(identifier)
    deleted = await asyncio.to_thread(read.deleted, str(folder))
    archive = folder / names.LAYER
    if archive.exists():
        with closing_fd(os.open(archive, os.O_RDONLY | os.O_CLOEXEC)) as number:
            await unpack(services, root / LAYER, number)
        await asyncio.to_thread(_install, root, deleted, volumes)
    await asyncio.to_thread(_set_root_mode, root / "upper", folder / names.IMAGES)
    await asyncio.to_thread(remove_path, root / LAYER)


def _install(root: Path, deleted: Sequence[str], volumes: Sequence[MountRequest]) -> None:
    """Replace the empty writable layer with the checkpoint's unpacked layer, and make whiteouts in
    it for the paths `deleted`. Then move the content at the paths of `volumes` into the volumes.
    Blocks."""
    layer = read.finish_layer(str(root / LAYER), deleted)
    tree, upper = root / LAYER / TREE, root / "upper"
    with disk_errors("rename", str(upper)):
        if "" in layer.implicit:  # no entry for the root: `upper` has the image's attributes
            root_stat = os.stat(upper)
            os.chown(tree, root_stat.st_uid, root_stat.st_gid)
            os.chmod(tree, stat.S_IMODE(root_stat.st_mode))
        upper.rmdir()
        tree.rename(upper)
    anonymous_volumes.move_from_layer(volumes, upper)


def _set_root_mode(upper: Path, images: Path) -> None:
    """Give the container's root folder the mode that it had at the checkpoint: CRIU requires the
    same mode, but engines choose different ones if the image does not define it. Blocks."""
    with disk_errors("chmod", str(upper)):
        mode = file_images.root_mode(str(images))
        if mode is not None:
            upper.chmod(mode)


def bundle(services: Services, identifier: str) -> RestoreFolders:
    """Return the `restore` field of the container's launch.json: the folder with CRIU's images,
    CRIU's work folder and its options."""
    folder = services.paths.restore_folder(identifier)
    return RestoreFolders(str(folder / names.IMAGES), str(folder), OPTIONS)
