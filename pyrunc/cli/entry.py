"""Writes the program `pyrunc` that callers exec: an isolated interpreter with a fixed path.

What pip installs goes through `site`, and a site-packages with .pth files costs 13 to 15 ms per start; PYTHONPATH and a user's
own packages would be code in a root process. Two forms have neither: a script for `python -IS`, and front.c, the same
interpreter linked into a program that starts in half the time. The program needs a C compiler and Python's static library
(Debian: libpython3-dev, which python3-dev brings); without these the script is installed.

Usage: `python -m pyrunc.cli.entry install BIN_DIR`.
"""

from __future__ import annotations

import marshal
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence

import pyrunc
from pyrunc.cli.pack import bundle, compiled, parsed, source_of
from pyrunc.record import write_bytes

PACKAGE = os.path.dirname(os.path.abspath(pyrunc.__file__))
NATIVE = os.path.join(PACKAGE, "native")
SCRIPT, BUNDLE = os.path.join(NATIVE, "pyrunc-script"), os.path.join(NATIVE, "pyrunc-bundle")
FRONT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "front.c")
START = "_pyrunc_start"
FROZEN = ("encodings", "encodings.aliases", "encodings.utf_8", "pyrunc.cli.bundled")


def folders() -> list[str]:
    """What is searched after the standard library, in that order."""
    found = [os.path.dirname(PACKAGE), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return list(dict.fromkeys(found))


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
    path, python = os.path.join(os.path.abspath(folder), "pyrunc"), os.path.realpath(sys.executable)
    text = script(python, folders()).encode()
    os.makedirs(NATIVE, exist_ok=True)
    write_bytes(SCRIPT, text, mode=0o755)
    write_bytes(BUNDLE, bundle(PACKAGE, folders()), mode=0o644)
    if not _link(path, python):
        write_bytes(path, text, mode=0o755)
    return path


def _link(path: str, python: str) -> bool:
    """Compile front.c against Python's static library; False when this machine cannot."""
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
    header, made = f"{path}.h.{os.getpid()}", f"{path}.{os.getpid()}"
    write_bytes(header, _frozen_header().encode())
    words = [compiler, "-O2", "-no-pie", f"-I{sysconfig.get_path('include')}", *_definitions(python, header)]
    words += ["-DWITHOUT_SHA2"] if absent else []
    words += ["-Wl,--wrap=_Py_Deepfreeze_Init"] if sys.version_info < (3, 12) else []
    words += [FRONT, library, "-o", made, "-Wl,--export-dynamic", "-s", *map(_static_if_there, names)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"pyrunc stays a script, its program could not be linked:\n{done.stderr}", file=sys.stderr)
            return False
        os.rename(made, path)
        return True
    finally:
        os.unlink(header)


def _static_if_there(option: str) -> str:
    """zlib and expat come with Python's static library; loaded at each start they cost a hundred microseconds."""
    archive = os.path.join(sysconfig.get_config_var("LIBDIR"), f"lib{option[2:]}.a")
    return archive if option in ("-lz", "-lexpat") and os.path.exists(archive) else option


def _definitions(python: str, header: str) -> Iterator[str]:
    status = os.stat(python)
    library = sysconfig.get_path("stdlib")
    strings = {
        "PYTHON": python,
        "SCRIPT": SCRIPT,
        "BUNDLE": BUNDLE,
        "PREFIX": sys.base_prefix,
        "FROZEN": header,
    }
    for name, value in strings.items():
        yield f'-D{name}="{value}"'
    yield f'-DSTDLIB=L"{library}"'
    yield f'-DDYNLOAD=L"{os.path.join(library, "lib-dynload")}"'
    yield f"-DPYTHON_MTIME_NS={status.st_mtime_ns}LL"
    yield f"-DPYTHON_SIZE={status.st_size}"


def _frozen_header() -> str:
    """C arrays of the code that the interpreter needs before there is a bundle."""
    arrays, rows = [], []
    for number, name in enumerate(FROZEN):
        path = source_of(name)
        code = marshal.dumps(compiled(parsed(path), path))
        arrays.append(f"static const unsigned char code_{number}[] = {{{','.join(map(str, code))}}};")
        is_package = int(name == "encodings")
        as_name = START if name.startswith("pyrunc.") else name
        rows.append(f'\t{{"{as_name}", code_{number}, sizeof code_{number}, {is_package}}},')
    return "\n".join((*arrays, "static const struct _frozen frozen[] = {", *rows, "\t{NULL},", "};", ""))


def main(arguments: Sequence[str]) -> int:
    """`install BIN_DIR`."""
    if len(arguments) != 2 or arguments[0] != "install":
        print("usage: python -m pyrunc.cli.entry install BIN_DIR", file=sys.stderr)
        return 1
    print(install(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
