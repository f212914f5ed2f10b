"""Names the pods' network namespaces: each namespace gets a bind mount in one folder, and plugins
get the mount's path as CNI_NETNS.

A plugin gets the same path for ADD, CHECK and DEL, even if the pod's shim is replaced. So the name
is the sandbox's id, and the folder is /var/run/netns by default, spelled as in containerd and
CRI-O. Add-ons mount this folder into their own pods. There they find the namespace:

- Cilium by the last component of the path;
- Istio and Antrea by the whole path below /host;
- multus' daemon by the path itself.

Only `NetworkService` makes names, before ADD, and removes them, after DEL. DEL runs when a pod is
stopped, when an ADD is rolled back, and when a restarted server cleans up unfinished or unrecorded
pods. The bind mount keeps the namespace alive. So the namespace still exists at DEL when the pod's
shim has been killed.
"""

from __future__ import annotations

import contextlib
import errno
import os

from pyrunc.abi.mount import MNT_DETACH, MS_BIND, UMOUNT_NOFOLLOW
from pyrunc.errors import KernelError, kernel_errors
from pyrunc.kernel.mount import mount, umount2

FOLDER_MODE, FILE_MODE = 0o755, 0o444
_UNNAMED_PREFIX = "/proc/"
"""The prefix of paths that earlier versions recorded: /proc/SHIM/fd/N."""


def is_name(path: str) -> bool:
    """Return whether `path`, recorded for a network namespace, is a bind mount made by
    NamespaceNames. Earlier versions recorded /proc/SHIM/fd/N, which is valid only while that shim
    lives."""
    return bool(path) and not path.startswith(_UNNAMED_PREFIX)


def path_after_take_over(recorded: str, path: str) -> str:
    """Return the path to record for a pod's network namespace after another shim has taken over the
    pod: `recorded` if this is a bind mount, which stays valid; else `path`, which is in the new
    shim's folder in /proc."""
    return recorded if is_name(recorded) else path


class NamespaceNames:
    """Bind-mounts network namespaces in one folder, which is created when missing. If the folder is
    on a tmpfs, the methods do not block."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def path_of(self, sandbox_id: str) -> str:
        """Return the path of the bind mount of a sandbox's network namespace, whether it exists or
        not."""
        return os.path.join(self._folder, sandbox_id)

    def make(self, sandbox_id: str, namespace: str) -> None:
        """Bind-mount the network namespace at `namespace` on `path_of(sandbox_id)`. Replaces a file
        that an earlier pod has left there. Raises KernelError, and then leaves no file."""
        path = self.path_of(sandbox_id)
        with kernel_errors("open", f"{path!r}, the name of a network namespace"):
            self._make_file(path)
        try:
            mount(namespace, path, None, MS_BIND)
        except KernelError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise

    def _make_file(self, path: str) -> None:
        flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            os.close(os.open(path, flags, FILE_MODE))
            return
        except FileNotFoundError:
            # The default folder is on a tmpfs, and gone after each boot.
            os.makedirs(self._folder, mode=FOLDER_MODE, exist_ok=True)
        except FileExistsError:  # left over: no attachment uses it
            remove(path)
        os.close(os.open(path, flags, FILE_MODE))


def remove(path: str) -> None:
    """Unmount the network namespace that is bound at `path`, and unlink the file. After a reboot
    only the file is left. Does nothing if `path` does not exist. Raises KernelError."""
    # In a loop, because mounts may lie on each other. UMOUNT_NOFOLLOW: a link in the folder must
    # not lead to another mount.
    while os.path.lexists(path):
        try:
            # MNT_DETACH: add-ons may have the namespace open, and umount(2) would give EBUSY.
            umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW)
        except KernelError as error:
            # EINVAL: the file is no mount point (umount(2)).
            if error.errno not in (errno.EINVAL, errno.ENOENT):
                raise
            break
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise KernelError.of(
            error, "unlink", f"{path!r}, the name of a network namespace"
        ) from None
