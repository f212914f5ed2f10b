"""ExecSync: output, exit codes, timeouts and descendants."""

from __future__ import annotations

import time

import grpc

from tests.cri.server_harness import Server, code_of
from tests.support.processes import wait_until


def test_exec_sync(server: Server) -> None:
    container = server.launch(server.run_pod())
    answer = server.exec(container, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (answer.stdout, answer.stderr, answer.exit_code) == (b"out\n", b"err\n", 3)
    assert server.exec(container, "sh", "-c", "kill -TERM $$").exit_code == 143
    started = time.monotonic()
    assert code_of(lambda: server.exec(container, "sh", "-c", "sleep 77 & sleep 78", timeout_s=1)) == (
        grpc.StatusCode.DEADLINE_EXCEEDED
    )
    assert 0.9 < time.monotonic() - started < 30
    assert wait_until(lambda: "sleep 7" not in server.output(container, "ps"), 60)
    answer = server.exec(container, "sh", "-c", "sleep 300 & echo done")
    assert answer.stdout == b"done\n" and answer.exit_code == 0
    big = server.exec(container, "sh", "-c", "dd if=/dev/zero bs=1M count=40 2>/dev/null; echo end >&2")
    assert big.exit_code == 0 and 8 << 20 < len(big.stdout) + len(big.stderr) < 16 << 20


def test_exec_of_a_missing_program_says_so(server: Server) -> None:
    container = server.launch(server.run_pod())
    try:
        answer = server.exec(container, "/no/such")
    except grpc.RpcError as error:
        assert "/no/such" in error.details()  # type: ignore[attr-defined]
    else:
        assert answer.exit_code in (126, 127)


def test_exec_needs_a_running_container(server: Server) -> None:
    container = server.create(server.run_pod())
    assert code_of(lambda: server.exec(container, "true")) == grpc.StatusCode.FAILED_PRECONDITION
    assert code_of(lambda: server.exec("f" * 64, "true")) == grpc.StatusCode.NOT_FOUND
