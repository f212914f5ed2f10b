"""Reads the tables of names and numbers in this package."""

from __future__ import annotations


def numbered(table: str) -> dict[str, int]:
    """Parse `table` to a dict: name -> number. Each line is a number and names. The first name has
    this number, each further name the next number."""
    numbers = {}
    for line in table.splitlines():
        first, *names = line.split() or ("0",)
        for number, name in enumerate(names, int(first)):
            numbers[name] = number
    return numbers
