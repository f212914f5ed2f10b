"""Provides one server for all files of this folder, each of which tests one RPC; each test starts
without pods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cri import inner_registry
from tests.cri.server_harness import Server, server_fixture
from tests.support.registry import Registry

CDI = "/run/pyrunc-test-cdi"  # where devices of test_create_container.py are described


module_server = server_fixture("package", settings={"containers": {"cdi_dirs": [CDI]}})


@pytest.fixture(scope="package")
def registry(module_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Provide a registry that the server of this folder's tests reaches by HTTP."""
    with inner_registry.inside(module_server, tmp_path_factory.mktemp("registry")) as registry:
        yield registry
