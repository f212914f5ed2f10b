"""Resolves the host paths of mounts and devices. Every function here may hang on a filesystem that
does not answer. So `run_with_deadline` runs such a function in a thread, and abandons the thread
after the deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import posixpath
import stat
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cri_server.api import api_pb2 as api
from cri_server.operations import threads
from cri_server.spec import path_length
from cri_server.spec.mounts import MountRequest
from cri_server.spec.open_sources import OpenSources
from cri_server.spec.user import home_of
from pyrunc.compile.bind_source import open_source
from pyrunc.compile.rootfs_probe import read_mounted_passwd
from pyrunc.errors import DeadlineExceeded, InvalidArgument, KernelError
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.mountinfo import MountPoint, mount_of, mount_points
from pyrunc.kernel.path import clean, open_folder_at

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class HostDevice:
    """A device node of the host and its path in the container. `type`: `c` or `b`; `access`:
    letters of `rwm` that the container's cgroup permits."""

    path: str
    type: str
    major: int
    minor: int
    file_mode: int
    uid: int
    gid: int
    access: str = "rwm"

    def to_oci(self) -> dict[str, Any]:
        """Return the fields of an OCI device except its path."""
        return {
            "type": self.type,
            "major": self.major,
            "minor": self.minor,
            "fileMode": self.file_mode,
            "uid": self.uid,
            "gid": self.gid,
        }


async def run_with_deadline(
    timeout_s: float,
    what: str | Callable[[], str],
    function: Callable[..., Result],
    *arguments: Any,
    discard: Callable[[Result], object] | None = None,
) -> Result:
    """Run `function(*arguments)` in a daemon thread and return its result.

    After `timeout_s` raises DeadlineExceeded and abandons the thread, because nothing can interrupt
    a system call that waits for storage. `what`: the path, or other thing that is read, for the
    error message; or a function that returns this text. A result that comes later is passed to
    `discard`.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # a cancelled waiter cannot cancel a running future

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    name = what if isinstance(what, str) else function.__name__
    # Not an executor: its threads are few, a hung one is not given back, and the interpreter waits
    # for all of them at its exit (concurrent.futures).
    threads.start(f"path {name[:60]}", run)
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(future)
    except BaseException as error:
        if discard is not None:
            future.add_done_callback(lambda late: late.exception() or discard(late.result()))
        if not isinstance(error, TimeoutError):
            raise
        subject = what if isinstance(what, str) else what()
        log.warning("%s did not answer within %g s; its thread is abandoned", subject, timeout_s)
        raise DeadlineExceeded(f"{subject} did not answer within {timeout_s:g} s") from None


def resolve(requested: list[MountRequest], open_sources: OpenSources) -> None:
    """Open the source of each requested bind mount and set its real path. A missing source is
    created as a directory, as in other runtimes.

    Raises KernelError, and InvalidArgument if the source's mount does not allow the requested
    propagation.
    """
    table: list[MountPoint] | None = None
    for mount in requested:
        if mount.source:
            continue
        mount.source = open_real(mount.request.host_path, mount.destination, open_sources)
        if mount.request.propagation != api.PROPAGATION_PRIVATE:
            table = table if table is not None else list(mount_points())
            _check_propagation(mount, table)


def open_real(path: str, destination: str, open_sources: OpenSources) -> str:
    """Open a host path and add its descriptor to `open_sources`; return the path with all symlinks
    resolved. Creates missing directories at the end of the path. Raises KernelError."""
    open_sources.begin(path)
    try:
        number, real = open_source(path, destination, links=False), clean(path)
    except KernelError:  # it has links, or does not exist
        real = real_path(path)
        number = open_source(real, destination, links=False)
    open_sources.add(real, destination, number, real)
    return real


def read_home(mount: int, path: str, uid: int) -> str:
    """Return the home of user `uid` from the passwd file at `path` in `mount`, the descriptor of a
    bind source. Return `/` if the file does not list the user, or is not a regular file of at most
    1 MiB. Closes `mount`. Can hang."""
    with closing_fd(mount), contextlib.suppress(KernelError):
        return home_of(uid, read_mounted_passwd(mount, path))
    return "/"


def real_path(path: str) -> str:
    """Return `path` with all symbolic links resolved; create missing directories at its end.

    A dangling link is an error, because the link's owner would choose what is created on the host.
    Raises KernelError.
    """
    existing, missing = path, list[str]()
    try:
        while not os.path.lexists(existing):
            existing, name = posixpath.split(existing.rstrip("/"))
            missing.insert(0, name)
        resolved = os.path.realpath(existing, strict=True)
        if missing:
            resolved = posixpath.normpath(posixpath.join(resolved, *missing))
            make_folders(resolved)
        return resolved
    except OSError as error:
        note = f"{existing!r} is a link that leads nowhere" if os.path.islink(existing) else ""
        raise KernelError.of(error, "mkdir", repr(path), note) from None


def make_folders(resolved: str) -> None:
    """Make the directory `resolved` and its missing parents. Opens each one relative to its
    parent's descriptor, so that a symlink which replaces a component meanwhile is not followed."""
    folder = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in resolved.strip("/").split("/"):
            below = open_folder_at(folder, name)
            os.close(folder)
            folder = below
    finally:
        os.close(folder)


