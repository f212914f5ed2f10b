"""Writes the program `pyrunc` that callers exec: an isolated interpreter with a fixed path.

What pip installs goes through `site`, and a site-packages with .pth files costs 13 to 15 ms per start; PYTHONPATH and a user's
own packages would be code in a root process. `-I -S` has neither. Usage: `python -m pyrunc.cli.entry install BIN_DIR`.
"""

from __future__ import annotations

import os
import sys
import sysconfig

import pyrunc
from pyrunc.record import write_bytes


def script(python: str, folders: list[str]) -> str:
    """The program's text. `folders` are searched after the standard library, in that order."""
    return (
        f"#!{python} -IS\n"
        "import sys\n"
        f"sys.path += {folders!r}\n"
        "from pyrunc.cli.main import main\n"
        "sys.exit(main())\n"
    )


def install(folder: str) -> str:
    """Write `pyrunc` into `folder`, which must exist; returns its path. Raises OSError."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(pyrunc.__file__)))
    folders = list(dict.fromkeys([package, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))
    path = os.path.join(os.path.abspath(folder), "pyrunc")
    write_bytes(path, script(os.path.realpath(sys.executable), folders).encode(), mode=0o755)
    return path


def main(arguments: list[str]) -> int:
    """`install BIN_DIR`."""
    if len(arguments) != 2 or arguments[0] != "install":
        print("usage: python -m pyrunc.cli.entry install BIN_DIR", file=sys.stderr)
        return 1
    print(install(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
