"""Decides a container's mounts: the default filesystems and the pod's files, overridden by the
mounts of the request.

This file does not access host paths. `sources` opens them and checks their mount propagation, in a
thread with a deadline, because their storage may not answer.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.spec import path_length
from pyrunc.compile.image_mount import MountedImage
from pyrunc.errors import InvalidArgument

Mount = dict[str, Any]

# docker's, containerd's and CRI-O's default.
SHM_SIZE_BYTES = 64 << 20
OUR_MOUNTS = "pyrunc:"  # prefix of sources that the shim resolves by name
POD_SHM = f"{OUR_MOUNTS}shm"  # the pod's detached tmpfs, which the shim holds
POD_FILES = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
MOUNT_OPTIONS = ("noexec", "nodev", "nosuid")
# The pod's files are writable data on the node's disk: nothing may be executed (as in CRI-O).
DATA_OPTIONS = ("nosuid", "nodev", "noexec")

PROPAGATION = {
    api.PROPAGATION_PRIVATE: "rprivate",
    api.PROPAGATION_HOST_TO_CONTAINER: "rslave",
    api.PROPAGATION_BIDIRECTIONAL: "rshared",
}


@dataclass(slots=True)
class MountRequest:
    """A checked mount of a CreateContainer request. `source`: the real path on the host, empty
    until the path is resolved."""

    request: api.Mount
    destination: str
    source: str = ""
    # For an image: its unpacked layers, top first, or its mount. `source` is then a name.
    layers: list[str] = field(default_factory=list)
    image: MountedImage | None = None


def check_requests(requests: Iterable[api.Mount]) -> list[MountRequest]:
    """Validate each mount's paths, propagation and flags, and return the mounts with normalized
    destinations. Raises InvalidArgument, which names the mount by its index."""
    return [_check_request(request, f"mounts[{i}]") for i, request in enumerate(requests)]


def _check_request(request: api.Mount, where: str) -> MountRequest:
    if "\0" in request.container_path + request.host_path + request.image_sub_path:
        raise InvalidArgument(f"{where}: a path holds a NUL byte")
    for name in ("container_path", "host_path", "image_sub_path"):
        path_length.check(getattr(request, name), f"{where}: {name}")
    if not request.container_path.startswith("/"):
        raise InvalidArgument(f"{where}: container_path {request.container_path!r} is not absolute")
    destination = posixpath.normpath("/" + request.container_path.lstrip("/"))
    if destination == "/":
        raise InvalidArgument(f"{where}: cannot mount over the container's root")
    if request.propagation not in PROPAGATION:
        raise InvalidArgument(f"{where}: unknown propagation {request.propagation}")
    # Both conditions are CRI's (Mount.recursive_read_only).
    if request.recursive_read_only and not request.readonly:
        raise InvalidArgument(f"{where}: recursive_read_only needs readonly")
    if request.recursive_read_only and request.propagation != api.PROPAGATION_PRIVATE:
        raise InvalidArgument(f"{where}: recursive_read_only needs private propagation")
    wrong = [o for o in request.mount_options if o not in MOUNT_OPTIONS]
    if wrong:
        raise InvalidArgument(
            f"{where}: mount option {wrong[0]!r} is not one of {', '.join(MOUNT_OPTIONS)}"
        )
    if request.HasField("image") and request.image.image:
        _check_image(request, where)
    elif not request.host_path.startswith("/"):
        raise InvalidArgument(f"{where}: host_path {request.host_path!r} is not absolute")
    return MountRequest(request, destination)


def _check_image(request: api.Mount, where: str) -> None:
    if request.host_path:
        raise InvalidArgument(f"{where}: an image volume takes no host_path")
    if not request.readonly:
        raise InvalidArgument(f"{where}: an image volume must be readonly")
    if request.image_sub_path.startswith("/") or ".." in request.image_sub_path.split("/"):
        raise InvalidArgument(
            f"{where}: image_sub_path {request.image_sub_path!r} leaves the image"
        )


def defaults(
    files: str,
    *,
    ipc: int,
    shared_shm: bool,
    privileged: bool,
    readonly_root: bool,
    writable_cgroup: bool = False,
    sysfs_bind: bool = False,
) -> list[Mount]:
    """Return the default mounts of a container.

    - `files`: the folder on the host with the files of POD_FILES.
    - `ipc`: the container's effective IPC namespace mode.
    - `shared_shm`: the pod has its own /dev/shm mount.
    - `privileged`: mount /sys (unless `sysfs_bind`) and /sys/fs/cgroup writable.
    - `readonly_root`: mount the pod's files read-only, too.
    - `writable_cgroup`: mount /sys/fs/cgroup writable even without privilege.
    - `sysfs_bind`: bind the host's /sys read-only, because the container's user namespace may not
      mount sysfs.
    """
    access = "rw" if privileged else "ro"
    cgroup_access = "rw" if writable_cgroup else access
    result = [
        _fs("/proc", "proc", ["nosuid", "noexec", "nodev"]),
        # The options of containerd's default spec; 5 is the group tty of Debian, Fedora and Alpine.
        _fs("/dev", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
        _fs(
            "/dev/pts",
            "devpts",
            ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        _fs("/dev/mqueue", "mqueue", ["nosuid", "noexec", "nodev"]),
        _sysfs(access, sysfs_bind),
        _fs("/sys/fs/cgroup", "cgroup", ["nosuid", "noexec", "nodev", "relatime", cgroup_access]),
        _shm(ipc, shared_shm),
    ]
    file_access = "ro" if readonly_root else "rw"
    for destination in POD_FILES:
        source = f"{files}/{posixpath.basename(destination)}"
        result.append(bind(source, destination, ["rbind", "rprivate", *DATA_OPTIONS, file_access]))
    return result


def _sysfs(access: str, bound: bool) -> Mount:
    """Return the mount of /sys: sysfs with `access` (`ro` or `rw`), or a read-only bind of the
    host's /sys if `bound`."""
    if bound:
        # The kernel mounts sysfs only for a user namespace that owns the network namespace
        # (fs/sysfs/mount.c, kobj_ns_current_may_mount).
        return bind("/sys", "/sys", ["rbind", "rprivate", "nosuid", "noexec", "nodev", "ro"])
    return _fs("/sys", "sysfs", ["nosuid", "noexec", "nodev", access])


