"""Between server, shim and compiler go records, which both ends import; a bare JSON object is for what reads foreign JSON, and for the
few that carry an object from one end to the other without looking into it."""

from __future__ import annotations

import ast

from tests.architecture.test_imports import ROOT

CONTRACTS = ("ipc.py", "peer.py", "records.py", "compiler", "launch/sealed.py", "shim", "zygote")

# Below pyrunc/, with the reason.
MAY_HOLD_OBJECTS = {
    "ipc.py": "the framing: one object per packet, whatever it is",
    "peer.py": "the framing: questions with numbers, whatever they ask",
    "records.py": "makes records of objects, and objects of records",
    "compiler/client.py": "passes on what a compiler has answered; OCI process objects",
    "compiler/messages.py": "fields that are passed on, OCI process objects, launch.json's of another runtime",
    "compiler/service.py": "reads launch.json and holder.json, in which are parts of OCI configurations",
    "launch/sealed.py": "its message is what a compiler answers and a shim passes on",
    "shim/client.py": "the framing of events",
    "shim/main.py": "arguments of a fork: zygote",
    "shim/messages.py": "fields that are passed on to the starter, or come from another version's event",
    "shim/other_runtime.py": "OCI process objects for another runtime's command line",
    "shim/pod.py": "what a fork of the shim answers; state.json, whose fields are the OCI state's",
    "shim/serve.py": "the framing: a call before its record is read",
    "shim/worker.py": "the framing between the shim and its fork",
    "zygote/child.py": "arguments of any function",
    "zygote/client.py": "arguments of any function, and what one has prepared",
    "zygote/loop.py": "the framing: a call before its record is read",
    "zygote/messages.py": "arguments of any function, and what one has prepared",
    "zygote/preload.py": "arguments of any function, and what one has prepared",
    "zygote/spare.py": "arguments of any function, and what one has prepared",
    "zygote/workers.py": "questions and answers of any worker",
}
OBJECT_TYPES = {"dict[str, Any]", "dict[str, object]", "Mapping[str, Any]", "Mapping[str, object]"}


def test_what_our_processes_say_to_each_other_is_typed() -> None:
    found = set()
    for contract in CONTRACTS:
        path = ROOT / "pyrunc" / contract
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                is_object = isinstance(node, ast.Subscript) and ast.unparse(node) in OBJECT_TYPES
                if is_object or ast.unparse(node) in ("Message", "ipc.Message"):
                    found.add(str(file.relative_to(ROOT / "pyrunc")))
    assert not found - set(MAY_HOLD_OBJECTS), "a record takes the place of an object here"
    assert not set(MAY_HOLD_OBJECTS) - found, "no exception is needed any more"
