"""Fixtures: a server with NRI for each test module, and the socket that plugins connect to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cri.server_harness import Server

REQUEST_TIMEOUT_S = (
    # No plugin exceeds it by accident; those that do on purpose wait for the end of the test.
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
