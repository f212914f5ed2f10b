"""Commands out of docs/: what a page tells a person to type is what a test types."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, heading: str) -> list[str]:
    """The `sh` blocks of docs/`page` below `heading`, up to the next heading of any level."""
    text = (DOCS / page).read_text(encoding="utf-8")
    sections = re.split(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    if heading not in found:
        raise KeyError(f"docs/{page} has no heading {heading!r}, but {sorted(found)}")
    return re.findall(r"^```sh\n(.*?)^```$", found[heading], flags=re.MULTILINE | re.DOTALL)


def filled(block: str, **words: str) -> str:
    """The block with each of the capital `words` replaced. One that is not there, or is left,
    raises ValueError."""
    for name, value in words.items():
        if not re.search(rf"\b{name}\b", block):
            raise ValueError(f"no {name} in:\n{block}")
        block = re.sub(rf"\b{name}\b", lambda _: value, block)  # noqa: B023
    commands = re.sub(r"#.*", "", block)
    left = re.findall(r"(?<![\w$-])[A-Z][A-Z_]{3,}\b(?!=)", commands)
    if left:
        raise ValueError(f"{left} of the block are not filled:\n{block}")
    return block