def _check_propagation(mount: MountRequest, table: list[MountPoint]) -> None:
    covering = mount_of(mount.source, table)
    tags = covering.propagation if covering is not None else set()
    needed = (
        {"shared"}
        if mount.request.propagation == api.PROPAGATION_BIDIRECTIONAL
        else {"shared", "master"}
    )
    # As containerd's ensureShared and ensureSharedOrSlave: on a private mount nothing would ever
    # propagate, without an error.
    if not tags & needed:
        word = " or ".join("slave" if n == "master" else n for n in sorted(needed, reverse=True))
        raise InvalidArgument(f"path {mount.request.host_path!r} is not on a {word} mount")


def devices(requests: list[api.Device]) -> list[HostDevice]:
    """Find the requested devices on the host. A directory stands for all device nodes below it.

    Raises InvalidArgument for invalid permissions, and for paths that are not devices.
    """
    devices = []
    for i, request in enumerate(requests):
        access = request.permissions or "rwm"
        if set(access) - set("rwm"):
            raise InvalidArgument(f"devices[{i}]: permissions {access!r} are not a subset of rwm")
        path_length.check(request.host_path, f"devices[{i}]: host_path")
        path_length.check(request.container_path, f"devices[{i}]: container_path")
        if not request.host_path.startswith("/"):
            raise InvalidArgument(f"devices[{i}]: host_path {request.host_path!r} is not absolute")
        target = request.container_path or request.host_path
        if not target.startswith("/"):
            raise InvalidArgument(f"devices[{i}]: container_path {target!r} is not absolute")
        if posixpath.normpath("/" + target.lstrip("/")) == "/":
            raise InvalidArgument(f"devices[{i}]: container_path {target!r} is the root folder")
        nodes = _nodes(os.path.realpath(request.host_path), target)
        if not nodes:
            raise InvalidArgument(f"devices[{i}]: {request.host_path!r} is not a device")
        devices += [replace(node, access=access) for node in nodes]
    return devices


def all_devices() -> list[HostDevice]:
    """Return all device nodes in the host's /dev, except terminals and the nodes that every
    container has."""
    own = {"/dev/console", "/dev/pts", "/dev/shm", "/dev/mqueue", "/dev/fd", "/dev/lxc"}
    return [node for node in _nodes("/dev", "/dev", own) if not node.path.startswith("/dev/pts/")]


def device_facts(path: str) -> HostDevice:
    """Return the host's device at `path`; follows symlinks. Raises InvalidArgument if `path` is not
    a device."""
    nodes = _nodes(os.path.realpath(path), path)
    if len(nodes) != 1:
        raise InvalidArgument(f"{path!r} is not a device")
    return nodes[0]


def _nodes(
    source: str, target: str, skip: set[str] | frozenset[str] = frozenset()
) -> list[HostDevice]:
    try:
        return _nodes_at(source, target, skip)
    except OSError as error:
        raise InvalidArgument(f"device {source!r}: {error.strerror}") from None


def _nodes_at(source: str, target: str, skip: set[str] | frozenset[str]) -> list[HostDevice]:
    node_stat = os.lstat(source)
    if stat.S_ISDIR(node_stat.st_mode):
        nodes = []
        for name in sorted(os.listdir(source)):
            path = f"{source}/{name}"
            if path not in skip and not os.path.islink(path):
                with contextlib.suppress(FileNotFoundError):  # unplugged since listdir
                    nodes += _nodes_at(path, f"{target}/{name}", skip)
        return nodes
    if not stat.S_ISCHR(node_stat.st_mode) and not stat.S_ISBLK(node_stat.st_mode):
        return []
    return [
        HostDevice(
            path=target,
            type="c" if stat.S_ISCHR(node_stat.st_mode) else "b",
            major=os.major(node_stat.st_rdev),
            minor=os.minor(node_stat.st_rdev),
            file_mode=stat.S_IMODE(node_stat.st_mode),
            uid=node_stat.st_uid,
            gid=node_stat.st_gid,
        )
    ]
