"""Tests the line numbers of the parts of a JSON text."""

from __future__ import annotations

import json

import pytest

from pyrunc.cli.why import _joined, dotted, places

TEXT = """{
  "a": {"b": [1, {"c": "}]"},
    true], "d": {}},
\t"e\\n": [],
  "f": [[2
  ]]
}"""


def test_each_part_of_a_configuration_has_its_line() -> None:
    assert places(TEXT) == {
        ("a",): 2,
        ("a", "b"): 2,
        ("a", "b", 0): 2,
        ("a", "b", 1): 2,
        ("a", "b", 1, "c"): 2,
        ("a", "b", 2): 3,
        ("a", "d"): 3,
        ("e\n",): 4,
        ("f",): 5,
        ("f", 0): 5,
        ("f", 0, 0): 5,
    }
    assert places("5") == {} and places("{}") == {} and places(" [ 1 ] ") == {(0,): 1}


def test_every_part_of_any_text_has_a_line() -> None:
    def paths(value: object, path: tuple[object, ...] = ()) -> set[tuple[object, ...]]:
        items = list(
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        return {(*path, key) for key, _ in items} | {
            p for key, item in items for p in paths(item, (*path, key))
        }

    value = {"x": [{"y": [[], {}, None, 1.5e3]}, 'é\\"', -1], "": {"z": False}}
    for indent in (None, 0, 2):
        assert set(places(json.dumps(value, indent=indent))) == paths(value)


@pytest.mark.parametrize(
    ("paths", "joined"),
    [
        ({("m", 0, "o", 0), ("m", 0, "o", 1), ("m", 0, "t")}, {("m", 0)}),
        ({("a",), ("b",)}, {("a",), ("b",)}),
        ({("a", "b"), ("c", "d")}, {("a", "b"), ("c", "d")}),
        (set(), set()),
    ],
)
def test_paths_with_all_parts_of_an_object_are_joined(
    paths: set[tuple[str | int, ...]], joined: set[tuple[str | int, ...]]
) -> None:
    assert _joined(paths) == joined
    assert dotted(("m", 0, "o")) == "m[0].o"
