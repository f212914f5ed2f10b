"""The folder with logs and volumes that `run` makes for a pod, and how `rm` finds it again.

A file in the folder holds the pod's id. What a pod says of itself, its annotations above all, is
never a path: kubelet copies them from whoever may create pods, and `rm` deletes as root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from pyrunc.kernel.tree import remove_tree

DEFAULT = Path(
    "/var/lib/pyrunc-pods"
)  # a disk: logs and volumes grow; not the server's root, whose garbage it collects
OWNER = "pod"  # the file with the id of the pod that the folder belongs to


def option(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`--folder` of a command."""
    return click.option(
        "--folder",
        type=click.Path(path_type=Path),
        default=DEFAULT,
        show_default=True,
        envvar="PYRUNC_CRI_FOLDER",
        help=text,
    )


def make(base: Path, namespace: str, name: str) -> Path:
    """A new folder for a pod, closed to other users: its volumes are writable for everybody. Raises
    OSError."""
    base.mkdir(parents=True, exist_ok=True)
    folder = base.absolute() / f"{namespace}_{name}_{time.time_ns():x}"
    folder.mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def locked(base: Path) -> Iterator[None]:
    """While inside, no other `run` with this folder is. Raises OSError."""
    number = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def give(folder: Path, pod: str) -> None:
    """The folder belongs to the pod of this id from now on. Raises OSError."""
    (folder / OWNER).write_text(pod)


def owned(base: Path, pod: str) -> list[Path]:
    """The folders beneath `base` that `run` made for the pod of this id: one or none. Raises
    OSError."""
    marks = base.glob(f"*/{OWNER}")
    return [
        mark.parent
        for mark in marks
        if mark.parent.lstat().st_uid == os.geteuid() and mark.read_text() == pod
    ]


def pass_on(base: Path, pod: str, successor: str) -> None:
    """The folder of the pod, if `run` made one beneath `base`, belongs to the pod `successor` from
    now on. Raises OSError."""
    for folder in owned(base, pod):
        give(folder, successor)


def remove(base: Path, pod: str) -> None:
    """Delete the folder of a pod; fine when `run` made none beneath `base`. Raises OSError."""
    for folder in owned(base, pod):
        delete(folder)


def delete(folder: Path) -> None:
    """Remove a folder with what containers have put in it, however deep; fine when it is missing.
    Raises OSError."""
    parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        remove_tree(parent, folder.name)
    finally:
        os.close(parent)
