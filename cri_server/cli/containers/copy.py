"""`pyrunc-cri cp`: copies files between this machine and a running container, with docker's rules
for the destination."""

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
from cri_server.cli.containers.container_root import open_root
from cri_server.cli.containers.file_copy import FOLDER, Copy
from cri_server.cli.output.progress import ProgressLine
from cri_server.cli.output.report import report
from pyrunc.errors import InvalidArgument, KernelError, WrongState, kernel_errors
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.path import open_in_root, resolve


@dataclass(frozen=True, slots=True)
class CopyPath:
    """A path in a container, or on this machine if `container` is empty. The path `-` of this
    machine is a tar archive on stdin or stdout."""

    container: str
    path: str

    @property
    def is_archive(self) -> bool:
        return not self.container and self.path == "-"


def parse(text: str) -> CopyPath:
    """Parse `CONTAINER:PATH`, `POD/NAME:PATH` or a path of this machine. A path of this machine
    with a colon must begin with `.` or `/`."""
    container, colon, path = text.partition(":")
    if colon and container and not container.startswith((".", "/")):
        return CopyPath(container, "/" + path.lstrip("/"))
    return CopyPath("", text if text.startswith("/") or text == "-" else f"{os.getcwd()}/{text}")


@click.command()
@click.argument("source", metavar="[CONTAINER:]SOURCE|-", shell_complete=completion.containers)
@click.argument(
    "destination", metavar="[CONTAINER:]DESTINATION|-", shell_complete=completion.containers
)
@click.option("-a", "--archive", "keep_owner", is_flag=True, help="Keep owners and groups.")
@click.option(
    "-L", "--follow-link", "follow", is_flag=True, help="If SOURCE is a link, copy its target."
)
@click.option("-q", "--quiet", is_flag=True, help="Do not show the progress.")
@click.pass_obj
def cp(
    address: str, source: str, destination: str, keep_owner: bool, follow: bool, quiet: bool
) -> None:
    """Copy files and folders to or from a running container; `-` is a tar archive on stdin or
    stdout.

    SOURCE/. means the contents of the folder. If DESTINATION is a folder, the copy is put into it;
    if not, DESTINATION is the name of the copy. Needs root on the server's machine.
    """
    source_place, destination_place = parse(source), parse(destination)
    if bool(source_place.container) == bool(destination_place.container):
        raise InvalidArgument("exactly one of SOURCE and DESTINATION must be CONTAINER:PATH")
    name = source_place.container or destination_place.container
    with Client(address) as client, contextlib.ExitStack() as stack:
        root = stack.enter_context(open_root(client, client.container(name).id, name))
        here = stack.enter_context(_folder_at(None, "/"))
        progress = stack.enter_context(
            ProgressLine(f"copying {source}", quiet=quiet or destination_place.is_archive)
        )
        owner = root.owner if destination_place.container else None
        copy = Copy(progress.add, report, keep_owner=keep_owner, owner=owner)
        source_root = root.descriptor if source_place.container else here
        if destination_place.is_archive:
            with _last(source_root, source_place.path, follow) as (folder, last):
                archives.write(folder, last)
        elif source_place.is_archive:
            with _folder_at(root.descriptor, destination_place.path) as target:
                archives.extract(copy, target)
        else:
            target_root = root.descriptor if destination_place.container else here
            copy_path(
                copy, source_root, source_place.path, target_root, destination_place.path, follow
            )


def copy_path(
    copy: Copy, source_root: int, source_path: str, root: int, path: str, follow: bool
) -> None:
    """Copy the file or folder `source_path` below the open folder `source_root` to `path` below
    `root`, by docker's rules. `follow`: copy the target of a symbolic link instead of the link.
    Raises Error, OSError."""
    contents = source_path.endswith("/.") or not source_path.strip("/")
    with _last(source_root, source_path, follow) as (folder, name), contextlib.ExitStack() as stack:
        is_folder = stat.S_ISDIR(_status(folder, name, source_path).st_mode)
        if source_path.endswith("/") and not is_folder:
            raise WrongState(f"{source_path} is not a folder")
        try:
            target = stack.enter_context(_folder_at(root, path))
        except KernelError:
            if path.endswith("/") and not is_folder:
                raise WrongState(f"{path} is not a folder") from None
            above, new = stack.enter_context(_last(root, path, False))
            copy.copy_entry(folder, name, above, new)
            return
        if is_folder and contents:
            inner = os.open(name, FOLDER, dir_fd=folder)
            stack.callback(os.close, inner)
            copy.copy_contents(inner, target)
        else:
            copy.copy_entry(folder, name, target, name)


@contextlib.contextmanager
def _last(root: int, path: str, follow: bool) -> Iterator[tuple[int, str]]:
    """Open the parent folder of a path for the `with` block. Yields the folder's descriptor and the
    path's last component, which is `.` for the root. `follow`: first resolve all symbolic links.
    Raises InvalidArgument for a path that ends with `..`, KernelError."""
    path = resolve(root, path) if follow else path
    while path.endswith(("/", "/.")):
        path = path.removesuffix("/").removesuffix("/.")
    above, _, name = path.rpartition("/")
    if name == "..":
        raise InvalidArgument(f"{path}: the last component of a path must not be '..'")
    with _folder_at(root, above or "/") as folder:
        yield folder, name or "."


def _folder_at(root: int | None, path: str) -> closing_fd:
    """Open the folder `path` below `root` (None: below the host's root) for the `with` block, and
    provide its descriptor. Raises KernelError or OSError if it is no folder."""
    flags = os.O_RDONLY | os.O_DIRECTORY
    # In a container each link is resolved as the container sees it, so that none leads to the host.
    return closing_fd(
        os.open(path, flags | os.O_CLOEXEC) if root is None else open_in_root(root, path, flags)
    )


def _status(folder: int, name: str, path: str) -> os.stat_result:
    with kernel_errors("open", repr(path)):
        return os.lstat(name, dir_fd=folder)
