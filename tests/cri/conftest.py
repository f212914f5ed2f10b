"""Provides one server for the tests of a file; each test starts without pods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cri.server_harness import Server, server_fixture

module_server = server_fixture("module")


@pytest.fixture
def server(module_server: Server) -> Iterator[Server]:
    yield module_server
    module_server.remove_all()
