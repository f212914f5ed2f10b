"""A page of `explain`, and the search for the pages that explain a message."""

from __future__ import annotations

import re

import msgspec

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class Page(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page of `explain`, read from the table [CHAPTER.NAME] of pages.toml. The comment at the
    beginning of pages.toml describes the fields."""

    title: str
    text: str
    remedy: str
    name: str = ""
    chapter: str = ""
    acts: str = ""
    code: str = ""
    classes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    @property
    def search_names(self) -> set[str]:
        """All names of the page, normalized."""
        return {_normalize(name) for name in (self.name, *self.also)}

    @property
    def facts(self) -> str:
        """Sentences with the page's other fields: who must act, the gRPC code, other names. Empty
        if none is set."""
        facts = [f"Who must act: {self.acts}."] if self.acts else []
        facts += [f"gRPC: `{self.code}`."] if self.code else []
        facts += [f"Also: {', '.join(self.also)}."] if self.also else []
        return " ".join(facts)


def _normalize(name: str) -> str:
    """Return the same text for `WrongState`, `wrong_state` and `WRONG-STATE`."""
    return name.replace("-", "").replace("_", "").lower()


def find(pages: tuple[Page, ...], query: str) -> list[Page]:
    """Return the pages for a name, a gRPC code or the text of a message, best first.

    For a message, the pages whose patterns match it come first, then the pages whose names occur in
    it. Only names such as ENOSPC, OOMKilled and root-space are looked for in a message, not plain
    words such as `server`.
    """
    named = _named(pages, query.strip())
    if named:
        return named
    results = [page for page in pages if any(re.search(p, query) for p in page.patterns)]
    for word in _WORD.findall(query):
        if not word.islower() or "-" in word or "_" in word:
            results += _named(pages, word)[:1]
    return list(dict.fromkeys(results))


def _named(pages: tuple[Page, ...], name: str) -> list[Page]:
    """Return the pages with this name. If the name is a gRPC code, also return the first page of
    that code, which is the most general one."""
    normalized = _normalize(name)
    by_name = [page for page in pages if normalized in page.search_names]
    by_code = [page for page in pages if page.code and _normalize(page.code) == normalized]
    return list(dict.fromkeys([*by_name, *by_code[:1]]))
