"""Lists the paths and texts of the files that an installation writes, except the executables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

import click

from cri_server.config import DEFAULT_PATH
from cri_server.install import config_file, manual, shells

UNIT = "pyrunc-cri.service"
EXAMPLE = "10-pyrunc.conflist"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the files of an installation are.

    - `program`: the `pyrunc-cri` that the systemd unit executes.
    - `prefix`: /usr for a package, else /usr/local.
    - `settings`: the parent of systemd/system, tmpfiles.d and so on: /usr/lib for a package, else
      /etc.
    """

    program: str
    prefix: str
    settings: str


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A file to install. `keep`: once an administrator has changed the file, an installation does
    not overwrite it, and only a purge removes it."""

    path: str
    text: str
    mode: int = 0o644
    keep: bool = False


def packaged(program: str) -> Layout:
    """Return the layout of a distribution's package."""
    return Layout(program, "/usr", "/usr/lib")


def local(program: str) -> Layout:
    """Return the layout of an installation without a package."""
    return Layout(program, "/usr/local", "/etc")


def files(layout: Layout, programs: Mapping[str, click.Group]) -> Iterator[NodeFile]:
    """Yield all files to install. `programs` maps the name of each executable to its click command;
    manual pages and completion scripts are generated from these commands."""
    settings, share = layout.settings, f"{layout.prefix}/share"
    yield NodeFile(
        f"{settings}/systemd/system/{UNIT}", data(UNIT).replace("@PROGRAM@", layout.program)
    )
    yield NodeFile(f"{settings}/tmpfiles.d/pyrunc.conf", data("tmpfiles.conf"))
    yield NodeFile(f"{settings}/modules-load.d/pyrunc.conf", data("modules-load.conf"))
    yield NodeFile(f"{settings}/sysctl.d/50-pyrunc.conf", data("sysctl.conf"))
    yield NodeFile(str(DEFAULT_PATH), config_file.text(), keep=True)
    yield NodeFile(f"{share}/doc/pyrunc/examples/{EXAMPLE}", data(EXAMPLE))
    yield NodeFile(f"{share}/man/man5/pyrunc-config.5", manual.config_page())
    for name, program in programs.items():
        yield NodeFile(f"{share}/man/man8/{name}.8", manual.command_page(name, program))
        for shell in shells.CLASSES:
            yield NodeFile(
                shells.path(shell, name, layout.prefix), shells.script(shell, name, program)
            )


def data(name: str) -> str:
    """Return the text of the file `name` in the package's folder `data`."""
    return (resources.files("cri_server.install") / "data" / name).read_text(encoding="utf-8")
