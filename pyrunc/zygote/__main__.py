"""The main module of a zygote: imports the modules of a list, freezes the heap, and forks on
request until its socket closes.

argv: descriptor of the socket, search path (joined by `:`), modules to import.
cri_server.zygote.client starts the zygote.
"""

from __future__ import annotations

import os
import sys

# not from `signal`, which imports enum
from _signal import SIG_DFL, SIGTERM, signal  # type: ignore[import-not-found]
from _socket import socket

from pyrunc import ipc
from pyrunc.errors import Error
from pyrunc.kernel import reaper
from pyrunc.zygote import loop, preload
from pyrunc.zygote.messages import ZygoteReady


def main() -> None:
    """Serve the socket that argv names. Returns when the server has ended or an import has failed.
    In a child it never returns."""
    server = socket(fileno=int(sys.argv[1]))
    os.set_inheritable(server.fileno(), False)
    reaper.set_name("pyrunc-zygote")
    os.chdir("/")  # leave the keeper's folder, whose file system must stay unmountable
    signal(SIGTERM, _give_up)
    ready = ZygoteReady(os.getpid())
    try:
        preload.load(sys.argv[3:])
    except Error as error:
        ready = ZygoteReady(error=error.to_fields())
    signal(SIGTERM, SIG_DFL)
    try:
        ipc.send(server, ready.to_fields())
    except (BrokenPipeError, ConnectionResetError):  # the server has ended meanwhile
        return
    if ready.error is not None:
        return
    # After `ready`, because it takes some 60 ms, in which the server can go on.
    preload.freeze()
    loop.ZygoteLoop(server).serve()


def _give_up(number: int, frame: object) -> None:
    """Raise SystemExit on SIGTERM during the imports, so that `finally` blocks run."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
