"""Tests the content of the Debian package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyrunc
from cri_server.install import config_file
from tests.support import package

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    subprocess.run(["dpkg-deb", "-R", package.build(), folder / "tree"], check=True)
    return folder / "tree"


def test_the_package_needs_the_interpreter_of_its_build_and_no_compiler() -> None:
    depends = package.field(package.build(), "Depends")
    assert re.search(r"python3 \(>= 3\.(\d+)\), python3 \(<< 3\.\d+\), python3\.\1", depends)
    assert "libseccomp2" in depends and "libc6 (>=" in depends
    assert not re.search(r"\bgcc|-dev|make|pip|venv", depends)


def test_the_version_begins_with_the_codes_and_ends_with_the_debian_release() -> None:
    version = package.field(package.build(), "Version")
    assert re.fullmatch(
        rf"{re.escape(pyrunc.__version__)}(~git\d{{14}}\.[0-9a-f]+)?-1~debian\d+", version
    )


def test_the_package_has_all_files_that_a_node_needs(tree: Path) -> None:
    expected = [
        "usr/bin/pyrunc",
        "usr/bin/pyrunc-cri",
        "usr/lib/pyrunc/cni/bridge",
        "usr/lib/pyrunc/cni/host-local",
        "usr/lib/pyrunc/cni/loopback",
        "usr/lib/pyrunc/cni/portmap",
        "usr/lib/pyrunc/pyrunc/native/launcher",
        "usr/lib/pyrunc/pyrunc/native/pause",
        "usr/lib/pyrunc/pyrunc/native/keeper",
        "usr/lib/pyrunc/pyrunc/native/pyrunc-script",
        "usr/lib/pyrunc/cri_server/api/api_pb2.py",
        "usr/lib/tmpfiles.d/pyrunc.conf",
        "usr/lib/modules-load.d/pyrunc.conf",
        "usr/lib/sysctl.d/50-pyrunc.conf",
        "usr/share/man/man8/pyrunc.8.gz",
        "usr/share/man/man8/pyrunc-cri.8.gz",
        "usr/share/man/man5/pyrunc-config.5.gz",
        "usr/share/bash-completion/completions/pyrunc",
        "usr/share/bash-completion/completions/pyrunc-cri",
        "usr/share/zsh/vendor-completions/_pyrunc",
        "usr/share/fish/vendor_completions.d/pyrunc.fish",
        "usr/share/doc/pyrunc/examples/10-pyrunc.conflist",
        "usr/share/doc/pyrunc/copyright",
        "usr/share/doc/pyrunc/README.md",
        "usr/share/doc/pyrunc/docs/install.md",
        "usr/share/doc/pyrunc/examples/pod.yaml",
        "usr/share/doc/pyrunc/examples/grafana/pyrunc.json",
        "usr/share/doc/pyrunc/examples/prometheus/rules.yml",
        "DEBIAN/templates",
    ]
    assert [path for path in expected if not (tree / path).is_file()] == []
    (unit,) = tree.glob("*/**/systemd/system/pyrunc-cri.service")
    assert "ExecStart=/usr/bin/pyrunc-cri serve\n" in unit.read_text()


def test_the_configuration_file_is_a_conffile(tree: Path) -> None:
    assert (tree / "DEBIAN/conffiles").read_text().split() == ["/etc/pyrunc/config.toml"]
    assert (tree / "etc/pyrunc/config.toml").read_text() == config_file.text()


def test_no_file_conflicts_with_another_package(tree: Path) -> None:
    assert not (tree / "opt").exists(), "kubernetes-cni has files of these names in /opt/cni/bin"
    assert {path.name for path in tree.iterdir()} <= {"DEBIAN", "etc", "lib", "usr"}


def test_no_file_names_the_build_machine(tree: Path) -> None:
    here = os.fsencode(PROJECT)
    assert [path for path in tree.rglob("*") if path.is_file() and here in path.read_bytes()] == []


def test_every_module_has_its_bytecode(tree: Path) -> None:
    modules = list((tree / "usr/lib/pyrunc").rglob("*.py"))
    missing = [m for m in modules if not list(m.parent.glob(f"__pycache__/{m.stem}.cpython-*.pyc"))]
    assert len(modules) > 400 and missing == []


USE = """
import asyncio, sys, time
sys.path.append(sys.argv[1])
from cri_server.images.signatures import cosign as signatures
from cri_server.observability.timeline.export import Exporter
from cri_server.observability.timeline.trace import Trace
import cryptography.hazmat.primitives.asymmetric.ec
said = {"pod": "default/web", "outcome": "OK", "duration_ms": 1.0}
exporter = Exporter(sys.argv[2], 1.0)
exporter.add("RunPodSandbox", said, Trace())
asyncio.run(exporter.close())
"""


def test_spans_and_signatures_use_the_packages_own_libraries(tree: Path, tmp_path: Path) -> None:
    spans = tmp_path / "spans"
    collector = [sys.executable, "-m", "tests.support.otlp_collector", str(spans)]
    with subprocess.Popen(collector, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        interpreter = os.path.realpath(sys.executable)
        command = [interpreter, "-IS", "-B", "-c", USE, str(tree / "usr/lib/pyrunc"), endpoint]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        process.kill()
    assert done.returncode == 0, done.stderr
    (line,) = spans.read_text().splitlines()
    assert json.loads(line)["attributes"]["k8s.pod.name"] == "web"
