"""Reads the tables of names and numbers in this package."""

from __future__ import annotations


def numbered(table: str) -> dict[str, int]:
    """Return the number of each name in a table. Each line has the number of its first name, then
    names with consecutive numbers."""
    numbers = {}
    for line in table.splitlines():
        first, *names = line.split() or ("0",)
        for number, name in enumerate(names, int(first)):
            numbers[name] = number
    return numbers
