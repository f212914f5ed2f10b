"""Tests that our JSON functions agree with the standard `json` module, whose imports they avoid."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyrunc import jsontext

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(values)
def test_json_is_written_and_read_back_unchanged(value: object) -> None:
    text = jsontext.dumps(value)
    assert text == json.dumps(value, separators=(",", ":"))
    assert jsontext.loads(text) == value
    assert jsontext.loads(text.encode("ascii")) == value
    assert jsontext.loads(f" \n{json.dumps(value, indent=1)}\t") == value


@given(st.text(max_size=12))
def test_loads_refuses_the_texts_that_json_refuses(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError, match=r".*"):
            jsontext.loads(text)
    else:
        if text.strip() in ("NaN", "Infinity", "-Infinity"):
            return
        assert jsontext.loads(text) == expected


@pytest.mark.parametrize("text", ["", "{", "[1,]", "{} x", "NaN", '{"a":1,}', "'a'", "{a:1}"])
def test_truncated_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        jsontext.loads(text)


def test_paths_that_are_not_utf8_survive() -> None:
    assert jsontext.loads(jsontext.dumps("a\udcffb")) == "a\udcffb"
    assert jsontext.loads(b'"a\xffb"') == "a\udcffb"


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes"])
def test_unsupported_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError):
        jsontext.dumps(value)


def test_a_refused_value_does_not_affect_later_calls() -> None:
    shared = [1]
    for _ in range(3):
        with pytest.raises(TypeError):
            jsontext.dumps([shared, object()])
    assert jsontext.dumps([shared, shared]) == "[[1],[1]]"
