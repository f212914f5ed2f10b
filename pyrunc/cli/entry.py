"""Installs the command `pyrunc`: an isolated interpreter with a fixed path.

A script that pip installs imports `site`, which takes 13 to 15 ms per start if site-packages has
.pth files. It would also run code from PYTHONPATH and from a user's own packages as root. `pyrunc`
does neither. It has one of two forms: a script for `python -IS`, or the executable of front.c. The
executable contains the same interpreter. It starts from a snapshot of its memory, in a fifth of the
script's time. Compiling the executable needs a C compiler and Python's static library (Debian:
libpython3-dev, which python3-dev brings); without these the script is installed.

Usage: `python -m pyrunc.cli.entry install BIN_DIR`. A package compiles the executable where it is
built (`compile_program`) and takes the snapshot where it is installed (`pyrunc --write-snapshot
FILE`), which needs no compiler.
"""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyrunc
from pyrunc.atomic_file import write_bytes

PACKAGE = os.path.dirname(os.path.abspath(pyrunc.__file__))
NATIVE = os.path.join(PACKAGE, "native")
FRONT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "front.c")
# front.c includes these files, unless the folder `accelerate` was removed.
HEAP_ORDER = os.path.join(PACKAGE, "accelerate", "heap_order.c")
JSON = os.path.join(PACKAGE, "accelerate", "json.c")
WRAPPED = ("malloc", "calloc", "realloc", "free")


@dataclass(frozen=True, slots=True)
class InstallPaths:
    """Paths of an installation of the command `pyrunc`.

    - `python`: the interpreter.
    - `searched`: the folders that follow the standard library in sys.path.
    - `native`: the folder of `pyrunc-snapshot` and of `pyrunc-script`, the Python script that is
      installed where front.c cannot be compiled.
    """

    python: str
    searched: tuple[str, ...]
    native: str

    @property
    def script(self) -> str:
        return os.path.join(self.native, "pyrunc-script")

    @property
    def snapshot(self) -> str:
        return os.path.join(self.native, "pyrunc-snapshot")


def here() -> InstallPaths:
    """Return the paths of this installation: this interpreter and the folders of its modules."""
    folders = [
        os.path.dirname(PACKAGE),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    ]
    return InstallPaths(os.path.realpath(sys.executable), tuple(dict.fromkeys(folders)), NATIVE)


def at(library: str) -> InstallPaths:
    """Return the paths of an installation that uses this interpreter and has all modules in
    `library`. This folder need not exist yet."""
    return InstallPaths(
        os.path.realpath(sys.executable), (library,), os.path.join(library, "pyrunc", "native")
    )


def script(python: str, searched: Sequence[str]) -> str:
    """Return the text of the Python script that is installed as `pyrunc` where front.c cannot be
    compiled. `python`: the interpreter's path; `searched`: folders that the script appends to
    sys.path."""
    return (
        f"#!{python} -IS\n"
        "import os, sys\n"
        f"sys.path += {list(searched)!r}\n"
        "from pyrunc.cli.main import main\n"
        # Skips the interpreter's shutdown: the kernel frees the memory of the process anyway.
        "os._exit(main())\n"
    )


def install(folder: str) -> str:
    """Write `pyrunc` into `folder`, which must exist; returns its path. Raises OSError."""
    path, paths = os.path.join(os.path.abspath(folder), "pyrunc"), here()
    text = script(paths.python, paths.searched).encode()
    os.makedirs(NATIVE, exist_ok=True)
    write_bytes(paths.script, text, mode=0o755)
    if not _link(path, paths):
        write_bytes(path, text, mode=0o755)
    return path


def _link(path: str, paths: InstallPaths) -> bool:
    """Compile front.c to the executable `path` and store its snapshot. False if a command fails, or
    without a compiler or Python's static library; `path` then stays as it is."""
    program, snapshot = f"{path}.{os.getpid()}", f"{paths.snapshot}.{os.getpid()}"
    # Before the snapshot: an import that compiles its module allocates other blocks of memory than
    # later imports (heap_order.c).
    compileall.compile_dir(PACKAGE, quiet=2)
    try:
        if not (
            compile_program(program, paths) and _succeeds([program, "--write-snapshot", snapshot])
        ):
            return False
        # The snapshot first: an installed executable without it, or with an older one, would run as
        # a script.
        os.rename(snapshot, paths.snapshot)
        if not _succeeds([program, "--version"]):
            return False
        os.rename(program, path)
        return True
    finally:
        for leftover in (program, snapshot):
            if os.path.exists(leftover):
                os.unlink(leftover)


