"""Checks that the test tree mirrors the code: each folder of tests/unit and tests/kernel is named
after a folder of a package."""

from __future__ import annotations

import pytest

from tests.architecture.test_imports import MAY_IMPORT, ROOT

NOT_OF_A_PACKAGE = {
    "bench": "the tables and the chart of `make bench`",
    "cni": "cni_plugins and the server's side of them, in one protocol",
    "conformance": "the report of Kubernetes' conformance suite",
    "proto": "proto/ against the interface's description",
}


def folders(of: str) -> set[str]:
    return {
        path.name for path in (ROOT / "tests" / of).iterdir() if (path / "__init__.py").exists()
    }


@pytest.mark.parametrize("tree", ["unit", "kernel"])
def test_a_folder_of_tests_has_the_name_of_its_package(tree: str) -> None:
    rooms = {
        path.name for package in MAY_IMPORT for path in (ROOT / package).iterdir() if path.is_dir()
    }
    assert not folders(tree) - rooms - set(NOT_OF_A_PACKAGE)


def test_each_listed_exception_is_a_folder() -> None:
    assert not set(NOT_OF_A_PACKAGE) - folders("unit") - folders("kernel")
