"""The `rewrite` tables of hosts.toml: regular expressions and replacements with Go's syntax.

k3s and RKE2 write these tables, and their containerd applies Go's regexp.ReplaceAllString. RE2 has
the syntax of Go's expressions, parts of which Python's re lacks (`[[:alnum:]]`, `\\z`). Sources:
pkg.go.dev/regexp, github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

# `$$`, `$name`, `${name}`; the longest name counts, so `$1x` is the group `1x`.
_REFERENCE = re.compile(r"\$(?:\$|(\w+)|\{(\w+)\})")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,3}")  # `01` is a group's name in Go, not a number


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rule of a `rewrite` table: an expression and its replacement. The constructor raises
    ValueError for an expression that Go rejects."""

    pattern: str
    replacement: str
    _compiled: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        import re2

        options = re2.Options()
        options.log_errors = False  # to stderr
        try:
            compiled = re2.compile(self.pattern, options)
        except re2.error as error:
            [text] = error.args
            raise ValueError(
                text.decode(errors="replace") if isinstance(text, bytes) else text
            ) from None
        object.__setattr__(self, "_compiled", compiled)

    def apply(self, text: str) -> str | None:
        """Return the text with each match replaced; None when nothing matches."""
        parts, end, is_first = [], 0, True
        for match in self._compiled.finditer(text):
            if match.start() == match.end() == end and not is_first:
                continue  # Go ignores an empty match right after another one
            parts += [text[end : match.start()], self._expanded(match)]
            end, is_first = match.end(), False
        return None if is_first else "".join([*parts, text[end:]])

    def unknown_groups(self) -> list[str]:
        """Return the group names in the replacement that the pattern does not define. Like Go,
        `apply` replaces them by an empty text."""
        names = [name for match in _REFERENCE.finditer(self.replacement) if (name := _name(match))]
        return [name for name in dict.fromkeys(names) if self._number(name) is None]

    def _expanded(self, match: Any) -> str:
        def expand(reference: re.Match[str]) -> str:
            name = _name(reference)
            if not name:
                return "$"
            number = self._number(name)
            return "" if number is None else match.group(number) or ""

        return _REFERENCE.sub(expand, self.replacement)

    def _number(self, name: str) -> int | None:
        """Return the number of the group that `name` (the group's name or number) refers to; None
        if the pattern has no such group."""
        if _NUMBER.fullmatch(name):
            return int(name) if int(name) <= self._compiled.groups else None
        number: int | None = dict(self._compiled.groupindex).get(name)
        return number


def _name(reference: re.Match[str]) -> str:
    """Return the name or number of the group that `$name` or `${name}` in a replacement refers to;
    "" for `$$`, which stands for a dollar sign. `reference`: a match of `_REFERENCE`."""
    return reference[1] or reference[2] or ""
