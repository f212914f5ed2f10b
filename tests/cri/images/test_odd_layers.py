"""Layers as real builders write them, which look odd and are taken, in both stores."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from cri_server.images import walk_budget
from cri_server.images.build import Node, directory, symlink
from tests.cri.images.conftest import unpack_bytes
from tests.cri.images.indexes import write_index
from tests.cri.images.test_unpack import raw_tar

Take = Callable[[bytes], None]


@pytest.fixture(params=["unpacked", "mounted"])
def take(request: pytest.FixtureRequest, tmp_path: Path) -> Take:
    """Take a layer into a store of this kind. Raises what it raises there."""
    numbers = itertools.count()

    def run(tar: bytes) -> None:
        folder = tmp_path / f"taken-{next(numbers)}"
        folder.mkdir()
        if request.param == "unpacked":
            unpack_bytes(tar, folder)
        else:
            write_index(folder, [tar])

    return run


def test_the_names_of_real_layers_stay_below_the_limit_of_steps(
    take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/lib is a link to /usr/lib, jars lie in undescribed folders, node_modules are nested: a quarter of the steps that their
    entries allow is enough, with next to none that are free."""
    monkeypatch.setattr(
        walk_budget.WalkBudget.__init__, "__defaults__", (200, walk_budget.STEPS_PER_ENTRY // 4, 0)
    )
    take(
        raw_tar(
            ("usr/lib/x86_64-linux-gnu", directory()),
            ("lib", symlink("usr/lib")),
            *((f"lib/x86_64-linux-gnu/lib{n}.so", Node()) for n in range(300)),
            *((f"app/classes/com/company/part{n // 9}/impl/C{n}.class", Node()) for n in range(600)),
            *(
                (f"srv/{'node_modules/p/' * depth}lib/{n}.js", Node())
                for depth in range(1, 9)
                for n in range(12)
            ),
        )
    )
