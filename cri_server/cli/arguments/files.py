"""The type of arguments and options that name a file."""

from __future__ import annotations

from pathlib import Path

import click

# click does not check the file, so that the verb's error can say what is wrong with it.
FILE = click.Path(path_type=Path, readable=False)
