"""Tests that random layers have the same files mounted (as EROFS) and unpacked."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from cri_server.images.archives.build import LayerFile
from cri_server.images.erofs.layer_tree import read_layer
from cri_server.images.erofs.merge import merged, without_repetitions
from cri_server.images.erofs.node import ErofsNode as TreeNode
from cri_server.images.erofs.tar_file import TarFile
from cri_server.images.layers.inflate import UnpackLimits
from pyrunc.errors import Error
from tests.cri.images.chance import CHANGES, EXAMPLES, MEMBERS, NAMES, NODES, RANDOM, changed
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
        except Error:  # refused by the kernel: nothing to compare
            return
        assert outcome([blob], place / "mounted") == expected
    finally:
        subprocess.run(["rm", "-rf", place], check=True)


@RANDOM
@given(members=MEMBERS)
def test_any_sequence_of_members_is_the_same_in_both_stores(
    scratch: Path, members: list[tuple[str, LayerFile]]
) -> None:
    agree(scratch, raw_tar(*members))


@RANDOM
@given(changes=CHANGES)
def test_changed_bytes_have_the_same_result_in_both_stores(
    scratch: Path, changes: list[tuple[int, int]]
) -> None:
    agree(scratch, changed(changes))


def in_order(node: TreeNode) -> object:
    """Return the files of a tree as a value that can be compared."""
    facts = (
        node.mode,
        node.uid,
        node.gid,
        node.mtime_ns,
        sorted(node.xattrs.items()),
        node.link,
        node.size,
    )
    if node.children is None:
        return (*facts, id(node))
    return (*facts, {name: in_order(child) for name, child in node.children.items()})


VALID_NAMES = NAMES.filter(lambda name: ".." not in name and name != ".")


@settings(max_examples=EXAMPLES // 4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    layers=some.lists(
        some.lists(some.tuples(VALID_NAMES, NODES), max_size=5), min_size=2, max_size=3
    ),
    chain=some.lists(some.integers(0, 2), min_size=3, max_size=7),
)
def test_a_repeated_layer_takes_effect_at_its_last_place(
    layers: list[list[tuple[str, LayerFile]]], chain: list[int]
) -> None:
    trees = []
    for number, members in enumerate(layers, 1):
        with tempfile.TemporaryFile() as file:
            file.write(raw_tar(*members))
            file.flush()
            try:
                trees.append(read_layer(TarFile(file.fileno()), number, UnpackLimits()))
            except Error:  # the layer is invalid
                return
    chain = [number % len(trees) for number in chain]
    whole = merged(trees[number] for number in chain)
    shorter = merged(trees[number] for number in without_repetitions(chain))
    assert in_order(whole) == in_order(shorter)
