"""Creates, finds and removes the folder that `run` makes for the logs and volumes of a pod.

`rm` finds the folder by its file `pod`, which contains the pod's id. The path never comes from the
pod's annotations, because users who may create pods control annotations, and `rm` deletes as root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.tree import remove_tree

# On a disk, because logs and volumes grow; outside the server's root, which `gc` cleans.
DEFAULT = Path("/var/lib/pyrunc-pods")
OWNER = "pod"  # the file with the id of the pod that the folder belongs to


def option(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a click decorator for the option `--folder`. `text` is its help."""
    return click.option(
        "--folder",
        type=click.Path(path_type=Path),
        default=DEFAULT,
        show_default=True,
        envvar="PYRUNC_CRI_FOLDER",
        help=text,
    )


def make(base: Path, namespace: str, name: str) -> Path:
    """Create a folder for a pod below `base`, accessible only to this user, and return its path.
    Raises OSError."""
    base.mkdir(parents=True, exist_ok=True)
    folder = base.absolute() / f"{namespace}_{name}_{time.time_ns():x}"
    # An emptyDir below is writable for everyone, as in kubelet.
    folder.mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def locked(base: Path) -> Iterator[None]:
    """Hold the lock of the folder `base` during the `with` block, so that only one `run` at a time
    starts a pod. Raises OSError."""
    with closing_fd(os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as number:
        # A lock on a file in the folder could be lost with the file, when the folder is cleaned.
        fcntl.flock(number, fcntl.LOCK_EX)
        yield


def set_owner(folder: Path, pod: str) -> None:
    """Record in `folder` that it belongs to the pod with the id `pod`. Raises OSError."""
    (folder / OWNER).write_text(pod)


def folders_of(base: Path, pod: str) -> list[Path]:
    """Return the folders below `base` that `run` made for a pod: one, or none. Raises OSError."""
    # Another user may have put a folder with such a file there: only those of this user count.
    marks = base.glob(f"*/{OWNER}")
    return [
        mark.parent
        for mark in marks
        if mark.parent.lstat().st_uid == os.geteuid() and mark.read_text() == pod
    ]


def change_owner(base: Path, pod: str, successor: str) -> None:
    """Record that the folder of the pod `pod` now belongs to the pod `successor`. Does nothing if
    `run` did not make the pod. Raises OSError."""
    for folder in folders_of(base, pod):
        set_owner(folder, successor)


def remove(base: Path, pod: str) -> None:
    """Delete the folder of a pod. Does nothing if `run` did not make the pod. Raises OSError."""
    for folder in folders_of(base, pod):
        delete(folder)


def delete(folder: Path) -> None:
    """Delete a folder of any depth with everything in it, if it exists. Raises OSError."""
    with closing_fd(os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as parent:
        remove_tree(parent, folder.name)
