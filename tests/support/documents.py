"""Reads commands from docs/, so that tests run the same commands as the pages."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, heading: str) -> list[str]:
    """Return the blocks of shell commands in docs/`page` from `heading` to the next heading.

    Raises KeyError when the page has no such heading.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    sections = re.split(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    bodies = dict(zip(sections[1::2], sections[2::2], strict=True))
    if heading not in bodies:
        raise KeyError(f"docs/{page} has no heading {heading!r}, but {sorted(bodies)}")
    return re.findall(r"^```sh\n(.*?)^```$", bodies[heading], flags=re.MULTILINE | re.DOTALL)


def filled(block: str, **words: str) -> str:
    """Return the block of shell commands with each placeholder, such as NODE, replaced; `words`
    maps placeholders to values.

    Raises ValueError when the block lacks one of them, or has another placeholder.
    """
    for name, value in words.items():
        if not re.search(rf"\b{name}\b", block):
            raise ValueError(f"no {name} in:\n{block}")
        block = re.sub(rf"\b{name}\b", lambda _: value, block)  # noqa: B023
    commands = re.sub(r"#.*", "", block)
    left = re.findall(r"(?<![\w$-])[A-Z][A-Z_]{3,}\b(?!=)", commands)
    if left:
        raise ValueError(f"{left} of the block are not filled:\n{block}")
    return block
