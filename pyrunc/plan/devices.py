"""Device files: the six that every container has, the ones that were asked for, and the links of /dev.

runtime-spec config-linux.md, "Default Devices" and "Dev symbolic links". A container that brings its own /dev by a bind
mount keeps it as it is.
"""

from __future__ import annotations

from pyrunc.plan.model import MakeDevice, Symlink
from pyrunc.plan.mounts import is_bind, normal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.plan.model import Op
    from pyrunc.spec.model import Spec

DEFAULT = (
    ("/dev/null", 1, 3),
    ("/dev/zero", 1, 5),
    ("/dev/full", 1, 7),
    ("/dev/random", 1, 8),
    ("/dev/urandom", 1, 9),
    ("/dev/tty", 5, 0),
)
_DEFAULT_OPS = tuple(MakeDevice(path, "c", major, minor) for path, major, minor in DEFAULT)
_LINKS = (
    Symlink("/dev/fd", "/proc/self/fd"),
    Symlink("/dev/stdin", "/proc/self/fd/0"),
    Symlink("/dev/stdout", "/proc/self/fd/1"),
    Symlink("/dev/stderr", "/proc/self/fd/2"),
)
_PTMX = Symlink("/dev/ptmx", "pts/ptmx", over=True)
_CORE = Symlink("/dev/core", "/proc/kcore")


def operations(spec: Spec, kcore: bool) -> list[Op]:
    """Nodes, then links. A listed device replaces the default of its path; a listed ptmx is left to the link."""
    destinations = {normal(mount.destination): mount for mount in spec.mounts}
    dev = destinations.get("/dev")
    if dev is not None and is_bind(dev):
        return []
    asked = {normal(device.path): device for device in spec.linux.devices}
    ops: list[Op] = [op for op in _DEFAULT_OPS if op.path not in asked]
    for path, device in asked.items():
        if path == "/dev/ptmx":
            continue
        mode = 0o666 if device.file_mode is None else device.file_mode & 0o7777
        ops.append(MakeDevice(path, device.type, device.major, device.minor, mode, device.uid, device.gid))
    if "/proc" in destinations:
        ops += _LINKS
        if kcore:
            ops.append(_CORE)
    if "/dev/ptmx" not in destinations:
        ops.append(_PTMX)
    return ops