def _shm(ipc: int, shared: bool) -> Mount:
    if ipc == api.NODE:
        return bind("/dev/shm", "/dev/shm", ["rbind", "rprivate", "rw"])
    if ipc == api.POD and shared:
        return bind(POD_SHM, "/dev/shm", ["bind", "rprivate", "rw"])
    return _fs(
        "/dev/shm", "tmpfs", ["nosuid", "noexec", "nodev", "mode=1777", f"size={SHM_SIZE_BYTES}"]
    )


def merge(default: Sequence[Mount], requested: Sequence[MountRequest]) -> list[Mount]:
    """Combine default and requested mounts; return them ordered by the depth of their destination.

    A requested mount replaces the default mount at its destination, and removes the default mounts
    below: a container with the host's /sys sees the host's cgroups, as under containerd. The pod's
    files (hosts, hostname, resolv.conf) stay mounted even over the host's /etc.
    """
    occupied = {a.destination for a in requested}
    covered = tuple(
        f"{a.destination}/" for a in requested if a.request.host_path or a.image or a.layers
    )
    remaining = [
        mount
        for mount in default
        if mount["destination"] not in occupied
        and (mount["destination"] in POD_FILES or not mount["destination"].startswith(covered))
    ]
    return by_depth(remaining + [to_oci(a) for a in requested])


def by_depth(mounts: Iterable[Mount]) -> list[Mount]:
    """Return the mounts ordered by the depth of their destination."""
    # A mount at a parent folder would hide one that was made before. The sort is stable, so that
    # mounts of the same depth keep their order: requests stay behind the defaults.
    return sorted(mounts, key=lambda m: len([p for p in m["destination"].split("/") if p]))


def to_oci(mount_request: MountRequest) -> Mount:
    """Convert a requested mount, whose source is resolved, to an OCI mount."""
    request = mount_request.request
    extra = sorted(set(request.mount_options))
    if mount_request.image is not None or mount_request.layers:
        return bind(
            mount_request.source,
            mount_request.destination,
            # Not noexec: programs of an image volume may be meant to run (critest executes one).
            ["bind", "rprivate", "ro", "nosuid", "nodev", *extra],
        )
    access = "ro" if request.readonly else "rw"
    options = [
        "rbind",
        PROPAGATION[request.propagation],
        "rro" if request.recursive_read_only else access,
        *extra,
    ]
    mount = bind(mount_request.source, mount_request.destination, options)
    for key, maps in (("uidMappings", request.uidMappings), ("gidMappings", request.gidMappings)):
        if maps:
            mount[key] = [
                {"containerID": m.container_id, "hostID": m.host_id, "size": m.length} for m in maps
            ]
    return mount


def root_propagation(requested: Iterable[MountRequest]) -> str:
    """Return OCI's `linux.rootfsPropagation`: `rshared` if a requested mount is bidirectional, else
    `rslave` if one is host-to-container, else empty for the default."""
    kinds = {a.request.propagation for a in requested}
    if api.PROPAGATION_BIDIRECTIONAL in kinds:
        return "rshared"
    return "rslave" if api.PROPAGATION_HOST_TO_CONTAINER in kinds else ""


def bind(source: str, destination: str, options: list[str]) -> Mount:
    return {"destination": destination, "type": "bind", "source": source, "options": options}


def _fs(destination: str, kind: str, options: list[str]) -> Mount:
    return {"destination": destination, "type": kind, "source": kind, "options": options}


OWN_PLACES = frozenset(
    mount["destination"]
    for mount in defaults("", ipc=api.POD, shared_shm=False, privileged=False, readonly_root=False)
)
"""The destinations of the default mounts."""
