"""A server with NRI for the tests of a file, and the socket that its plugins connect to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cri.server_harness import Server

REQUEST_TIMEOUT_S = (
    # nothing here is to be late by accident; what is late on purpose waits for the end of the test
    10.0
)


@pytest.fixture(scope="module")
def nri_socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nri") / "nri.sock"


@pytest.fixture(scope="module")
def module_server(nri_socket: Path) -> Iterator[Server]:
    settings = {
        "nri": {
            "enabled": True,
            "socket": str(nri_socket),
            "plugin_dir": str(nri_socket.parent / "plugins"),
            "request_timeout_s": REQUEST_TIMEOUT_S,
        }
    }
    with Server(settings=settings) as server:
        server.load_image()
        yield server
