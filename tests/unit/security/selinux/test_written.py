"""Tests the labels that reach the kernel: system calls of compiled programs and mount options are
recorded instead of executed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from pyrunc.compile import host, pause, sources
from pyrunc.compile.requests import Overlay
from pyrunc.kernel import detached
from pyrunc.kernel import mount as kernel_mount
from pyrunc.plan import build as plans
from pyrunc.plan.lower import lower
from pyrunc.plan.model import RootfsFacts
from pyrunc.program.assemble import Assembler
from pyrunc.spec.default import default
from pyrunc.spec.model import Linux, Namespace
from pyrunc.spec.parse import parse
from tests.unit.plan.test_plan import HOST

PROCESS = "system_u:system_r:container_t:s0:c1,c2"
MOUNT = "system_u:object_r:container_file_t:s0:c1,c2"


class Calls:
    """Records system calls. `written` returns a dict: file below attr/ -> bytes written to it."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def written(self) -> dict[str, bytes]:
        written, name = {}, ""
        for call, *arguments in self.made:
            if call == "openat2":
                name = arguments[1]
            elif call == "write" and "attr/" in str(name):
                assert arguments[2] == len(arguments[1])
                written[name] = arguments[1]
        return written


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Record every system call of the assembled programs. An argument that is a constant's address
    is recorded as the content of the constant."""
    recorded, contents = Calls(), {}
    sys, constant = Assembler.sys, Assembler.constant

    def noting_constant(self: Assembler, content: bytes, *rest: Any) -> Any:
        address = constant(self, content, *rest)
        contents[id(address)] = (address, content)
        return address

    def noting_sys(self: Assembler, name: str, *arguments: Any, **rest: Any) -> Any:
        recorded.made.append((name, *(contents.get(id(a), (a, a))[1] for a in arguments)))
        return sys(self, name, *arguments, **rest)

    monkeypatch.setattr(Assembler, "constant", noting_constant)
    monkeypatch.setattr(Assembler, "sys", noting_sys)
    yield recorded


EXPECTED = {
    "thread-self/attr/exec": PROCESS.encode(),
    "thread-self/attr/keycreate": PROCESS.encode(),
}


def test_the_label_of_a_containers_process_is_written(calls: Calls) -> None:
    document = default()
    document["process"]["selinuxLabel"], document["linux"]["mountLabel"] = PROCESS, MOUNT
    lower(
        plans.build(
            parse(document),
            HOST.replace(selinux=True),
            RootfsFacts(),
            plans.StartPlanOptions(keyring="_ses.x"),
        )
    )
    assert calls.written() == EXPECTED
    order = [
        c[0] if c[0] != "write" else "write"
        for c in calls.made
        if c[0] in ("write", "clone3", "keyctl")
    ]
    assert order.index("write") < order.index("clone3") < order.index("keyctl")
    (label,) = (c for c in calls.made if c[0] == "fsetxattr")
    assert label[2:] == ("security.selinux", MOUNT.encode(), len(MOUNT), 0)
    contexts = [c for c in calls.made if c[0] == "fsconfig" and "context" in c]
    assert contexts and all(MOUNT in c for c in contexts)


def test_the_label_of_an_exec_is_written(calls: Calls) -> None:
    document = default()
    document["process"]["selinuxLabel"] = PROCESS
    spec = parse(document)
    assert spec.process is not None
    lower(
        plans.build_exec(
            spec.linux, spec.process.replace(terminal=False), HOST.replace(selinux=True)
        )
    )
    assert calls.written() == EXPECTED


def test_the_label_of_the_pause_process_is_written(calls: Calls) -> None:
    linux = Linux(namespaces=(Namespace("mount"), Namespace("pid")))
    lower(
        plans.build_pause(
            linux, HOST.replace(selinux=True), plans.PausePlanOptions(selinux_label=PROCESS)
        )
    )
    assert calls.written() == EXPECTED


def test_the_memfd_of_the_pause_process_is_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr(pause, "_pause", None)
    descriptor = pause._open_pause("system_u:object_r:container_file_t:s0")
    try:
        # The kernel stores the label of a memfd without SELinux, too.
        label = os.getxattr(f"/proc/self/fd/{descriptor}", "security.selinux")
        assert label == b"system_u:object_r:container_file_t:s0"
    finally:
        os.close(descriptor)
        assert pause._pause is not None
        os.close(pause._pause)


@pytest.mark.parametrize("on", [True, False])
def test_the_overlay_gets_its_label(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    arguments: list[Any] = []
    monkeypatch.setattr(host, "constant_facts", lambda: HOST.replace(selinux=on))
    monkeypatch.setattr(
        kernel_mount, "open_overlay", lambda *a, **k: arguments.append(k["options"]) or 7
    )
    with sources_descriptors() as descriptors:
        sources.open_overlay(
            Overlay(("/l",), "/u", "/w", volatile=True), Linux(mount_label=MOUNT), descriptors
        )
    assert arguments == [(("volatile", None), *([("context", MOUNT)] if on else []))]


@contextlib.contextmanager
def sources_descriptors() -> Iterator[Any]:
    from pyrunc.compile.descriptors import NamedDescriptors

    with NamedDescriptors() as descriptors:
        yield descriptors


def test_the_overlay_by_mount_has_its_label_in_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the quotes, mount(2) would split its options at the commas of the label."""
    mount_calls: list[Any] = []
    monkeypatch.setattr(detached, "_in_mount_namespace", contextlib.nullcontext)
    monkeypatch.setattr(detached.os, "chdir", lambda path: None)
    monkeypatch.setattr(kernel_mount, "mount", lambda *arguments: mount_calls.append(arguments))
    monkeypatch.setattr(kernel_mount, "open_tree", lambda *arguments: 7)
    detached.open_overlay(["/i/l"], "/u", "/w", (("volatile", None), ("context", MOUNT)))
    assert mount_calls[0][4] == f'lowerdir=l,upperdir=/u,workdir=/w,volatile,context="{MOUNT}"'
