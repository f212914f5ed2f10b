"""Tests templates of Go's text/template."""

from __future__ import annotations

import pytest

from cri_server.cli.arguments.selection import selector
from cri_server.cli.output.template import Template
from pyrunc.errors import Error

VALUE = {"id": "x", "list": [{"n": 1}, {"n": 2}], "map": {"a.b": "c"}, "none": [], "yes": True}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("{{.id}}", "x"),
        ("{{ .ID }}", "x"),
        ("a{{- .id -}} b", "axb"),
        ("{{range .list}}{{.n}},{{end}}", "1,2,"),
        ("{{range .none}}x{{else}}none{{end}}", "none"),
        ("{{range .list}}{{$.id}}{{end}}", "xx"),
        ("{{if .none}}a{{else}}b{{end}}", "b"),
        ("{{if and .yes (not .none)}}a{{end}}", "a"),
        ("{{with .map}}{{index . \"a.b\"}}{{end}}", "c"),
        ("{{index .map \"no\"}}", ""),
        ("{{json .list}}", '[{"n": 1}, {"n": 2}]'),
        ("{{.list | len}}", "2"),
        ("{{(index .list 1).n}}", None),
        ("{{len .list | printf \"%d of %s\" }}", "2 of "),
        ("{{printf \"%s-%q\" .id .id}}", 'x-"x"'),
        ("{{.id}}\\t{{.id}}", "x\tx"),
        ("{{join .map \",\"}}", "a.b"),
        ("{{/* nothing */}}{{.yes}}", "true"),
    ],
)  # fmt: skip
def test_templates_are_rendered(text: str, result: str | None) -> None:
    if result is None:
        with pytest.raises(Error):
            Template(text).render(VALUE)
    else:
        assert Template(text).render(VALUE) == result


@pytest.mark.parametrize(
    "text",
    [
        "{{",
        "{{.id",
        "{{end}}",
        "{{if .id}}",
        "{{.no}}",
        "{{nothing .id}}",
        "{{.id.x}}",
        "{{.id .id}}",
        "{{|}}",
        "{{}}",
        "{{len 5}}",
        "{{(.id}}",
        "{{range .id}}{{end}}",
    ],
)
def test_an_error_quotes_the_template(text: str) -> None:
    with pytest.raises(Error) as caught:
        Template(text).render(VALUE)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("a=1", True),
        ("a==1,b", True),
        ("a!=1", False),
        ("z!=1", True),
        ("a in (1,2), b notin (3)", True),
        ("!a", False),
        ("! z", True),
        ("b=", False),
        ("e=", True),
    ],
)
def test_selectors_match_labels(text: str, matches: bool) -> None:
    assert selector(text)({"a": "1", "b": "2", "e": ""}) == matches


@pytest.mark.parametrize("text", ["a in", "a in (", "=", "a=b c", ",", "(a)"])
def test_malformed_selectors_are_refused(text: str) -> None:
    with pytest.raises(Error):
        selector(text)
