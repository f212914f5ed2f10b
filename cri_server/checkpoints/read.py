"""Reads a checkpoint from an archive or an image into plain files. Treats all content of the
checkpoint as hostile.

An archive and the writable layer in it are unpacked like an image's layer, by a process that can
create files only in one folder. Only regular files with known names are copied, and JSON is
checked.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from cri_server import typed
from cri_server.checkpoints import names
from cri_server.images.layers import jail
from cri_server.images.layers.inflate import BadLayer, TarStream, UnpackLimits
from cri_server.images.layers.trees import open_folder
from cri_server.images.layers.unpack import TREE, Layer, unpack
from cri_server.images.store.unpacked_layers import make_devices, refuse_links
from pyrunc.errors import InvalidArgument, KernelError
from pyrunc.kernel.copy_tree import copy_data, copy_tree
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.full import disk_errors
from pyrunc.kernel.path import open_beneath, open_folder_at, open_regular_in_root
from pyrunc.records import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath

UNPACK = "cri_server.checkpoints.read:unpack_archive"
FILL = "cri_server.checkpoints.read:fill"
TAKE = "cri_server.checkpoints.read:take"
TAKEN = (names.CONFIG, names.SPEC, names.LAYER, names.DELETED)
DOCUMENT_LIMIT_BYTES = 16 << 20
MOST_IMAGES = 100_000
PATH_MAX = 4096
MOST_FOLDERS = 100_000  # made for whiteouts in a writable layer; no image has as many
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NAMES = (
    "a checkpoint archive such as kubelet's checkpoint API, containerd, CRI-O or"
    " `pyrunc-cri checkpoint` writes"
)


class _ConfigDump(msgspec.Struct, rename="camel"):
    """The fields of config.dump that a restore uses."""

    name: str = ""
    rootfs_image: str = ""
    rootfs_image_ref: str = ""
    rootfs_image_name: str = ""


class _Mount(msgspec.Struct):
    destination: str
    type: str = ""
    options: list[str] | None = None


class _Namespace(msgspec.Struct):
    type: str


class _Linux(msgspec.Struct):
    namespaces: list[_Namespace] | None = None


class _SpecProcess(msgspec.Struct):
    terminal: bool = False


class _Spec(msgspec.Struct):
    """The fields of spec.dump that a restore uses."""

    mounts: list[_Mount] | None = None
    process: _SpecProcess | None = None
    linux: _Linux | None = None


class Checkpoint(msgspec.Struct, frozen=True):
    """The properties of a checkpointed container that a restore needs.

    - `images`: references of the container's image, the one with a digest first.
    - `binds`: the paths in the container at which the restored container must have mounts.
    - `terminal`: whether the restored container must have a terminal.
    - `namespaces`: the types of namespaces in the container's OCI spec; it used the host's
      namespaces of all other types. For network, pid and IPC the restored container must do the
      same.
    """

    name: str
    images: list[str]
    binds: list[str]
    terminal: bool
    namespaces: frozenset[str]


def read(folder: str) -> Checkpoint:
    """Read config.dump and spec.dump, which `take` has copied to `folder`. Raises
    InvalidArgument."""
    config = _document(folder, names.CONFIG, _ConfigDump)
    spec = _document(folder, names.SPEC, _Spec)
    # The reference with a digest comes first: a tag may mean another image by now.
    references = (config.rootfs_image_ref, config.rootfs_image_name, config.rootfs_image)
    # The option bind or rbind makes a bind mount, whatever the type says (OCI specification,
    # config.md, "Mounts").
    binds = [
        m.destination for m in spec.mounts or () if m.type == "bind" or _binds(m.options or ())
    ]
    return Checkpoint(
        config.name,
        [reference for reference in dict.fromkeys(references) if reference],
        [posixpath.normpath("/" + place.lstrip("/")) for place in binds],
        spec.process is not None and spec.process.terminal,
        frozenset(one.type for one in (spec.linux and spec.linux.namespaces) or ()),
    )


def _binds(options: Sequence[str]) -> bool:
    return "bind" in options or "rbind" in options


def _document(folder: str, name: str, kind: type[Any]) -> Any:
    try:
        with open(f"{folder}/{name}", "rb") as file:
            content = file.read(DOCUMENT_LIMIT_BYTES + 1)
        # Read up to the limit: the file comes from an archive that the runtime must not trust.
        if len(content) > DOCUMENT_LIMIT_BYTES:
            raise InvalidArgument(
                f"the checkpoint's {name} is larger than {DOCUMENT_LIMIT_BYTES} bytes"
            )
        return typed.decode(content, kind)
    except FileNotFoundError:
        raise InvalidArgument(f"the checkpoint has no {name}: it is not {NAMES}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the checkpoint's {name}: {error}") from None


class Unpack(Record):
    """The arguments of `unpack_archive`. `folder`: an empty folder for the files; `limits`: their
    allowed size and number."""

    folder: AbsolutePath
    limits: UnpackLimits


class Take(Record):
    """The arguments of `take`. `target`: an empty folder for copies of the checkpoint's files."""

    target: AbsolutePath


class Fill(Record):
    """The arguments of `fill`. `source`: a folder that an archive was unpacked into."""

    source: AbsolutePath


