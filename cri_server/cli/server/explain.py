"""`pyrunc-cri explain`: explains an error, an exit reason or a check of doctor, with a remedy."""

from __future__ import annotations

import re
import textwrap

import click

from cri_server.explain.model import Page, find
from cri_server.explain.pages import CHAPTERS, PAGES
from pyrunc.errors import NotFound

WIDTH = 100
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"


@click.command()
@click.argument("words", nargs=-1, metavar="[NAME | ERROR...]")
def explain(words: tuple[str, ...]) -> None:
    """Explain an error by its name or by its text; without arguments list all names.

    Names are those of the log's field `explain`, of the checks of doctor, of the kernel's errors
    (ENOSPC) and of the reasons for a container's exit (OOMKilled).
    """
    if not words:
        for chapter, (title, _) in CHAPTERS.items():
            names = [page.name for page in PAGES if page.chapter == chapter]
            click.echo(f"{title}:\n{_indent(' '.join(names))}")
        return
    query = " ".join(words)
    pages = find(PAGES, query)
    if not pages:
        raise NotFound(f"no page explains {query!r}; `pyrunc-cri explain` lists all pages")
    click.echo("\n\n".join(map(_describe, pages)))


def _describe(page: Page) -> str:
    texts = filter(None, (page.text, page.remedy, page.facts))
    return "\n".join([f"{page.name}: {page.title}", *map(_indent, texts)])


def _indent(text: str) -> str:
    # A command in backquotes stays on one line, so that it can be copied.
    glued = re.sub(
        "`[^`]*`", lambda command: NO_BREAK_SPACE.join(command[0].split()), " ".join(text.split())
    )
    lines = textwrap.fill(
        glued,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    return lines.replace(NO_BREAK_SPACE, " ")
