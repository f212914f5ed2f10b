"""Opens the container's root and bind sources as detached mounts with the runtime's rights. The
container attaches them; nothing is mounted on the host.

Layers of an overlay and bind sources may be mapped to the ids of a user namespace.
"""

from __future__ import annotations

import os
from errno import EINVAL
from stat import S_IFBLK, S_IFCHR

from pyrunc.abi.file import AT_EMPTY_PATH, AT_FDCWD, AT_RECURSIVE
from pyrunc.abi.mount import (
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MS_PRIVATE,
    OPEN_TREE_CLONE,
)
from pyrunc.compile import host, rootfs_probe
from pyrunc.compile.bind_source import bind_failed, open_source
from pyrunc.compile.copyup import open_copy
from pyrunc.compile.idmaps import open_user_namespace
from pyrunc.compile.image_mount import (
    MountedImage,
    open_image,
    open_layer,
    open_layers,
    open_overlay_of,
)
from pyrunc.compile.requests import Overlay
from pyrunc.errors import InvalidSpec, KernelError, Unsupported
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel.fd import close_all, closing_fd
from pyrunc.kernel.path import clean
from pyrunc.launch import pinned
from pyrunc.plan import devices
from pyrunc.plan.mounts import MountOptions, copies_up, is_bind, is_plain_bind, is_tree
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pyrunc.compile.container import CreateRequest
    from pyrunc.compile.descriptors import NamedDescriptors
    from pyrunc.spec.model import IdMap, Linux, Mount, Spec

OUR_MOUNTS = "pyrunc:"


class Directory(Value):
    """A directory of the host that becomes the container's root, with the mounts in it."""

    path: str


