"""Opens the root of a running container through /proc/PID/root, for access to its files.

Paths below this root must be resolved with openat2(2) and RESOLVE_IN_ROOT, so that a symbolic link
never leads out of the container. Needs root, and a server on this machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cri_server.cli.connection.client import Client
from pyrunc.errors import WrongState
from pyrunc.kernel import process
from pyrunc.kernel.fd import closing_fd


class ContainerRoot(NamedTuple):
    """The open root directory of a container. `owner`: the uid and gid that the container's user 0
    and group 0 have on the host."""

    descriptor: int
    owner: tuple[int, int]


@contextlib.contextmanager
def open_root(client: Client, container: str, name: str) -> Iterator[ContainerRoot]:
    """Open a container's root directory for the `with` block. `name`: the container's name in
    errors. Raises WrongState if the container does not run on this machine, or if the user is not
    root."""
    pid = client.container_info(container).get("pid", 0)
    try:
        if not pid:
            raise FileNotFoundError
        descriptor = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        raise WrongState(f"container {name}: only root can open its files") from None
    except OSError:
        raise WrongState(f"container {name} is not running on this machine") from None
    with closing_fd(descriptor):
        try:
            owner = _first_id(pid, "uid"), _first_id(pid, "gid")
        except OSError:
            raise WrongState(f"container {name} has ended") from None
        if not has_process(client, container, pid):
            raise WrongState(f"container {name} has ended")
        yield ContainerRoot(descriptor, owner)


def has_process(client: Client, container: str, pid: int) -> bool:
    """Return whether `pid` is still the container's main process. If so, a pidfd or a descriptor of
    /proc/PID that was opened before this call refers to the main process."""
    alive = process.stat(pid) is not None
    return alive and client.container_info(container).get("pid", 0) == pid


def _first_id(pid: int, kind: str) -> int:
    """Return the host's uid or gid that id 0 of the container's user namespace maps to. `kind`:
    `uid` or `gid`. Raises OSError."""
    for line in Path(f"/proc/{pid}/{kind}_map").read_text().splitlines():
        inside, outside, _ = map(int, line.split())
        if inside == 0:
            return outside
    # A user namespace need not map id 0 (user_namespaces(7)).
    return 65534  # the kernel's overflow id
