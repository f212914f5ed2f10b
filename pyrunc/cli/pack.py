"""Packs the code of `pyrunc` into the bundle that its program reads; bundled.py says what that looks like.

Code is what callers wait for: doc strings and the annotations of functions are left out, and modules that the same works need
lie together, because they are made in one go and what they share, names above all, is read once.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import marshal
import os
import sysconfig
from collections.abc import Container, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from types import CodeType
from typing import Any

# Of the standard library, what the verbs of callers import and CPython does not freeze itself.
OF_THE_LIBRARY = ("struct",)
EXTENSIONS, EXTENSION = ("_json", "termios"), -1
# What the works begin with: every command, an exec of a kept program, a new container. Their imports come along. A module
# that other works need as well must not be in the last: they would make all of it.
_NUMBERS = f"pyrunc.abi.syscalls_{os.uname().machine}"
WORKS = (
    ("pyrunc.cli.main", "pyrunc.cli.fast", "pyrunc.cli.life", "pyrunc.cgroups.group"),
    ("pyrunc.cli.execute", "pyrunc.lifecycle.again", "pyrunc.lifecycle.run"),
    ("pyrunc.lifecycle.create", "pyrunc.lifecycle.bundle", "pyrunc.lifecycle.run", "pyrunc.spec.check", "pyrunc.spec.parse",
     "pyrunc.cgroups.naming", "pyrunc.cgroups.limits", "pyrunc.cgroups.device_filter", "pyrunc.kernel.bpf",
     "pyrunc.kernel.reaper"),
)  # fmt: skip
# What a module imports by way of a function while it is made itself.
AT_ONCE = {"pyrunc.kernel.call": (_NUMBERS,)}


def bundle(package: str, folders: Sequence[str]) -> bytes:
    """The modules of the folder `pyrunc`; `folders` follow the standard library. Raises CycleError if they import in a circle."""
    # The time is taken before a file is read: an edit in between makes the entry stale, not wrong.
    stamps = {name: (path, *_stamp(path)) for name, path in _sources(package)}
    trees = {name: parsed(stamp[0]) for name, stamp in stamps.items()}
    imports = {name: (*_imports(name, tree, trees), *AT_ONCE.get(name, ())) for name, tree in trees.items()}
    batches = _batches(imports)
    parts = [
        marshal.dumps({name: compiled(trees[name], stamps[name][0]) for name in batch}) for batch in batches
    ]
    places = [(sum(map(len, parts[:number])), len(part)) for number, part in enumerate(parts)]
    index = {
        name: (number, _is_package(stamps[name][0]), *stamps[name])
        for number, batch in enumerate(batches)
        for name in batch
    }
    for name in EXTENSIONS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".so"):
            index[name] = (EXTENSION, False, spec.origin, *_stamp(spec.origin))
    head = marshal.dumps((importlib.util.MAGIC_NUMBER, list(folders), index, places))
    return b"".join((len(head).to_bytes(8, "little"), head, *parts))


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size


def _is_package(path: str) -> bool:
    return os.path.basename(path) == "__init__.py"


def _imports(name: str, tree: ast.Module, known: Container[str]) -> tuple[str, ...]:
    """The modules among `known` that it imports whenever it is imported itself, its packages first."""
    named = [name.rsplit(".", depth)[0] for depth in range(name.count("."), 0, -1)]
    for line in tree.body:
        if isinstance(line, ast.Import):
            named += [alias.name for alias in line.names]
        elif isinstance(line, ast.ImportFrom):
            named.append(line.module or "")
            named += [f"{line.module}.{alias.name}" for alias in line.names]
    return tuple(dict.fromkeys(found for found in named if found in known))


def _batches(imports: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Modules that the same works need are a batch, others are alone; what a module imports comes before it."""
    batches: dict[object, list[str]] = {}
    needed = [_with_imports(entrances, imports) for entrances in WORKS]
    for name in TopologicalSorter(imports).static_order():
        works = tuple(name in modules for modules in needed)
        batches.setdefault(works if any(works) else name, []).append(name)
    return list(batches.values())


def _with_imports(names: Sequence[str], imports: Mapping[str, Sequence[str]]) -> set[str]:
    found, to_do = set[str](), [name for name in names if name in imports]
    while to_do:
        if (name := to_do.pop()) not in found:
            found.add(name)
            to_do += imports[name]
    return found


def _sources(package: str) -> Iterator[tuple[str, str]]:
    for name in OF_THE_LIBRARY:
        yield name, source_of(name)
    for folder, below, files in os.walk(package):
        below[:] = sorted(name for name in below if name != "__pycache__")
        for file in sorted(files):
            path = os.path.join(folder, file)
            module = os.path.relpath(path, os.path.dirname(package)).removesuffix(".py").replace(os.sep, ".")
            if file.endswith(".py"):
                yield module.removesuffix(".__init__"), path


def source_of(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    if spec.origin is not None and spec.origin.endswith(".py"):
        return spec.origin
    return os.path.join(sysconfig.get_path("stdlib"), *name.split(".")) + ".py"  # frozen by CPython


def parsed(path: str) -> ast.Module:
    with open(path, "rb") as file:
        return ast.parse(file.read(), path)


def compiled(tree: ast.Module, path: str) -> CodeType:
    """The code of a source file without what only readers need, half of it: doc strings, functions' annotations, columns."""
    future = [line for line in tree.body if isinstance(line, ast.ImportFrom) and line.module == "__future__"]
    tree.body = [line for line in tree.body if line not in future]  # it speaks to the compiler only
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.excepthandler):  # tracebacks name the line
            node.end_lineno, node.col_offset, node.end_col_offset = node.lineno, -1, -1
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
