"""Checks that pyproject.toml declares exactly the packages that are imported."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from tests.architecture.test_imports import MAY_IMPORT, ROOT, imports, modules

# Name on the package index -> name of the import, where the two differ.
IMPORTED_AS = {
    "backports-zstd": "backports",
    "google-re2": "re2",
    "grpcio": "grpc",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "protobuf": "google",
    "pyyaml": "yaml",
}
OF_USE = ("signatures", "tracing")  # optional dependencies that a server imports when it is told to
BUILT_IN = {"_pyrunc", "compression"}  # brought by cli/front.c; part of Python from 3.14 on


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for use in OF_USE for line in project["optional-dependencies"][use]),
    ]
    names = [re.split(r"[ <>=;]", line)[0] for line in lines]
    normal = [name.lower().replace(".", "-") for name in names]
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in normal}


def generated() -> list[Path]:
    return list((ROOT / "cri_server/api").glob("*.py"))


def test_imported_and_declared_packages_are_the_same() -> None:
    files = [path for package in MAY_IMPORT for _, path in modules(package)] + generated()
    tops = {name.split(".")[0] for path in files for name, _ in imports(path)}
    assert tops - sys.stdlib_module_names - set(MAY_IMPORT) - BUILT_IN == declared()
