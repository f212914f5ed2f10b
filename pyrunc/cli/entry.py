"""Writes the program `pyrunc` that callers exec: an isolated interpreter with a fixed path.

What pip installs goes through `site`, and a site-packages with .pth files costs 13 to 15 ms per start; PYTHONPATH and a user's
own packages would be code in a root process. Two forms have neither: a script for `python -IS`, and front.c, the same
interpreter linked into a program that starts in half the time. The program needs a C compiler and Python's static library
(Debian: libpython3-dev, which python3-dev brings); without these the script is installed.

Usage: `python -m pyrunc.cli.entry install BIN_DIR`.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import marshal
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import pyrunc
from pyrunc.record import write_bytes

PACKAGE = os.path.dirname(os.path.abspath(pyrunc.__file__))
NATIVE = os.path.join(PACKAGE, "native")
SCRIPT, BUNDLE = os.path.join(NATIVE, "pyrunc-script"), os.path.join(NATIVE, "pyrunc-bundle")
FRONT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "front.c")
START = "_pyrunc_start"
FROZEN = ("encodings", "encodings.aliases", "encodings.utf_8", "pyrunc.cli.bundled")
# Of the standard library, what the verbs of callers import and CPython does not freeze itself.
BUNDLED_OF_THE_LIBRARY = ("struct",)
EXTENSIONS = ("_json", "termios")


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


def bundle() -> bytes:
    """The modules of `pyrunc` as bundled.py reads them."""
    index: dict[str, tuple[int, int, bool, str, int, int]] = {}
    parts: list[bytes] = []
    offset = 0
    for name, path in _sources():
        status = os.stat(path)  # before it is read: an edit in between makes the entry stale, not wrong
        code = marshal.dumps(_compiled(path))
        is_package = os.path.basename(path) == "__init__.py"
        index[name] = (offset, len(code), is_package, path, status.st_mtime_ns, status.st_size)
        parts.append(code)
        offset += len(code)
    for name in EXTENSIONS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".so"):
            status = os.stat(spec.origin)
            index[name] = (0, -1, False, spec.origin, status.st_mtime_ns, status.st_size)
    head = marshal.dumps((importlib.util.MAGIC_NUMBER, folders(), index))
    return b"".join((len(head).to_bytes(8, "little"), head, *parts))


def _sources() -> Iterator[tuple[str, str]]:
    for name in BUNDLED_OF_THE_LIBRARY:
        yield name, _source_of(name)
    for folder, below, files in os.walk(PACKAGE):
        below[:] = sorted(name for name in below if name != "__pycache__")
        for file in sorted(files):
            path = os.path.join(folder, file)
            module = os.path.relpath(path, os.path.dirname(PACKAGE)).removesuffix(".py").replace(os.sep, ".")
            if file.endswith(".py"):
                yield module.removesuffix(".__init__"), path


def _source_of(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    if spec.origin is not None and spec.origin.endswith(".py"):
        return spec.origin
    return os.path.join(sysconfig.get_path("stdlib"), *name.split(".")) + ".py"  # frozen by CPython


def _compiled(path: str) -> CodeType:
    """The code of a source file without what only readers need: doc strings and functions' annotations, a third of it."""
    with open(path, "rb") as file:
        tree = ast.parse(file.read(), path)
    future = [line for line in tree.body if isinstance(line, ast.ImportFrom) and line.module == "__future__"]
    tree.body = [line for line in tree.body if line not in future]  # it speaks to the compiler only
    flags = __future__.annotations.compiler_flag if future else 0
    code: CodeType = compile(_Bare().visit(tree), path, "exec", flags, dont_inherit=True, optimize=0)
    return code


class _Bare(ast.NodeTransformer):
    """Annotations of classes stay: they are the fields of a `Value`."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            argument.annotation = None
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None:
                rest.annotation = None
        return self._without_text(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._without_text(node)

    def visit_Module(self, node: ast.Module) -> ast.AST:
        return self._without_text(node)

    def _without_text(self, node: Any) -> ast.AST:
        """A constant alone in a line does nothing, whatever it says."""
        self.generic_visit(node)
        rest = [
            line
            for line in node.body
            if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        ]
        node.body = rest or [ast.copy_location(ast.Pass(), node.body[0])] if node.body else []
        bare: ast.AST = node
        return bare


def install(folder: str) -> str:
    """Write `pyrunc` into `folder`, which must exist; returns its path. Raises OSError."""
    path, python = os.path.join(os.path.abspath(folder), "pyrunc"), os.path.realpath(sys.executable)
    text = script(python, folders()).encode()
    os.makedirs(NATIVE, exist_ok=True)
    write_bytes(SCRIPT, text, mode=0o755)
    write_bytes(BUNDLE, bundle(), mode=0o644)
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
    if absent := [name for name in names if name.endswith(".a") and not os.path.exists(name)]:
        # Debian 13's libpython3.13.a asks for an archive of Python's build folder, which no package has.
        print(f"pyrunc stays a script: {library} needs {absent[0]}, which is not there", file=sys.stderr)
        return False
    header, made = f"{path}.h.{os.getpid()}", f"{path}.{os.getpid()}"
    write_bytes(header, _frozen_header().encode())
    words = [compiler, "-O2", "-no-pie", f"-I{sysconfig.get_path('include')}", *_definitions(python, header)]
    words += [FRONT, library, "-o", made, "-Wl,--export-dynamic", "-s"]
    words += map(_static_if_there, dict.fromkeys(names))
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
        code = marshal.dumps(_compiled(_source_of(name)))
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
