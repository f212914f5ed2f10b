"""Checks that functions have few parameters: a function with many needs a record, or does several
things."""

from __future__ import annotations

import ast

from tests.architecture.test_imports import MAY_IMPORT, modules

MOST = 7
MAY_HAVE_MORE = {
    "cni_plugins.bridge.links.attach_veth": "the ends of a veth, which the plugin knows one by one",
    "cri_server.cli.streams.execute.exec_": "the verb's options",
    "cri_server.cli.streams.logs.logs": "the verb's options",
    "cri_server.images.erofs.build.build": "what an index is made of; the processes that make it "
    "get it by name",
    "cri_server.images.service.ImageService.__init__": "what a server's configuration says of "
    "images",
    "pyrunc.compile.pause.compile_pause": "the request on the disk, and what only its shim has",
    "pyrunc.program.macros.open_at": "the arguments of one system call, and what follows from "
    "its result",
}


def functions(node: ast.AST, name: str) -> list[tuple[str, int]]:
    """Return (name, number of parameters without `self` and `cls`) of all functions below
    `node`."""
    definitions = []
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = child.args
            names = [
                each.arg
                for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            ]
            definitions.append(
                (inner, len([each for each in names if each not in ("self", "cls")]))
            )
        definitions += functions(child, inner)
    return definitions


def test_functions_have_few_parameters() -> None:
    many = {
        name
        for package in MAY_IMPORT
        for module, path in modules(package)
        for name, number in functions(ast.parse(path.read_text()), module)
        if number > MOST
    }
    assert not many - set(MAY_HAVE_MORE), "replace the parameters by a record"
    assert not set(MAY_HAVE_MORE) - many, "remove the needless exceptions"
