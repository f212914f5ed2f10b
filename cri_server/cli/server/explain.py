"""`pyrunc-cri explain`: what an error, an exit reason or a finding of doctor means, and what to do."""

from __future__ import annotations

import textwrap

import click

from cri_server.explain.model import Page, find
from cri_server.explain.pages import CHAPTERS, PAGES
from pyrunc.errors import NotFound

WIDTH = 100


@click.command()
@click.argument("words", nargs=-1, metavar="[NAME | ERROR...]")
def explain(words: tuple[str, ...]) -> None:
    """Explain an error by its name, or by its text; without arguments list all names.

    Names are those of the log's field `explain`, of doctor's findings, of the kernel (ENOSPC) and
    of containers' ends (OOMKilled).
    """
    if not words:
        for group, (title, _) in CHAPTERS.items():
            names = [page.name for page in PAGES if page.group == group]
            click.echo(f"{title}:\n{textwrap.fill(' '.join(names), WIDTH, initial_indent='  ', subsequent_indent='  ', break_on_hyphens=False)}")  # fmt: skip
        return
    found = find(PAGES, " ".join(words))
    if not found:
        raise NotFound(
            f"nothing is known about {' '.join(words)!r}; `pyrunc-cri explain` lists what there is"
        )
    click.echo("\n\n".join(_told(page) for page in found))


def _told(page: Page) -> str:
    facts = [f"acts: {page.who}"] if page.who else []
    facts += [f"gRPC: {page.code}"] if page.code else []
    head = f"{page.name}: {page.title}" + (f" ({', '.join(facts)})" if facts else "")
    return "\n".join([head, *(_filled(text) for text in (page.text, page.todo))])


def _filled(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
