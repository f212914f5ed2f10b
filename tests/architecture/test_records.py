"""Between server, shim and compiler go records, which both ends import; a bare JSON object is for what reads foreign JSON, and for the
few that carry an object from one end to the other without looking into it."""

from __future__ import annotations

import ast

from tests.architecture.test_imports import ROOT

CONTRACTS = (
    "pyrunc/ipc.py",
    "pyrunc/peer.py",
    "pyrunc/records.py",
    "pyrunc/record_file.py",
    "pyrunc/compiler",
    "pyrunc/container/state.py",
    "pyrunc/launch/sealed.py",
    "pyrunc/shim",
    "pyrunc/zygote",
    "cni_plugins/errand.py",
    "cni_plugins/protocol/worker.py",
    "cri_server/errands.py",
    "cri_server/images/layer_jobs.py",
    "cri_server/images/layer_maker.py",
    "cri_server/network/workers.py",
    "cri_server/rpc/admin.py",
    "cri_server/rpc/image_admin.py",
    "cri_server/rpc/private.py",
    "cri_server/cli/client.py",
    "cri_server/images/erofs/mounts.py",
)

# With the reason.
MAY_HOLD_OBJECTS = {
    "cni_plugins/errand.py": "arguments and requests before their record is read; CNI's JSON",
    "cni_plugins/protocol/worker.py": "CNI's JSON: plugin inputs, results, errors",
    "cri_server/errands.py": "arguments before their record is read",
    "cri_server/rpc/image_admin.py": "a login, which the errors of a record would show",
    "cri_server/rpc/private.py": "the framing; a login; entries of the timeline, whose fields differ by call",
    "pyrunc/ipc.py": "the framing: one object per packet, whatever it is",
    "pyrunc/peer.py": "the framing: questions with numbers, whatever they ask",
    "pyrunc/records.py": "makes records of objects, and objects of records",
    "pyrunc/compiler/client.py": "passes on what a compiler has answered; OCI process objects",
    "pyrunc/compiler/files.py": "OCI's seccomp object, what checkpoint.Choices is told",
    "pyrunc/compiler/messages.py": "fields that are passed on, OCI process objects; in a shim launch.json without its record",
    "pyrunc/compiler/service.py": "a call before its record is read",
    "pyrunc/container/state.py": "config.json",
    "pyrunc/launch/sealed.py": "its message is what a compiler answers and a shim passes on",
    "pyrunc/shim/client.py": "the framing of events",
    "pyrunc/shim/main.py": "arguments before their record is read, and what goes to the zygote as it is",
    "pyrunc/shim/messages.py": "fields that are passed on to the starter, or come from another version's event",
    "pyrunc/shim/other_runtime.py": "OCI process objects for another runtime's command line",
    "pyrunc/shim/pod.py": "what a fork of the shim answers; state.json as a compiler made it (StateFile would cost each shim memory)",
    "pyrunc/shim/serve.py": "the framing: a call before its record is read",
    "pyrunc/shim/worker.py": "the framing between the shim and its fork",
    "pyrunc/zygote/child.py": "arguments of any function",
    "pyrunc/zygote/client.py": "the framing: arguments as they travel, and the first words before their record is read",
    "pyrunc/zygote/loop.py": "the framing: a call before its record is read",
    "pyrunc/zygote/messages.py": "arguments of any function, and what one has prepared",
    "pyrunc/zygote/preload.py": "arguments of any function, and what one has prepared",
    "pyrunc/zygote/spare.py": "arguments of any function, and what one has prepared",
}
OBJECT_TYPES = {"dict[str, Any]", "dict[str, object]", "Mapping[str, Any]", "Mapping[str, object]"}


def test_what_our_processes_say_to_each_other_is_typed() -> None:
    found = set()
    for contract in CONTRACTS:
        path = ROOT / contract
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                is_object = isinstance(node, ast.Subscript) and ast.unparse(node) in OBJECT_TYPES
                if is_object or ast.unparse(node) in ("Message", "ipc.Message"):
                    found.add(str(file.relative_to(ROOT)))
    assert not found - set(MAY_HOLD_OBJECTS), "a record takes the place of an object here"
    assert not set(MAY_HOLD_OBJECTS) - found, "no exception is needed any more"
