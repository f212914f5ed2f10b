"""Plans device files (the six that every container has, and those of the configuration) and the
links in /dev.

Source: runtime-spec config-linux.md, "Default Devices" and "Dev symbolic links". If the
configuration bind-mounts something on /dev, nothing is made in it.
"""

from __future__ import annotations

from pyrunc.abi.capability import CAPABILITIES
from pyrunc.kernel.path import clean
from pyrunc.plan.model import AttachDevice, MakeDevice, Symlink
from pyrunc.plan.mounts import is_bind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyrunc.plan.model import HostFacts, Op
    from pyrunc.spec.model import Mount, Spec

DEFAULT = (
    ("/dev/null", 1, 3),
    ("/dev/zero", 1, 5),
    ("/dev/full", 1, 7),
    ("/dev/random", 1, 8),
    ("/dev/urandom", 1, 9),
    ("/dev/tty", 5, 0),
)
# Keys: (/dev is a new tmpfs, the device may have to be a bind)
_DEFAULT_OPS = {
    (fresh, bind): tuple(
        MakeDevice(path, "c", major, minor, fresh=fresh, bind=bind)
        for path, major, minor in DEFAULT
    )
    for fresh in (False, True)
    for bind in (False, True)
}
_LINKS = (
    Symlink("/dev/fd", "/proc/self/fd"),
    Symlink("/dev/stdin", "/proc/self/fd/0"),
    Symlink("/dev/stdout", "/proc/self/fd/1"),
    Symlink("/dev/stderr", "/proc/self/fd/2"),
)
# Relative, so that the link is right from outside of the container, too.
_PTMX = Symlink("/dev/ptmx", "pts/ptmx", over=True)
_FRESH_PTMX = Symlink("/dev/ptmx", "pts/ptmx")
_CORE = Symlink("/dev/core", "/proc/kcore")


def operations(spec: Spec, host: HostFacts, outside: Mapping[str, str] = {}) -> list[Op]:
    """Plan the device nodes, then the links. Return nothing if the configuration bind-mounts
    something on /dev. A device of the configuration replaces the default device at the same path. A
    configured /dev/ptmx is ignored, because /dev/ptmx is a link.

    `outside`: path -> name of the descriptor of a node that the compiler has made
    (`nodes_from_outside`).
    """
    destinations = {clean(mount.destination): mount for mount in spec.mounts}
    # A bind at /dev is a folder of the host: nodes that are made in it would stay there.
    if _has_own_dev(destinations):
        return []
    dev = destinations.get("/dev")
    covered = any(path in destinations for path, _, _ in DEFAULT)
    fresh = dev is not None and dev.type == "tmpfs" and not covered
    # In a user namespace mknod(2) fails with EPERM, so the host's node is bound instead.
    bind = not may_make(host) or spec.linux.namespace("user") is not None
    nodes = _nodes(spec, fresh, bind)
    ops: list[Op] = [
        AttachDevice(op, outside[op.path]) if op.path in outside else op for op in nodes
    ]
    if "/proc" in destinations:
        ops += _LINKS
        if host.kcore:
            ops.append(_CORE)
    if "/dev/ptmx" not in destinations:
        ops.append(_PTMX if not fresh else _FRESH_PTMX)
    return ops


def may_make(host: HostFacts) -> bool:
    """Return whether the runtime may make devices: mknod(2) needs CAP_MKNOD in the initial user
    namespace."""
    return bool(host.capabilities >> CAPABILITIES["CAP_MKNOD"] & 1) and not host.in_user_namespace


def nodes_from_outside(spec: Spec) -> list[MakeDevice]:
    """Return the device nodes that the compiler makes on the host, outside the container, because
    mknod(2) is not permitted in the container's user namespace. FIFOs are left out; the container's
    process can make them.

    Empty without a user namespace, without a mount namespace, and if the configuration bind-mounts
    something on /dev.
    """
    if spec.linux.namespace("user") is None or spec.linux.namespace("mount") is None:
        return []
    if _has_own_dev({clean(mount.destination): mount for mount in spec.mounts}):
        return []
    return [op for op in _nodes(spec, False, True) if op.type != "p"]


def _nodes(spec: Spec, fresh: bool, bind: bool) -> list[MakeDevice]:
    listed = {clean(device.path): device for device in spec.linux.devices}
    nodes = [op for op in _DEFAULT_OPS[fresh, bind] if op.path not in listed]
    for path, device in listed.items():
        # runtime-spec, "Default Devices": ptmx is a link to, or a bind of, the one in the
        # container's devpts.
        if path == "/dev/ptmx":
            continue
        mode = 0o666 if device.file_mode is None else device.file_mode & 0o7777
        owner = device.uid, device.gid
        nodes.append(
            MakeDevice(path, device.type, device.major, device.minor, mode, *owner, False, bind)
        )
    return nodes


def _has_own_dev(destinations: Mapping[str, Mount]) -> bool:
    """Return whether the configuration bind-mounts something on /dev. If it does, pyrunc creates
    nothing in /dev."""
    dev = destinations.get("/dev")
    return dev is not None and is_bind(dev)
