"""Provides a registry that only a server of tests/cri/server_harness.py reaches."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pyrunc.abi.clone import CLONE_NEWNET
from pyrunc.kernel.namespace import setns
from tests.cri.server_harness import Server
from tests.support.registry import Registry


def inside(server: Server, folder: Path) -> Registry:
    """Run a registry whose socket is in the server's network namespace."""
    registries: list[Registry] = []

    def make() -> None:
        namespace = os.open(f"/proc/{server.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        setns(namespace, CLONE_NEWNET)
        os.close(namespace)
        registries.append(Registry(folder))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return registries[0]
