"""A compiler between two requests."""

from __future__ import annotations

import os
import threading
from socket import AF_UNIX, SOCK_SEQPACKET, socket, socketpair

import pytest

from pyrunc import ipc
from pyrunc.cgroups import scope
from pyrunc.compiler.service import next_request, serve
from pyrunc.kernel import bpf
from tests.system.harness import eventually


def _send_after_its_end(placeholder: scope.Placeholder, write_end: int, peer: socket) -> None:
    with peer:
        os.close(write_end)
        eventually(lambda: not os.path.exists(f"/proc/{placeholder.pid}"))
        ipc.send(peer, {"id": 1})


def test_a_scopes_placeholder_is_reaped_without_another_request() -> None:
    """A zombie counts for pids.current of its cgroup, here a container's."""
    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    placeholder = scope.Placeholder()
    write_end = placeholder.release()
    sender = threading.Thread(target=_send_after_its_end, args=(placeholder, write_end, theirs))
    sender.start()
    with ours:
        assert next_request(ours) == ({"id": 1}, [])
        sender.join()
        assert next_request(ours) is None
    assert not scope.released


def test_a_compiler_outlives_its_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not needed any more: with its end the zygote would kill them, and systemd remove scopes whose containers were not
    started yet."""
    monkeypatch.setattr(
        bpf, "_kept", None
    )  # what a compiler does for its whole life is undone in this process
    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    placeholder = scope.Placeholder()
    write_end = placeholder.release()
    compiler = threading.Thread(target=serve, args=({}, [ours.detach()]))
    compiler.start()
    theirs.close()
    compiler.join(0.3)
    waited = compiler.is_alive()
    os.close(write_end)
    compiler.join()
    assert waited and not scope.released
