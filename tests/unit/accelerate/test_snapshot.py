"""C modules that commands load after the snapshot."""

from __future__ import annotations

import pytest

from pyrunc.accelerate.snapshot import _load_without_search


@pytest.mark.parametrize("name", ["_json", "math", "time", "marshal"])
def test_a_module_is_loaded_wherever_it_lies(name: str) -> None:
    """In a shared object, or in the interpreter: which of them are there differs by distribution
    and version."""
    assert _load_without_search(name)().__name__ == name
