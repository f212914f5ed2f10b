"""All pages, the name of an error's page, and the document that is made from them: `python -m
cri_server.explain.pages`."""

from __future__ import annotations

from collections.abc import Iterator

from cri_server.explain.errors import ERRNOS, ERRORS, REASONS
from cri_server.explain.findings import FINDINGS
from cri_server.explain.model import Page
from cri_server.explain.texts import TEXTS

PAGES = TEXTS + ERRORS + REASONS + ERRNOS + FINDINGS
CHAPTERS = {
    "texts": ("Texts", "What kubelet, clients and the log say when something common is wrong."),
    "errors": ("Errors", "An error's class says who must act. Its name is the field `explain` of the log, its code what kubelet shows."),
    "reasons": ("How containers end", "The reason in `kubectl describe pod` and `pyrunc-cri inspect`."),
    "errno": ("The kernel's words", "They stand behind the call and the object: `mount 'overlay' on '/': ENODEV`."),
    "doctor": ("What doctor looks at", "The names of its findings."),
}  # fmt: skip
_BY_CLASS = {name: page.name for page in ERRORS for name in page.classes}


def name_of(error: BaseException) -> str:
    """The page of an error: its own class's, or that of the nearest class above it."""
    for kind in type(error).__mro__:
        name = _BY_CLASS.get(f"{kind.__module__}.{kind.__qualname__}")
        if name:
            return name
    return "internal"


def markdown() -> Iterator[str]:
    """The lines of docs/errors.md."""
    yield from ("# Errors and what to do about them", "")
    yield from (
        "`pyrunc-cri explain NAME` shows each of these, also for a whole line of an error.",
        "",
    )
    yield from (
        "<!-- Made from cri_server/explain by `python -m cri_server.explain.pages`. -->",
        "",
    )
    for group, (title, text) in CHAPTERS.items():
        yield from (f"## {title}", "", text, "")
        for page in PAGES:
            if page.group == group:
                yield from _section(page)


def _section(page: Page) -> Iterator[str]:
    yield from (f"### {page.name}", "", f"**{page.title}.** {page.text}", "", page.todo, "")
    facts = [f"Acts: {page.who}."] if page.who else []
    facts += [f"gRPC: `{page.code}`."] if page.code else []
    facts += [f"Also: {', '.join(page.also)}."] if page.also else []
    if facts:
        yield from (" ".join(facts), "")


if __name__ == "__main__":
    print("\n".join(markdown()).rstrip())
