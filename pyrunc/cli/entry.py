"""Writes the program `pyrunc` that callers exec: an isolated interpreter with a fixed path.

What pip installs goes through `site`, and a site-packages with .pth files costs 13 to 15 ms per start; PYTHONPATH and a user's
own packages would be code in a root process. Two forms have neither: a script for `python -IS`, and front.c, the same
interpreter linked into a program that begins at a snapshot of itself, in a fifth of the script's time. The program needs a C
compiler and Python's static library (Debian: libpython3-dev, which python3-dev brings); without these the script is installed.

Usage: `python -m pyrunc.cli.entry install BIN_DIR`. A package compiles the program where it is built (`compile_program`) and
takes the snapshot where it is installed (`pyrunc --write-snapshot FILE`), which needs no compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyrunc
from pyrunc.atomic_file import write_bytes

PACKAGE = os.path.dirname(os.path.abspath(pyrunc.__file__))
NATIVE = os.path.join(PACKAGE, "native")
FRONT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "front.c")
WRAPPED = ("malloc", "calloc", "realloc", "free")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the program runs: its interpreter, the folders that are searched after the standard library, and the folder of
    the plain script and the snapshot."""

    python: str
    searched: tuple[str, ...]
    native: str

    @property
    def script(self) -> str:
        return os.path.join(self.native, "pyrunc-script")

    @property
    def snapshot(self) -> str:
        return os.path.join(self.native, "pyrunc-snapshot")


def here() -> Place:
    """With this interpreter and the modules of this installation."""
    found = [os.path.dirname(PACKAGE), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return Place(os.path.realpath(sys.executable), tuple(dict.fromkeys(found)), NATIVE)


def at(library: str) -> Place:
    """With this interpreter and all modules in the folder `library`, which need not exist here."""
    return Place(os.path.realpath(sys.executable), (library,), os.path.join(library, "pyrunc", "native"))


def script(python: str, searched: Sequence[str]) -> str:
    """The text of the plain form. `searched` follows the standard library."""
    return (
        f"#!{python} -IS\n"
        "import os, sys\n"
        f"sys.path += {list(searched)!r}\n"
        "from pyrunc.cli.main import main\n"
        "os._exit(main())\n"
    )


def install(folder: str) -> str:
    """Write `pyrunc` into `folder`, which must exist; returns its path. Raises OSError."""
    path, place = os.path.join(os.path.abspath(folder), "pyrunc"), here()
    text = script(place.python, place.searched).encode()
    os.makedirs(NATIVE, exist_ok=True)
    write_bytes(place.script, text, mode=0o755)
    if not _link(path, place):
        write_bytes(path, text, mode=0o755)
    return path


def _link(path: str, place: Place) -> bool:
    """Compile the program and take its snapshot; False when this machine cannot."""
    made, snapshot = f"{path}.{os.getpid()}", f"{place.snapshot}.{os.getpid()}"
    try:
        if not (compile_program(made, place) and _succeeds([made, "--write-snapshot", snapshot])):
            return False
        os.rename(snapshot, place.snapshot)
        if not _succeeds([made, "--version"]):
            return False
        os.rename(made, path)
        return True
    finally:
        for left in (made, snapshot):
            if os.path.exists(left):
                os.unlink(left)


def compile_program(path: str, place: Place) -> bool:
    """Compile front.c for `place` against Python's static library into `path`; False when this machine cannot."""
    compiler = shutil.which("cc")
    library = os.path.join(
        sysconfig.get_config_var("LIBPL"), f"libpython{sysconfig.get_config_var('LDVERSION')}.a"
    )
    if compiler is None or not os.path.exists(library):
        return False
    names = " ".join(sysconfig.get_config_var(name) or "" for name in ("LIBS", "SYSLIBS", "MODLIBS")).split()
    # Debian 13's library asks for an archive of Python's build folder, which no package has: hashlib's own SHA-2.
    absent = [name for name in names if name.endswith("libHacl_Hash_SHA2.a") and not os.path.exists(name)]
    names = [name for name in dict.fromkeys(names) if name not in absent]
    words = [compiler, "-O2", "-no-pie", f"-I{sysconfig.get_path('include')}", *_definitions(place)]
    words += ["-DWITHOUT_SHA2"] if absent else []
    words += [f"-Wl,--wrap={name}" for name in WRAPPED]
    words += [FRONT, library, "-o", path, "-Wl,--export-dynamic", "-s", *map(_static_if_there, names)]
    return _succeeds(words)


def _succeeds(command: Sequence[str]) -> bool:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"pyrunc stays a script, its program failed:\n{done.stderr}", file=sys.stderr)
    return not done.returncode


def _static_if_there(option: str) -> str:
    """zlib and expat come with Python's static library; loaded at each start they cost a hundred microseconds."""
    archive = os.path.join(sysconfig.get_config_var("LIBDIR"), f"lib{option[2:]}.a")
    return archive if option in ("-lz", "-lexpat") and os.path.exists(archive) else option


def _definitions(place: Place) -> Iterator[str]:
    library = sysconfig.get_path("stdlib")
    strings = {
        "PYTHON": place.python,
        "SCRIPT": place.script,
        "SNAPSHOT": place.snapshot,
        "PREFIX": sys.base_prefix,
        "BUILD": os.urandom(12).hex(),
    }
    for name, value in strings.items():
        yield f'-D{name}="{value}"'
    yield f'-DSTDLIB=L"{library}"'
    searched = (library, os.path.join(library, "lib-dynload"), *place.searched)
    yield "-DSEARCHED=" + ",".join(f'L"{folder}"' for folder in searched)


def main(arguments: Sequence[str]) -> int:
    """`install BIN_DIR`."""
    if len(arguments) != 2 or arguments[0] != "install":
        print("usage: python -m pyrunc.cli.entry install BIN_DIR", file=sys.stderr)
        return 1
    print(install(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
