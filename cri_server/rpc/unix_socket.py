"""Binds the server's unix sockets. A socket has its final mode from the start, and never replaces
the socket of a running server."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pyrunc.errors import WrongState


def bind(path: Path, mode: int, owner: tuple[int, int] | None = None) -> socket.socket:
    """Return a stream socket bound to `path` with the permission bits `mode`; the caller makes it
    listen. `owner`: the file's uid and gid, None for those of this process.

    Raises the errors of `unlink_stale`, and OSError when the socket cannot be bound.
    """
    unlink_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # bind(2) makes the file with mode 0777 less the umask (unix(7)). A chmod(2) afterwards
        # would leave the socket open to other users for a moment.
        before = os.umask(0o777 & ~mode)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        if owner is not None:
            os.chown(path, *owner)
    except BaseException:
        sock.close()
        raise
    return sock


def unlink_stale(path: Path) -> None:
    """Remove the socket of a server that has ended. Raises WrongState when a server listens on it,
    or when the file is not a socket."""
    # A killed server leaves its file, and bind(2) fails with EADDRINUSE on it. Only connect(2)
    # tells a file without a listener (ECONNREFUSED) from a server that runs.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if not path.is_socket():  # connect(2) fails alike for other files
                raise WrongState(f"{path} is not a socket") from None
            path.unlink(missing_ok=True)
            return
    raise WrongState(f"another server listens at {path}")
