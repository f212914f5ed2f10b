"""Pages, and how one is found."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Page:
    """What is behind a name. `group` is its chapter; `who` must act; `code` is gRPC's, for errors
    that travel; `classes` are the error classes that it is about, by qualified name; `also` other
    words that people meet for it; `patterns` texts that it is about, as regular expressions.
    """

    name: str
    group: str
    title: str
    text: str
    todo: str
    who: str = ""
    code: str = ""
    classes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    @property
    def words(self) -> set[str]:
        """All that it can be asked for by, folded."""
        return {_folded(word) for word in (self.name, *self.also)}


def _folded(word: str) -> str:
    """`WrongState`, `wrong_state` and `WRONG-STATE` are the same."""
    return word.replace("-", "").replace("_", "").lower()


def find(pages: tuple[Page, ...], asked: str) -> list[Page]:
    """The pages of this name or code of gRPC; else those that are about this text, then those whose
    names stand in it, in their order there.

    In a sentence only what cannot be a plain word counts: ENOSPC, OOMKilled, root-space, not
    `server`.
    """
    named = _named(pages, asked.strip())
    if named:
        return named
    words = [w for w in _WORD.findall(asked) if not w.islower() or "-" in w or "_" in w]
    about = [page for page in pages if any(re.search(pattern, asked) for pattern in page.patterns)]
    return list(
        dict.fromkeys([*about, *(page for word in words for page in _named(pages, word)[:1])])
    )


def _named(pages: tuple[Page, ...], word: str) -> list[Page]:
    """Those of a name; behind them the first, which is the most general one, of a code."""
    folded = _folded(word)
    found = [page for page in pages if folded in page.words]
    coded = [page for page in pages if page.code and _folded(page.code) == folded]
    return list(dict.fromkeys([*found, *coded[:1]]))
