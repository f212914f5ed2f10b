"""Tests that pyrunc/accelerate/json.c agrees with the standard `json` on the values that it
accepts."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import random
import subprocess
import sysconfig
from types import ModuleType
from typing import Any

import pytest

from pyrunc.cli import entry
from pyrunc.spec.default import default

MODULE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "%s"
static PyMethodDef functions[] = {
    {"read_json", read_json, METH_VARARGS, NULL}, {"write_json", write_json, METH_O, NULL}, {NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "plain_json", .m_methods = functions};
PyMODINIT_FUNC PyInit_plain_json(void) { return PyModule_Create(&module); }
"""
CHARACTERS = 'a Z~/"\\\n\r\t\b\f\x00\x1f\x7f'


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    if entry.native() is None:
        pytest.skip("needs a compiler and Python's headers")
    folder = tmp_path_factory.mktemp("plain")
    source, library = folder / "module.c", folder / "plain_json.so"
    source.write_text(MODULE % entry.JSON)
    words = ["cc", "-O2", "-Wall", "-Werror", "-fsanitize=undefined", "-shared", "-fPIC"]
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run([*words, include, str(source), "-o", str(library)], check=True)
    loader = importlib.machinery.ExtensionFileLoader("plain_json", str(library))
    spec = importlib.util.spec_from_file_location("plain_json", library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def random_value(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(8 if depth < 4 else 5)
    if kind < 3:
        return source.choice([None, True, False])
    if kind == 3:
        return source.randrange(-(10 ** source.randrange(1, 18)), 10 ** source.randrange(1, 18))
    if kind == 4:
        return "".join(source.choices(CHARACTERS, k=source.randrange(6)))
    items = [random_value(source, depth + 1) for _ in range(source.randrange(4))]
    if kind == 5:
        return items
    return {"".join(source.choices(CHARACTERS, k=2)): item for item in items}


def test_random_values_are_written_and_read_as_by_json(plain: ModuleType) -> None:
    source = random.Random(1)
    for _ in range(5000):
        value = random_value(source)
        text = compact(value)
        assert plain.write_json(value) == text
        for form in (text, json.dumps(value, indent=source.choice([None, 1, "\t"]))):
            if "\\u" in form:
                assert plain.read_json(form, 0) is None
            else:
                assert plain.read_json(form, 0) == (value, len(form))


def test_a_configuration_is_read_and_written(plain: ModuleType) -> None:
    text = compact(default())
    value, end = plain.read_json(f"  {text} rest", 2)
    assert value == json.loads(text) and end == 2 + len(text)
    assert plain.write_json(value) == text


def test_the_last_of_two_equal_keys_is_valid(plain: ModuleType) -> None:
    text = '{"a":1,"b":2,"a":3}'
    assert list(plain.read_json(text, 0)[0].items()) == list(json.loads(text).items())


BROKEN = (
    """ |{|[|"|"a|"\\|"\\"|"\\x"|"\n"|[1|[1,]|[,1]|{"a"}|{"a":}|{"a":1,}|{1:2}|tru|nul|fals|True"""
)
RARE = (
    """-|01|-01|+1|1.5|1e3|1E3|1.|.5|NaN|Infinity|-Infinity|1111111111111111111|"\\u0041"|"é"|\v1"""
)


@pytest.mark.parametrize("text", ["", *BROKEN.split("|"), *RARE.split("|"), "[" * 101 + "]" * 101])
def test_an_error_and_a_rare_form_are_left_to_json(plain: ModuleType, text: str) -> None:
    assert plain.read_json(text, 0) is None


@pytest.mark.parametrize("start", [-1, 3])
def test_a_start_outside_the_text_is_refused(plain: ModuleType, start: int) -> None:
    assert plain.read_json("12", start) is None


def test_each_prefix_and_each_changed_character_of_a_text_is_read_as_by_json(
    plain: ModuleType,
) -> None:
    text = '{"a": [1, -20, "b\\n\\\\", true], "c": {"d": null, "e": false}, "f": {}, "g": []}'
    changed = [text[:i] for i in range(len(text))]
    changed += [
        text[:i] + other + text[i + 1 :] for i in range(len(text)) for other in '"\\,:{}[]0-t .'
    ]
    for broken in changed:
        start = len(broken) - len(broken.lstrip())
        try:
            expected = json.JSONDecoder().raw_decode(broken, start)
        except ValueError:
            assert plain.read_json(broken, start) is None, broken
        else:
            assert plain.read_json(broken, start) in (expected, None), broken


@pytest.mark.parametrize("value", ["é", {1: 2}, {"é": 1}, 1.5, b"a", {1}, 1 << 63, object()])
def test_what_json_writes_otherwise_or_refuses_is_left_to_it(
    plain: ModuleType, value: object
) -> None:
    assert plain.write_json(value) is None and plain.write_json({"a": [value]}) is None


def test_a_cycle_is_left_to_json(plain: ModuleType) -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    assert plain.write_json(cycle) is None


def test_largest_integers_and_subclasses(plain: ModuleType) -> None:
    class Text(str):
        pass

    assert plain.write_json([(1 << 63) - 1, -(1 << 63)]) == f"[{(1 << 63) - 1},{-(1 << 63)}]"
    assert plain.read_json("9" * 18, 0) == (10**18 - 1, 18)
    assert plain.write_json(Text("a")) is None