def unpack_archive(arguments: Message, fds: list[int]) -> int:
    """Job: unpack a checkpoint's archive into the subfolder `tree` of the argument `folder`. The
    arguments are an `Unpack`; `fds[0]`: the archive. Raises InvalidArgument, ResourceExhausted."""
    request = Unpack.of(arguments)
    folder = request.folder
    with disk_errors("unpack a checkpoint", folder):
        try:
            unpack(TarStream(fds[0], request.limits), jail.enter(folder), None, request.limits)
        except BadLayer as error:
            raise InvalidArgument(f"the checkpoint's archive: {error.message}") from None
    return 0


def take(arguments: Message, fds: list[int]) -> int:
    """Job: copy the known files of a checkpoint to `target`. The arguments are a `Take`; `fds[0]`:
    the folder with the unpacked checkpoint. Raises Error."""
    target = Take.of(arguments).target
    with disk_errors("unpack a checkpoint", target):
        for name in TAKEN:
            _copy(fds[0], name, f"{target}/{name}", required=name in (names.CONFIG, names.SPEC))
        _copy_images(fds[0], f"{target}/{names.IMAGES}")
    return 0


def _copy_images(source: int, target: str) -> None:
    try:
        folder = open_beneath(source, names.IMAGES, os.O_RDONLY | os.O_DIRECTORY)
    except KernelError:
        raise InvalidArgument(
            f"the checkpoint has no folder {names.IMAGES}: it must be {NAMES}"
        ) from None
    with closing_fd(folder):
        os.mkdir(target, 0o700)
        images = os.listdir(folder)
        if len(images) > MOST_IMAGES:
            raise InvalidArgument(f"the checkpoint has more than {MOST_IMAGES} images")
        for name in images:
            _copy(folder, name, f"{target}/{name}", required=True)


def _copy(folder: int, name: str, target: str, *, required: bool) -> None:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        if required:
            raise InvalidArgument(f"the checkpoint has no {name}: it is not {NAMES}") from None
        return
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument(f"the checkpoint's {name!r} is not a regular file")
    # By a descriptor that follows no link: the file may have been changed since.
    with (
        closing_fd(open_regular_in_root(folder, name)) as source,
        closing_fd(
            os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        ) as destination,
    ):
        copy_data(source, destination, os.fstat(source).st_size)


def fill(arguments: Message, fds: list[int]) -> int:
    """Job: copy the files in `source` to a pod's /dev/shm. The arguments are a `Fill`; `fds[0]`:
    the empty /dev/shm. Raises Error."""
    target = f"/proc/self/fd/{fds[0]}"
    with disk_errors("unpack a checkpoint", target):
        source = os.open(Fill.of(arguments).source, _FOLDER | os.O_NOFOLLOW)
        copy_tree(source, os.open(target, _FOLDER))
    return 0


def finish_layer(folder: str, deleted: Sequence[str]) -> Layer:
    """Complete the writable layer that was unpacked into `folder`: create its device nodes, and
    whiteouts for the paths `deleted`. Returns the layer as described in its `layer.json`. Raises
    InvalidArgument, Error."""
    refuse_links(folder)
    layer = Layer.read(folder)
    tree = os.path.join(folder, TREE)
    if layer.devices:
        make_devices(tree, layer)
    with closing_fd(os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        for path in deleted:
            _white_out(root, path)
    return layer


def deleted(folder: str) -> list[str]:
    """Return the paths in the checkpoint's deleted.files. Raises InvalidArgument for invalid or too
    many paths."""
    if not os.path.exists(f"{folder}/{names.DELETED}"):
        return []
    paths: list[str] = _document(folder, names.DELETED, list[str])
    split = []
    for path in paths:
        parts = _parts(path)
        if ".." in parts or not parts or "\0" in path or len(os.fsencode(path)) > PATH_MAX:
            raise InvalidArgument(
                f"the checkpoint's {names.DELETED} has an invalid path: {path[:200]!r}"
            )
        split.append(parts)
    # The whiteout of a path needs all its parent folders: 16 MiB of paths could name millions.
    if _count_folders(split) > MOST_FOLDERS:
        raise InvalidArgument(
            f"the checkpoint's {names.DELETED} names more than {MOST_FOLDERS} folders"
        )
    return paths


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _count_folders(paths: list[list[str]]) -> int:
    """Return the number of different parent folders in `paths`, each a list of components."""
    count, above = 0, list[str]()
    for path in sorted(paths):
        shared = len(posixpath.commonprefix([above, path[:-1]]))
        above = path[:-1]
        count += len(above) - shared
    return count


def _white_out(root: int, path: str) -> None:
    """Create a whiteout at `path` and its missing parent folders, unless the layer has a file at
    `path`. Raises InvalidArgument."""
    *parents, name = _parts(path)
    folder = open_folder(root, b"")
    try:
        for parent in parents:
            below = open_folder_at(folder, parent)
            os.close(folder)
            folder = below
        with suppress(FileExistsError):
            os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=folder)
    except OSError as error:
        raise InvalidArgument(
            f"the checkpoint's {names.DELETED} names {path[:200]!r}: {error.strerror}"
        ) from None
    finally:
        os.close(folder)
