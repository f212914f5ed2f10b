"""Loads the pages of pages.toml, and finds the name of the page that explains an error.

`python -m cri_server.explain.pages` prints docs/errors.md, the text of all pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from cri_server.explain.model import Page

CHAPTERS = {
    "texts": ("Messages", "Common messages of kubelet, of clients and of the log."),
    "errors": (
        "Errors",
        "The classes of errors. The name of a class is in the log's field `explain`; kubelet shows "
        "its gRPC code.",
    ),
    "reasons": (
        "How containers end",
        "The reasons that `kubectl describe pod` and `pyrunc-cri inspect` show.",
    ),
    "errno": (
        "Errors of the kernel",
        "A message names the call, its object and the error: `mount 'overlay' on '/': ENODEV`.",
    ),
    "doctor": ("Checks of doctor", "The names are those of `pyrunc-cri doctor`."),
}


def _load() -> tuple[Page, ...]:
    """Return the pages of pages.toml, in the order of CHAPTERS."""
    content = Path(__file__).with_name("pages.toml").read_bytes()
    chapters = msgspec.toml.decode(content, type=dict[str, dict[str, Page]])
    return tuple(
        msgspec.structs.replace(
            page,
            name=name,
            chapter=chapter,
            text=_join_lines(page.text),
            remedy=_join_lines(page.remedy),
        )
        for chapter in CHAPTERS
        for name, page in chapters[chapter].items()
    )


def _join_lines(text: str) -> str:
    return " ".join(text.split())


PAGES = _load()
_NAME_BY_CLASS = {cls: page.name for page in PAGES for cls in page.classes}


def name_of(error: BaseException) -> str:
    """Return the name of an error's page: that of its class, or else of the nearest base class with
    a page, or else `internal`."""
    for cls in type(error).__mro__:
        name = _NAME_BY_CLASS.get(f"{cls.__module__}.{cls.__qualname__}")
        if name:
            return name
    return "internal"


def markdown() -> Iterator[str]:
    """Yield the lines of docs/errors.md."""
    yield from ("# Errors and what to do about them", "")
    yield "`pyrunc-cri explain` shows these pages, by name or by the text of an error."
    yield ""
    yield from ("<!-- Written from cri_server/explain/pages.toml. -->", "")
    for chapter, (title, text) in CHAPTERS.items():
        yield from (f"## {title}", "", text, "")
        for page in PAGES:
            if page.chapter == chapter:
                yield from _section(page)


def _section(page: Page) -> Iterator[str]:
    yield from (f"### {page.name}", "", f"**{page.title}.** {page.text}", "", page.remedy, "")
    if page.facts:
        yield from (page.facts, "")


if __name__ == "__main__":
    print("\n".join(markdown()).rstrip())
