"""`pyrunc-cri cp`: files between this machine and a running container, by docker's rules for what
the destination means."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

import click

from cri_server.cli.arguments import completion
from cri_server.cli.connection.client import Client
from cri_server.cli.containers import archive as archives
from cri_server.cli.containers.container_root import ContainerRoot
from cri_server.cli.containers.file_copy import FOLDER, Copy
from cri_server.cli.output.complaint import complain
from cri_server.cli.output.progress import Progress
from pyrunc.errors import InvalidArgument, KernelError, WrongState, kernel_errors
from pyrunc.kernel.path import open_in_root, resolve


@dataclass(frozen=True, slots=True)
class Place:
    """A path, in a container or (`container` is empty) here; `-` here is an archive on stdin or
    stdout."""

    container: str
    path: str

    @property
    def is_archive(self) -> bool:
        return not self.container and self.path == "-"


def parse(text: str) -> Place:
    """`CONTAINER:PATH` or `POD/NAME:PATH`, else a path here, which begins with `.` or `/` when it
    has a colon."""
    container, colon, path = text.partition(":")
    if colon and container and not container.startswith((".", "/")):
        return Place(container, "/" + path.lstrip("/"))
    return Place("", text if text.startswith("/") or text == "-" else f"{os.getcwd()}/{text}")


@click.command()
@click.argument("source", metavar="[CONTAINER:]SOURCE|-", shell_complete=completion.containers)
@click.argument(
    "destination", metavar="[CONTAINER:]DESTINATION|-", shell_complete=completion.containers
)
@click.option("-a", "--archive", "keep_owner", is_flag=True, help="Keep owners and groups.")
@click.option(
    "-L", "--follow-link", "follow", is_flag=True, help="Copy what a link SOURCE leads to."
)
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@click.pass_obj
def cp(
    address: str, source: str, destination: str, keep_owner: bool, follow: bool, quiet: bool
) -> None:
    """Copy files and folders to or from a running container; `-` is a tar archive on stdin or
    stdout.

    A folder that ends with `/.` means what is in it. A destination that is a folder gets the source
    into it; else it is the new name. Needs root on the server's machine.
    """
    taken, given = parse(source), parse(destination)
    if bool(taken.container) == bool(given.container):
        raise InvalidArgument("one of SOURCE and DESTINATION is in a container: CONTAINER:PATH")
    name = taken.container or given.container
    with Client(address) as client, contextlib.ExitStack() as stack:
        root = stack.enter_context(ContainerRoot(client, client.container(name).id, name))
        here = stack.enter_context(_folder_at(None, "/"))
        progress = stack.enter_context(
            Progress(f"copying {source}", quiet=quiet or given.is_archive)
        )
        owner = root.owner if given.container else None
        copy = Copy(progress.add, complain, keep_owner=keep_owner, owner=owner)
        source_root = root.descriptor if taken.container else here
        if given.is_archive:
            with _last(source_root, taken.path, follow) as (folder, last):
                archives.write(folder, last)
        elif taken.is_archive:
            with _folder_at(root.descriptor, given.path) as target:
                archives.extract(copy, target)
        else:
            target_root = root.descriptor if given.container else here
            between(copy, (source_root, taken.path), (target_root, given.path), follow=follow)


def between(
    copy: Copy, source: tuple[int, str], destination: tuple[int, str], *, follow: bool = False
) -> None:
    """Copy by docker's rules; both are a root's descriptor and an absolute path in it. Raises
    Error, OSError."""
    (source_root, source_path), (root, path) = source, destination
    contents = source_path.endswith("/.") or not source_path.strip("/")
    with _last(source_root, source_path, follow) as (folder, name), contextlib.ExitStack() as stack:
        is_folder = stat.S_ISDIR(_status(folder, name, source_path).st_mode)
        if source_path.endswith("/") and not is_folder:
            raise WrongState(f"{source_path}: is not a folder")
        try:
            target = stack.enter_context(_folder_at(root, path))
        except KernelError:
            if path.endswith("/") and not is_folder:
                raise WrongState(f"{path}: is not a folder") from None
            above, new = stack.enter_context(_last(root, path, False))
            copy.one(folder, name, above, new)
            return
        if is_folder and contents:
            inner = os.open(name, FOLDER, dir_fd=folder)
            stack.callback(os.close, inner)
            copy.contents(inner, target)
        else:
            copy.one(folder, name, target, name)


@contextlib.contextmanager
def _last(root: int, path: str, follow: bool) -> Iterator[tuple[int, str]]:
    """The folder that holds the last name of a path, and that name; `.` for the root. Raises
    KernelError."""
    path = resolve(root, path) if follow else path
    while path.endswith(("/", "/.")):
        path = path.removesuffix("/").removesuffix("/.")
    above, _, name = path.rpartition("/")
    if name == "..":
        raise InvalidArgument(f"{path}: ends with '..'")
    with _folder_at(root, above or "/") as folder:
        yield folder, name or "."


@contextlib.contextmanager
def _folder_at(root: int | None, path: str) -> Iterator[int]:
    """Raises KernelError when there is no folder at the path."""
    flags = os.O_RDONLY | os.O_DIRECTORY
    number = (
        os.open(path, flags | os.O_CLOEXEC) if root is None else open_in_root(root, path, flags)
    )
    try:
        yield number
    finally:
        os.close(number)


def _status(folder: int, name: str, path: str) -> os.stat_result:
    with kernel_errors("open", repr(path)):
        return os.lstat(name, dir_fd=folder)
