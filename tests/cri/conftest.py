"""Provides one server for the tests of a file; each test starts with none of its pods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cri.server_harness import Server


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    with Server() as server:
        server.load_image()
        yield server


@pytest.fixture
def server(module_server: Server) -> Iterator[Server]:
    yield module_server
    module_server.remove_all()
