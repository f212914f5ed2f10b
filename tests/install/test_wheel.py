"""Tests the wheel: it is for this machine's architecture and has all files that an installed server
needs."""

from __future__ import annotations

import email
import platform
import zipfile
from pathlib import Path

import pytest

import pyrunc
from tests.support import guest_node


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return guest_node.wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheels_tag_names_the_architecture_of_the_programs_inside(wheel: Path) -> None:
    machine = platform.machine()
    assert wheel.name == (
        f"pyrunc-{pyrunc.__version__}-py3-none-manylinux_2_17_{machine}.musllinux_1_1_{machine}.whl"
    )


def test_the_programs_are_at_the_paths_that_modules_use(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert (
            archive.read("pyrunc/native/launcher")[:4]
            == archive.read("pyrunc/native/pause")[:4]
            == archive.read("pyrunc/native/keeper")[:4]
            == b"\x7fELF"
        )
        assert archive.getinfo("pyrunc/native/launcher").external_attr >> 16 & 0o111
    assert {
        "cri_server/api/api_pb2.py",
        "pyrunc/cli/front.c",
        "pyrunc/accelerate/heap_order.c",
        "pyrunc/accelerate/json.c",
        "cni_plugins/bridge/plugin.py",
    } <= names
    assert not [name for name in names if name.startswith(("tests/", "pyrunc/native/pyrunc-"))]


def test_the_wheel_contains_its_licence_and_the_version_of_the_code(wheel: Path) -> None:
    folder = f"pyrunc-{pyrunc.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        facts = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        assert b"Apache License" in archive.read(f"{folder}/licenses/LICENSE")
    assert facts["License-Expression"] == "Apache-2.0" and facts["Version"] == pyrunc.__version__
