"""Tests C modules that commands load after the snapshot."""

from __future__ import annotations

import pytest

from pyrunc.accelerate.snapshot import _load_without_search


@pytest.mark.parametrize("name", ["_json", "math", "time", "marshal"])
def test_a_module_is_loaded_from_a_shared_object_or_the_interpreter(name: str) -> None:
    # Distributions and versions differ in which of these are shared objects.
    assert _load_without_search(name)().__name__ == name
