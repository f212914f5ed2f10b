"""`$(NAME)` in a container's command, arguments, environment and subPathExpr, as kubelet expands
it: `$$` is `$`, and what is not defined stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")


def expand(text: str, values: Mapping[str, str]) -> str:
    """`text` with the values of its references."""
    return REFERENCE.sub(lambda found: _value(found, values), text)


def undefined(text: str, values: Mapping[str, str]) -> list[str]:
    """The names that `text` refers to and `values` has not."""
    return [name for name in REFERENCE.findall(text) if name and name not in values]


def environment(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Each value may refer to those before it; of one name the last counts."""
    values: dict[str, str] = {}
    for name, text in pairs:
        values[name] = expand(text, values)
    return values


def _value(found: re.Match[str], values: Mapping[str, str]) -> str:
    if found[0] == "$$":
        return "$"
    return values.get(found[1], found[0])
