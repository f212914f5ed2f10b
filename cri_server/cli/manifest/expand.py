"""Expands `$(NAME)` in command, arguments, environment and subPathExpr as kubelet does. `$$`
becomes `$`, and a reference to an undefined name stays as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace each $(NAME) in `text` by its value, and `$$` by `$`. A reference to an undefined
    name stays as it is."""
    return REFERENCE.sub(lambda match: _value(match, values), text)


def undefined(text: str, values: Mapping[str, str]) -> list[str]:
    """Return the names that `text` refers to and `values` lacks."""
    return [name for name in REFERENCE.findall(text) if name and name not in values]


def environment(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Expand the values of environment variables in order: a value may refer to earlier variables.
    If a name occurs twice, the last value is used."""
    values: dict[str, str] = {}
    for name, text in pairs:
        values[name] = expand(text, values)
    return values


def _value(match: re.Match[str], values: Mapping[str, str]) -> str:
    if match[0] == "$$":
        return "$"
    return values.get(match[1], match[0])
