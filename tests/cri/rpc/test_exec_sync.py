"""ExecSync: output, exit codes, timeouts and descendants of the command; namespaces, user and
rights."""

from __future__ import annotations

import time

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of
from tests.support.processes import wait_until


@pytest.mark.requirement("1.a.6", "1.a.7", "4.9.2", "4.9.3")
def test_exec_sync_returns_output_and_exit_code(server: Server) -> None:
    container = server.launch(server.run_pod())
    answer = server.exec(container, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (answer.stdout, answer.stderr, answer.exit_code) == (b"out\n", b"err\n", 3)
    assert server.exec(container, "sh", "-c", "kill -TERM $$").exit_code == 143
    started = time.monotonic()
    assert code_of(
        lambda: server.exec(container, "sh", "-c", "sleep 77 & sleep 78", timeout_s=1)
    ) == (grpc.StatusCode.DEADLINE_EXCEEDED)
    assert 0.9 < time.monotonic() - started < 30
    assert wait_until(lambda: "sleep 7" not in server.output(container, "ps"), 60)
    answer = server.exec(container, "sh", "-c", "sleep 300 & echo done")
    assert answer.stdout == b"done\n" and answer.exit_code == 0
    big = server.exec(
        container, "sh", "-c", "dd if=/dev/zero bs=1M count=40 2>/dev/null; echo end >&2"
    )
    assert big.exit_code == 0 and 8 << 20 < len(big.stdout) + len(big.stderr) < 16 << 20


@pytest.mark.requirement("4.9.4")
def test_exec_of_a_missing_program_says_so(server: Server) -> None:
    container = server.launch(server.run_pod())
    try:
        answer = server.exec(container, "/no/such")
    except grpc.RpcError as error:
        assert "/no/such" in error.details()  # type: ignore[attr-defined]
    else:
        assert answer.exit_code in (126, 127)


@pytest.mark.requirement("1.a.13", "4.9.5", "13.14")
def test_exec_needs_a_running_container(server: Server) -> None:
    container = server.create(server.run_pod())
    assert code_of(lambda: server.exec(container, "true")) == grpc.StatusCode.FAILED_PRECONDITION
    assert code_of(lambda: server.exec("f" * 64, "true")) == grpc.StatusCode.NOT_FOUND


@pytest.mark.requirement("4.9.1")
def test_an_exec_has_the_containers_namespaces_user_and_rights(server: Server) -> None:
    config = server.container_config(
        envs=[api.KeyValue(key="MINE", value=b"1")], working_dir="/made"
    )
    security = config.linux.security_context
    security.run_as_username, security.supplemental_groups[:] = "www", [1234]
    security.capabilities.drop_capabilities.append("ALL")
    security.no_new_privs = True
    security.seccomp.profile_type = api.SecurityProfile.RuntimeDefault
    container = server.launch(server.run_pod(), config)
    script = """
        for kind in net ipc uts pid mnt cgroup; do readlink /proc/$1/ns/$kind; done
        cat /proc/$1/cgroup; readlink /proc/$1/cwd
        grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp:)' /proc/$1/status
        grep -c MINE=1 /proc/$1/environ
    """
    ours, its = (server.output(container, "sh", "-c", script, "sh", pid) for pid in ("self", "1"))
    assert ours == its and its.splitlines()[-1] == "1" and "/made" in its.split()