def open_root(request: CreateRequest, descriptors: NamedDescriptors) -> None:
    """Open the root as the descriptor `root`: a detached mount, which the container's process
    attaches in its own mount namespace. For a container without a mount namespace, `root` is the
    host's directory itself, not a mount."""
    rootfs = request.rootfs
    if isinstance(rootfs, Overlay):
        if rootfs.image is not None:
            root = _open_overlay_of_image(rootfs, rootfs.image, request, descriptors)
        else:
            root = open_overlay(rootfs, request.spec.linux, descriptors)
        descriptors.take("root", root)
        return
    path = os.path.join(request.bundle, rootfs.path)
    if not os.path.isdir(path):
        raise InvalidSpec("root.path", f"{path} is not a directory")
    if request.spec.linux.namespace("mount") is None:
        descriptors.take("root", os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    else:
        descriptors.take(
            "root", kernel_mount.open_tree(AT_FDCWD, path, OPEN_TREE_CLONE | AT_RECURSIVE)
        )


def open_overlay(rootfs: Overlay, linux: Linux, descriptors: NamedDescriptors) -> int:
    """Mount the overlay and return the detached mount. With a user namespace the lower layers are
    idmapped: files of the host's root user belong to the container's root user.

    The upper and work folders are not idmapped and must belong to the user namespace's root.
    overlayfs writes to these folders with the mounter's id; if an id map lacked that id, the mount
    would silently be read-only.
    """
    options = _overlay_options(rootfs, linux)
    if linux.namespace("user") is not None:
        return _open_mapped_overlay(rootfs, linux, descriptors, options)
    # overlayfs needs two layers, or an upper one
    if len(rootfs.lower) == 1 and not rootfs.upper:
        return _open_read_only(rootfs.lower[0])
    return open_layers(rootfs.lower, rootfs.upper, rootfs.work, options)


def _overlay_options(rootfs: Overlay, linux: Linux) -> kernel_mount.Options:
    """Return the options of an overlay. A mount label in `linux` applies to all files of the
    overlay. The layers, which other containers use, keep their labels."""
    options: list[tuple[str, str | None]] = []
    if rootfs.volatile and rootfs.upper:
        # `volatile` leaves out the sync of the upper layer at unmount, which takes up to 312 ms
        # when it is dirty. After a crash of the machine no process is left that needs the layer.
        options.append(("volatile", None))
    if linux.mount_label and host.constant_facts().selinux:
        options.append(("context", linux.mount_label))
    return tuple(options)


def _open_overlay_of_image(
    rootfs: Overlay, image: MountedImage, request: CreateRequest, descriptors: NamedDescriptors
) -> int:
    """Mount an overlay detached, with the mount of an image as its lower layer. With a user
    namespace the image is idmapped."""
    linux = request.spec.linux
    mapped = linux.namespace("user") is not None
    with closing_fd((open_image if mapped else open_layer)(image, request.images)) as lower:
        if mapped:
            owner = _user_namespace(linux, descriptors)
            _idmap(lower, owner, image.index, recursive=False)
            _give_to_root(rootfs, linux)
        options = _overlay_options(rootfs, linux)
        return open_overlay_of([lower], [image.place], rootfs.upper, rootfs.work, options)


def open_image_volume(
    image: MountedImage, linux: Linux, images: Mapping[str, int], descriptors: NamedDescriptors
) -> int:
    """Mount an image as a volume of a container; return the detached mount. The container cannot
    change the image's mount in other containers. `images`: descriptors of images that the caller
    has mounted, by the path of the image's EROFS index. Raises KernelError, OSError.

    Where images are shared (Linux 6.15), a container without its own user namespace gets an
    overlay, which has a separate superblock. With CAP_SYS_ADMIN, the container could otherwise
    remount the shared image with `noacl`, for example, and the image's files would lose their ACLs
    in every container. A container with its own user namespace cannot remount the image, and gets
    an idmapped mount.
    """
    mapped = linux.namespace("user") is not None
    # Without clones of detached mounts no mount of an image is shared.
    shared = not mapped and host.constant_facts().clones_detached
    with closing_fd((open_layer if shared else open_image)(image, images)) as tree:
        if mapped:
            owner = _user_namespace(linux, descriptors)
            _idmap(tree, owner, image.index, recursive=False)
        if not shared:
            return os.dup(tree)
        options = _overlay_options(Overlay(), linux)
        return kernel_mount.open_overlay([tree, image.place], options=options)


def _open_mapped_overlay(
    rootfs: Overlay, linux: Linux, descriptors: NamedDescriptors, options: kernel_mount.Options
) -> int:
    owner = _user_namespace(linux, descriptors)
    layers: list[int] = []
    try:
        for path in rootfs.lower:
            layers.append(_open_read_only(path))
            _idmap(layers[-1], owner, path, recursive=False)
        if len(layers) == 1 and not rootfs.upper:
            return layers.pop()
        _give_to_root(rootfs, linux)
        return open_overlay_of(layers, rootfs.lower, rootfs.upper, rootfs.work, options)
    finally:
        close_all(layers)


def _open_read_only(path: str) -> int:
    """Return a detached, read-only and private bind mount of the folder at `path`."""
    return kernel_mount.open_read_only_clone(path, propagation=MS_PRIVATE)


def overlay_of(mount: Mount) -> Overlay:
    """Parse the options of a mount of type overlay, by the rules of overlayfs; return the layers.

    `lowerdir+` has one path, taken literally. `lowerdir` has several, with `:` between them. In
    `lowerdir`, `upperdir` and `workdir` a backslash escapes the next character.
    """
    layers: list[str] = []
    writable = {"upperdir": "", "workdir": ""}
    volatile = False
    for key, value in MountOptions(mount.options).data:
        if key == "lowerdir+":
            layers.append(value or "")
        elif key == "lowerdir":
            layers = _split_paths(value or "", ":")
        elif key in writable:
            writable[key] = "".join(_split_paths(value or "", ""))
        volatile = volatile or key == "volatile"
    return Overlay(
        tuple(path for path in layers if path), writable["upperdir"], writable["workdir"], volatile
    )


def _split_paths(text: str, separator: str) -> list[str]:
    """Split an option of overlayfs into paths at `separator`; if that is empty, the option is one
    path. A backslash escapes the next character (ovl_parse_param_split_lowerdirs, ovl_unescape)."""
    paths, characters = [""], iter(text)
    for character in characters:
        if character == separator:
            paths.append("")
        else:
            paths[-1] += next(characters, "") if character == "\\" else character
    return paths


def _give_to_root(rootfs: Overlay, linux: Linux) -> None:
    """Make the root user of the container the owner of the overlay's writable folders."""
    uid = rootfs_probe.host_id(0, linux.uid_mappings)
    gid = rootfs_probe.host_id(0, linux.gid_mappings)
    for path in (rootfs.upper, rootfs.work):
        if path:
            os.chown(path, uid, gid)


def _user_namespace(
    linux: Linux,
    descriptors: NamedDescriptors,
    uids: tuple[IdMap, ...] = (),
    gids: tuple[IdMap, ...] = (),
) -> int:
    """Return the descriptor of a user namespace with the id maps `uids` and `gids`, by default the
    container's maps. If the container joins a namespace with these maps, return that namespace,
    else a new one. `descriptors` owns the descriptor and closes it."""
    uids, gids = uids or linux.uid_mappings, gids or linux.gid_mappings
    joined = descriptors.numbers.get("namespace:user")
    if joined is not None and (uids, gids) == (linux.uid_mappings, linux.gid_mappings):
        return joined
    name = f"map:{uids}{gids}"
    if name not in descriptors.numbers:
        descriptors.take(name, open_user_namespace(uids, gids))
    return descriptors.numbers[name]


def _idmap(tree: int, owner: int, what: str, *, recursive: bool) -> None:
    try:
        kernel_mount.idmap(tree, owner, recursive=recursive)
    except KernelError as error:
        raise KernelError(
            "idmap",
            f"'{what}'",
            error.errno,
            _explain_refusal(what) if error.errno == EINVAL else "",
        ) from None


def _explain_refusal(path: str) -> str:
    """Return the probable reason why the kernel refused an idmapped mount of `path` with EINVAL:
    `path` is on a tmpfs before Linux 6.3 (kubelet puts secrets on a tmpfs), or on a file system
    without idmapped mounts."""
    from pyrunc.kernel.mountinfo import mount_of, mount_points

    # From the list of mounts, because statfs(2) asks the storage, which may not answer.
    mount = mount_of(path, mount_points())
    if mount is not None and mount.kind == "tmpfs":
        return "a tmpfs takes no idmapped mounts before Linux 6.3"
    return "the filesystem may not support idmapped mounts"


def binds_in_root(request: CreateRequest) -> dict[int, str]:
    """Return the bind mounts whose source is in the container's root directory and overlaps an
    earlier mount: the source is at, above or below that mount's destination. The result maps the
    index in the spec's mounts to the path of the source in the root. It is empty if the root is not
    a directory of the host.

    Users of runc expect such a bind to show the earlier mount, because runc opens sources in the
    order of the mounts. But runc opens the source's path on the host, where a link in the
    container's files may lead out of the root. Under pyrunc, the container's process resolves the
    path in the root.

    The paths are compared as text. Id-mapped binds are left out: a process in a user namespace may
    not map them.
    """
    spec, rootfs = request.spec, request.rootfs
    if not isinstance(rootfs, Directory) or spec.linux.namespace("mount") is None:
        return {}
    root = os.path.join(request.bundle, rootfs.path)
    roots = [f"{clean(path)}/" for path in dict.fromkeys((root, os.path.realpath(root)))]
    binds: dict[int, str] = {}
    earlier: list[str] = []
    for i, mount in enumerate(spec.mounts):
        if is_plain_bind(mount) and earlier:
            path = f"{clean(os.path.join(request.bundle, mount.source))}/"
            inside = next((path[len(place) - 1 :] for place in roots if path.startswith(place)), "")
            if inside and any(
                inside.startswith(place) or place.startswith(inside) for place in earlier
            ):
                binds[i] = inside.rstrip("/") or "/"
        earlier.append(f"{clean(mount.destination)}/")
    return binds


def open_sources(
    request: CreateRequest, descriptors: NamedDescriptors, own_binds: Collection[int]
) -> None:
    """Open the mounts that the container gets from outside (binds, overlays, images and copies into
    a tmpfs), and add them to `descriptors` as detached mounts. Binds in `own_binds` are left out,
    because the container's process makes them itself."""
    linux = request.spec.linux
    for i, mount in enumerate(request.spec.mounts):
        if not is_tree(mount) or i in own_binds:
            continue
        if copies_up(mount):
            number = open_copy(mount, descriptors.numbers["root"])
        elif not is_bind(mount):
            number = open_overlay(overlay_of(mount), linux, descriptors)
        elif mount.source.startswith(OUR_MOUNTS):
            if _pinned_name(mount) in request.pinned:
                continue
            volume = request.image_volumes.get(_pinned_name(mount))
            if isinstance(volume, Overlay):
                number = open_overlay(volume, linux, descriptors)
            elif volume is not None:
                number = open_image_volume(volume, linux, request.images, descriptors)
            else:
                number = _open_clone(mount.source, request, f"mounts[{i}].source")
        else:
            number = _open_bind(mount, request)
        descriptors.take(f"tree:{i}", number)
        # Overlays of layers and image volumes are mapped already.
        if mount.uid_mappings or "idmap" in mount.options or "ridmap" in mount.options:
            owner = _user_namespace(linux, descriptors, mount.uid_mappings, mount.gid_mappings)
            _idmap(number, owner, mount.source, recursive="ridmap" in mount.options)


def open_devices(spec: Spec, descriptors: NamedDescriptors) -> None:
    """Make the device files of a container with a user namespace, because its process may not call
    mknod. Add each file to `descriptors` as a detached mount. The files belong to the container's
    users. Raises KernelError.

    Does nothing if the kernel cannot clone detached mounts (before Linux 6.15), or if the runtime
    may not make devices. The container's process then bind-mounts the host's devices.
    """
    nodes, machine = devices.nodes_from_outside(spec), host.constant_facts()
    if not nodes or not machine.clones_detached or not devices.may_make(machine):
        return
    linux = spec.linux
    # A tmpfs of the machine's user namespace: one that the container's namespace owns would be
    # `nodev` by force (SB_I_NODEV).
    folder = kernel_mount.open_mount("tmpfs", (("mode", "700"), ("nr_blocks", "1")))
    try:
        for number, op in enumerate(nodes):
            name, kind = str(number), S_IFBLK if op.type == "b" else S_IFCHR
            os.mknod(name, kind, os.makedev(op.major, op.minor), dir_fd=folder)
            os.chown(
                name,
                rootfs_probe.host_id(op.uid, linux.uid_mappings),
                rootfs_probe.host_id(op.gid, linux.gid_mappings),
                dir_fd=folder,
            )
            # mknod(2) applies our umask, which must not be changed in a process with threads.
            os.chmod(name, op.mode, dir_fd=folder)
            node = kernel_mount.open_tree(folder, name, OPEN_TREE_CLONE)
            descriptors.take(f"{rootfs_probe.DEVICE_NAME}{op.path}", node)
            # Without MOUNT_ATTR_NODEV, with which the node could not be opened.
            kernel_mount.mount_setattr(node, attr_set=MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC)
    except OSError as error:
        raise KernelError.of(error, "mknod", f"'{op.path}'") from None
    finally:
        os.close(folder)


def _open_bind(mount: Mount, request: CreateRequest) -> int:
    """Return a detached clone of a bind's source. The source is the descriptor that the caller has
    opened, or else the file at the mount's source path. Raises KernelError, InvalidSpec."""
    if mount.source in request.sources:
        number = request.source_fds.get(mount.source)
        if number is None:
            raise InvalidSpec("mounts", f"no descriptor of {mount.source} was passed")
        return clone_bind(mount, number)
    with closing_fd(
        open_source(os.path.join(request.bundle, mount.source), mount.destination, links=True)
    ) as number:
        return clone_bind(mount, number)


def clone_bind(mount: Mount, source: int) -> int:
    """Return a detached clone of the mount at `source`, the descriptor of a bind source. If `mount`
    has the option `rbind`, the clone includes the mounts below it. The call cannot hang, because it
    does not access the source's storage. Raises KernelError."""
    flags = OPEN_TREE_CLONE | AT_EMPTY_PATH | (AT_RECURSIVE if "rbind" in mount.options else 0)
    try:
        return kernel_mount.open_tree(source, "", flags)
    except KernelError as error:
        raise bind_failed(mount.source, mount.destination, error.errno) from None


def pinned_trees(request: CreateRequest) -> dict[str, str]:
    """Return the mounts that the launching process clones from its pinned mounts: a dict from the
    mount's name in the plan (`tree:INDEX`) to the name of the pinned mount."""
    return {
        f"tree:{i}": _pinned_name(mount)
        for i, mount in enumerate(request.spec.mounts)
        if is_bind(mount)
        and mount.source.startswith(OUR_MOUNTS)
        and _pinned_name(mount) in request.pinned
    }


def _pinned_name(mount: Mount) -> str:
    return mount.source[len(OUR_MOUNTS) :]


def _open_clone(source: str, request: CreateRequest, path: str) -> int:
    """Return a detached clone of the mount NAME in the request's `mount_fds`. Raises InvalidSpec,
    Unsupported, KernelError.

    `source`: `pyrunc:NAME`; `path`: the JSON path of the source, for InvalidSpec.
    """
    name = source[len(OUR_MOUNTS) :]
    mount = request.mount_fds.get(name)
    if mount is None:
        raise InvalidSpec(path, f"the pod has no mount {name!r}")
    try:
        return pinned.clone(mount, request.mount_namespace)
    except Unsupported as error:
        error.add_detail(source)
        raise
