"""Checks that each CRI RPC has its own file in tests/cri/rpc, and that this file calls the RPC."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from cri_server.api import api_pb2 as api
from tests.architecture.test_imports import ROOT

FOLDER = ROOT / "tests/cri/rpc"
# Files below tests/cri whose methods make RPCs for the tests.
HELPERS = ("server_harness.py", "streaming_session.py", "rpc/images.py")


def rpcs() -> list[str]:
    services = api.DESCRIPTOR.services_by_name.values()
    names = [
        method.name
        for service in services
        if isinstance(service, ServiceDescriptor)
        for method in service.methods
    ]
    assert len(names) == 43
    return sorted(names)


def file_of(rpc: str) -> Path:
    return FOLDER / f"test_{re.sub('(?<!^)(?=[A-Z])', '_', rpc).lower()}.py"


def used(path: Path) -> set[str]:
    """Return the names of all attributes and variables of a file."""
    tree = ast.parse(path.read_text())
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} | {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name)
    }


def rpcs_of_helpers() -> dict[str, set[str]]:
    """Return a dict: name of a helper method -> the RPCs that it calls."""
    rpcs_by_method: dict[str, set[str]] = {}
    for name in HELPERS:
        for node in ast.walk(ast.parse((ROOT / "tests/cri" / name).read_text())):
            if isinstance(node, ast.FunctionDef):
                called = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)} & set(
                    rpcs()
                )
                rpcs_by_method.setdefault(node.name, set()).update(called)
    return rpcs_by_method


@pytest.mark.parametrize("rpc", rpcs())
def test_each_rpc_has_a_test_file_that_calls_the_rpc(rpc: str) -> None:
    names = used(file_of(rpc))
    rpcs_by_method = rpcs_of_helpers()
    assert rpc in names or any(
        rpc in rpcs_by_method[name] for name in names & rpcs_by_method.keys()
    )


def test_each_test_file_belongs_to_an_rpc() -> None:
    assert {file_of(rpc) for rpc in rpcs()} == set(FOLDER.glob("test_*.py"))
