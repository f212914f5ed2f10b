"""Names of the pods' network namespaces: a bind mount of each below one folder, as plugin authors
expect of CNI_NETNS.

A plugin gets the same path for ADD, CHECK and DEL, whatever becomes of the pod's shim. Add-ons
mount the folder into their own pods and find the namespace there: Cilium by the path's last part,
Istio and Antrea by the whole path below /host, multus' daemon by the path itself. So the folder is
/var/run/netns by default, spelled as containerd and CRI-O spell it, and the name is the sandbox's
id.

A name is made before ADD and removed after DEL, by `Network` alone, in every way that a pod can
end: a pod's stop, a roll-back, a restart that finds the pod unfinished, the reconciliation of pods
whose record is lost. The namespace lives as long as its name, so a shim that was killed does not
take it away before DEL.
"""

from __future__ import annotations

import contextlib
import errno
import os

from pyrunc.abi.mount import MNT_DETACH, MS_BIND, UMOUNT_NOFOLLOW
from pyrunc.errors import KernelError, kernel_errors
from pyrunc.kernel.mount import mount, umount2

FOLDER_MODE, FILE_MODE = 0o755, 0o444
_BEFORE_NAMES = "/proc/"
"""Where earlier versions found a pod's namespace: /proc/SHIM/fd/N."""


def is_name(path: str) -> bool:
    """Whether a recorded path is a name; the paths of earlier versions hold only as long as their
    shim."""
    return bool(path) and not path.startswith(_BEFORE_NAMES)


def after_take_over(recorded: str, path: str) -> str:
    """Where a pod's namespace is found when another shim has it at `path`: a name stays."""
    return recorded if is_name(recorded) else path


class NamespaceNames:
    """The names in one folder, which is made when it is not there. All methods touch the kernel,
    none waits for a disk where the folder is on a tmpfs.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def path_of(self, sandbox_id: str) -> str:
        """The name of a sandbox's namespace, whether it is there or not."""
        return os.path.join(self._folder, sandbox_id)

    def make(self, sandbox_id: str, namespace: str) -> str:
        """Name the namespace that is at the path `namespace`. Raises KernelError, leaving nothing
        behind."""
        path = self.path_of(sandbox_id)
        with kernel_errors("open", f"{path!r}, the name of a network namespace"):
            self._make_file(path)
        try:
            mount(namespace, path, None, MS_BIND)
        except KernelError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return path

    def _make_file(self, path: str) -> None:
        flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            os.close(os.open(path, flags, FILE_MODE))
            return
        except FileNotFoundError:
            os.makedirs(self._folder, mode=FOLDER_MODE, exist_ok=True)
        except FileExistsError:  # no attachment has it
            remove(path)
        os.close(os.open(path, flags, FILE_MODE))


def remove(path: str) -> None:
    """Take a name away; fine when it is not there, or is only the file that a reboot left of it.
    Raises KernelError.

    With MNT_DETACH, since add-ons may have the namespace open.
    """
    while os.path.lexists(path):
        try:
            umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW)
        except KernelError as error:
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
