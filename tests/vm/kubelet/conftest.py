"""Provides one node for all tests of this folder. A test that changes kubelet or the server
restores it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vm.kubelet.node import Node


@pytest.fixture(scope="session")
def node() -> Node:
    node = Node()
    node.wait_for_service_account()
    return node


@pytest.fixture
def removing(node: Node) -> Iterator[list[str]]:
    """Provide an empty list: pods whose names a test adds are removed after the test."""
    names: list[str] = []
    yield names
    node.remove(*names)
