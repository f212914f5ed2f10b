"""The test tree mirrors the code: a folder of tests/unit is called as the part of a package that it tests."""

from __future__ import annotations

from tests.architecture.test_imports import MAY_IMPORT, ROOT

NOT_OF_A_PACKAGE = {
    "cni": "cni_plugins and the server's side of them, in one protocol",
    "conformance": "the report of Kubernetes' conformance suite",
    "proto": "proto/ against the interface's description",
}


def test_a_folder_of_unit_tests_is_called_as_what_it_tests() -> None:
    folders = {path.name for path in (ROOT / "tests/unit").iterdir() if (path / "__init__.py").exists()}
    rooms = {path.name for package in MAY_IMPORT for path in (ROOT / package).iterdir() if path.is_dir()}
    assert not folders - rooms - set(NOT_OF_A_PACKAGE)
    assert not set(NOT_OF_A_PACKAGE) - folders, "no exception is needed any more"