@dataclass(frozen=True, slots=True)
class BuildTarget:
    """The C compiler and the Python with which front.c is built.

    - `compiler`: the command and its options
    - `variables`: the variables with which Python was built (sysconfig)
    - `root`: the sysroot with Python's headers and libraries; empty for this machine's `/`
    """

    compiler: tuple[str, ...]
    variables: Mapping[str, str]
    root: str = ""

    def path(self, *names: str) -> str:
        """Join `names` to an absolute path of the target, and return it with `root` in front."""
        return self.root + os.path.join("/", *names)

    @property
    def library(self) -> str:
        """Return the path of Python's static library."""
        return self.path(self.variables["LIBPL"], f"libpython{self.variables['LDVERSION']}.a")


def native() -> BuildTarget | None:
    """Return this machine's compiler and Python as a build target. None without a compiler or
    without Python's static library."""
    compiler = shutil.which("cc")
    target = BuildTarget((compiler or "",), sysconfig.get_config_vars())
    return target if compiler is not None and os.path.exists(target.library) else None


def compile_program(path: str, paths: InstallPaths, target: BuildTarget | None = None) -> bool:
    """Compile front.c to the executable `path`, which contains `paths` and Python's static library.
    False without a compiler or this library, and when the compiler fails. If it fails, its messages
    are printed to stderr."""
    target = target or native()
    if target is None:
        return False
    options = (target.variables.get(name) or "" for name in ("LIBS", "SYSLIBS", "MODLIBS"))
    names = " ".join(options).split()
    # Debian 13's Python library refers to hashlib's own SHA-2, an archive in Python's build folder
    # that no package contains.
    absent = [
        name for name in names if name.endswith("libHacl_Hash_SHA2.a") and not os.path.exists(name)
    ]
    names = [name for name in dict.fromkeys(names) if name not in absent]
    include = target.path(sysconfig.get_path("include"))
    # Not position independent: the snapshot holds addresses of the executable, which must be the
    # same in each process.
    words = [*target.compiler, "-O2", "-no-pie", f"-I{include}", *_definitions(paths)]
    words += ["-DWITHOUT_SHA2"] if absent else []
    words += [f"-Wl,--wrap={name}" for name in WRAPPED]
    words += [FRONT, target.library, "-o", path, "-Wl,--export-dynamic", "-s"]
    return _succeeds([*words, *(_static_if_there(target, name) for name in names)])


def _succeeds(command: Sequence[str]) -> bool:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"pyrunc stays a script: {_failure(command, done)}", file=sys.stderr)
    return not done.returncode


def _failure(command: Sequence[str], done: subprocess.CompletedProcess[str]) -> str:
    """Return a line for a failed command: its first words, its exit code or signal, and its
    stderr."""
    if done.returncode < 0:
        end = f"ended by {signal.Signals(-done.returncode).name}"
    else:
        end = f"exit code {done.returncode}"
    return f"{' '.join(command[:2])}: {end}\n{done.stderr}".rstrip()


def _static_if_there(target: BuildTarget, option: str) -> str:
    """For the linker options `-lz` and `-lexpat`, return the path of the static archive if it
    exists. In all other cases, return `option`. Loading zlib or expat as a shared library would
    cost each start a hundred microseconds."""
    archive = target.path(target.variables["LIBDIR"], f"lib{option[2:]}.a")
    return archive if option in ("-lz", "-lexpat") and os.path.exists(archive) else option


def _definitions(paths: InstallPaths) -> Iterator[str]:
    library = sysconfig.get_path("stdlib")
    strings = {
        "PYTHON": paths.python,
        "SCRIPT": paths.script,
        "SNAPSHOT": paths.snapshot,
        "PREFIX": sys.base_prefix,
        # A snapshot fits one build of the executable only, and is recognised by this.
        "BUILD": os.urandom(12).hex(),
    }
    parts = {"HEAP_ORDER": HEAP_ORDER, "JSON": JSON}
    strings |= {name: path for name, path in parts.items() if os.path.exists(path)}
    for name, value in strings.items():
        yield f'-D{name}="{value}"'
    yield f'-DSTDLIB=L"{library}"'
    searched = (library, os.path.join(library, "lib-dynload"), *paths.searched)
    yield "-DSEARCHED=" + ",".join(f'L"{folder}"' for folder in searched)


def main(arguments: Sequence[str]) -> int:
    """Run `install BIN_DIR`."""
    if len(arguments) != 2 or arguments[0] != "install":
        print("usage: python -m pyrunc.cli.entry install BIN_DIR", file=sys.stderr)
        return 1
    print(install(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
