"""An image that is mounted is the image unpacked, whatever chance made of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from cri_server.images.build import Node
from pyrunc.errors import Error
from tests.cri.images.chance import EXAMPLES, NAMES, NODES, WHOLE, repaired
from tests.cri.images.test_erofs import outcome, unpacked
from tests.cri.images.test_unpack import raw_tar


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


def agree(folder: Path, blob: bytes) -> None:
    place = folder / "case"
    place.mkdir()
    try:
        try:
            expected = unpacked(blob, place / "unpacked")
        except Error:  # a kernel's refusal that is nobody's fault: nothing to compare
            return
        assert outcome([blob], place / "mounted") == expected
    finally:
        subprocess.run(["rm", "-rf", place], check=True)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(members=some.lists(some.tuples(NAMES, NODES), max_size=12))
def test_any_sequence_of_members(scratch: Path, members: list[tuple[str, Node]]) -> None:
    agree(scratch, raw_tar(*members))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    changes=some.lists(
        some.tuples(some.integers(0, len(WHOLE) - 1), some.integers(0, 255)), min_size=1, max_size=12
    )
)
def test_changed_bytes(scratch: Path, changes: list[tuple[int, int]]) -> None:
    blob = bytearray(WHOLE)
    for at, value in changes:
        blob[at] = value
    agree(scratch, repaired(blob))
