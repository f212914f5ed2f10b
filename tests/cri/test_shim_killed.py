"""Tests shims that are killed in the middle of a start: the objects that their forks have made are
removed, and the caller may try again.

strace stops the fork at a system call until the shim is killed, so the moment is always the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.pod.client import ShimClient
from cri_server.pod.keeper import StoredPods
from pyrunc.zygote.descendants import below
from tests.cri.server_harness import Server, code_of, server_fixture
from tests.cri.test_recovery import nothing_left, shim_pid
from tests.cri.test_shared_shims import shims
from tests.cri.test_takeover import wait_for_it
from tests.support.processes import wait_until

STOPPED_US = 20_000_000


module_server = server_fixture("module", network=False)


# for one test that leaves other processes than before
own_server = server_fixture("function", network=False)


@contextlib.contextmanager
def stopped_at(pids: set[int], call: str, when: str) -> Iterator[None]:
    """Stop the processes and their forks at their first system call `call`, before (`enter`) or
    after it (`exit`). They stay stopped until the end of the block, even if they are killed."""
    attached = [word for pid in pids for word in ("-p", str(pid))]
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}"]
    inject = ["-e", f"inject={call}:delay_{when}={STOPPED_US}:when=1"]
    with subprocess.Popen([*command, *inject, *attached], stderr=subprocess.DEVNULL) as tracer:
        try:
            assert wait_until(lambda: all(traced(pid) for pid in pids), 30), "strace did not attach"
            yield
        finally:
            tracer.kill()  # the end of strace releases all at once


def traced(pid: int) -> bool:
    try:
        return "\nTracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:  # a waiting worker may end: the shim, which is traced, makes another
        return True


def groups(server: Server, identifier: str) -> list[Path]:
    """Return the paths of the cgroups of a container or a pod."""
    return [
        path for root in server._cgroups() for path in root.rglob("*") if identifier in path.name
    ]


def populated(group: Path) -> bool:
    return "populated 1" in (group / "cgroup.events").read_text()


def exist(folders: list[Path]) -> bool:
    return bool(folders)


def entered(folders: list[Path]) -> bool:
    return any(populated(group) for group in folders)


@pytest.mark.parametrize(
    ("call", "when", "reached"),
    [
        ("clone3", "exit", entered),
        ("pivot_root", "enter", entered),
    ],
)
def test_a_shim_killed_during_a_containers_start_leaves_nothing(
    server: Server, call: str, when: str, reached: Callable[[list[Path]], bool]
) -> None:
    pod = server.run_pod(host_network=True)
    container = server.create(pod)
    shim = shim_pid(server, pod)
    assert wait_until(lambda: below(shim), 30)
    with ThreadPoolExecutor(1) as pool:
        with stopped_at({shim, *below(shim)}, call, when):
            starting = pool.submit(code_of, lambda: server.start_container(container))
            assert wait_until(lambda: reached(groups(server, container)), 30, 0.001), server.tail()
            os.kill(shim, signal.SIGKILL)
        assert starting.result(30) == grpc.StatusCode.UNAVAILABLE
    assert groups(server, container) == [], "when the call returns nothing is left"
    assert server.status(container).state == api.CONTAINER_EXITED
    server.remove_all()
    nothing_left(server)


def test_a_shim_killed_while_making_a_cgroup_leaves_nothing(server: Server) -> None:
    """CreateContainer fails with UNAVAILABLE and leaves no cgroup; a repeated call uses another
    shim."""
    pod = server.run_pod(host_network=True)
    server.remove_container(server.create(pod))
    shim = shim_pid(server, pod)
    folders = server.state / "containers"
    with ThreadPoolExecutor(1) as pool:
        with stopped_at({shim}, "mkdir", "exit"):  # one call: the parent group exists
            creating = pool.submit(code_of, lambda: server.create(pod))
            assert wait_until(
                lambda: any(exist(groups(server, name)) for name in os.listdir(folders)), 30, 0.001
            ), server.tail()
            (container,) = os.listdir(folders)
            os.kill(shim, signal.SIGKILL)
        assert creating.result(30) == grpc.StatusCode.UNAVAILABLE
    assert groups(server, container) == [], "when the call returns nothing is left"
    assert wait_until(lambda: shim_pid(server, pod) != shim, 30)
    wait_for_it(server, pod)
    server.launch(pod)
    server.remove_all()
    nothing_left(server)


def test_a_created_container_starts_after_its_server_was_killed(own_server: Server) -> None:
    server = own_server
    pod = server.run_pod(host_network=True)
    container = server.create(pod)
    assert groups(server, container)
    server.kill()
    server.start()
    assert server.status(container).state == api.CONTAINER_CREATED
    # The compiled launch was lost with the server. The next server compiles it again.
    server.start_container(container)
    assert server.status(container).state == api.CONTAINER_RUNNING
    server.remove_all()
    nothing_left(server)


def test_an_unfinished_start_ends_when_shim_and_server_are_killed(own_server: Server) -> None:
    """The processes of the unfinished start end. Afterwards the container can be started, or has
    exited."""
    server = own_server
    pod = server.run_pod(host_network=True)
    container = server.create(pod)
    shim = shim_pid(server, pod)
    assert wait_until(lambda: below(shim), 30)
    with ThreadPoolExecutor(1) as pool:
        with stopped_at({shim, *below(shim)}, "clone3", "exit"):
            starting = pool.submit(code_of, lambda: server.start_container(container))
            assert wait_until(lambda: entered(groups(server, container)), 30, 0.001)
            server.kill()
            os.kill(shim, signal.SIGKILL)
        starting.result(30)
    server.start()
    assert wait_until(lambda: not entered(groups(server, container)), 30)
    if server.status(container).state == api.CONTAINER_CREATED:
        server.start_container(container)
        assert server.output(container, "echo", "here") == "here\n"
    server.remove_all()
    nothing_left(server)


@pytest.mark.parametrize(
    ("call", "when", "reached"), [("mkdir", "exit", exist), ("clone3", "exit", entered)]
)
def test_a_shim_killed_during_a_pods_start_leaves_nothing(
    server: Server, call: str, when: str, reached: Callable[[list[Path]], bool]
) -> None:
    config = server.pod_config("victim")
    folders = server.state / "sandboxes"
    with ThreadPoolExecutor(1) as pool:
        with stopped_at(server.processes(), call, when):
            starting = pool.submit(code_of, lambda: server.run_pod(config, host_network=True))
            assert wait_until(
                lambda: any(
                    reached(groups(server, name)) and (folders / name / "shim.json").exists()
                    for name in os.listdir(folders)
                ),
                30,
                0.001,
            )
            (pod,) = os.listdir(folders)
            os.kill(shim_pid(server, pod), signal.SIGKILL)
        assert starting.result(30) == grpc.StatusCode.UNAVAILABLE, server.tail()
    nothing_left(server)


def test_calls_that_need_a_dead_shim_or_zygote_are_unavailable(own_server: Server) -> None:
    """Such calls fail with UNAVAILABLE: the caller may try again (grpc/doc/statuscodes.md)."""
    server = own_server
    pod = server.run_pod(host_network=True)
    container = server.launch(pod)
    shim = shim_pid(server, pod)
    with ThreadPoolExecutor(1) as pool:
        executing = pool.submit(
            code_of, lambda: server.exec(container, "sh", "-c", "sleep 1004 & wait")
        )
        assert wait_until(lambda: "1004" in words_below(shim), 30)
        os.kill(shim, signal.SIGKILL)
        assert executing.result(30) == grpc.StatusCode.UNAVAILABLE
    server.remove_all()
    zygotes = server.zygotes()
    assert len(zygotes) == 1
    for zygote in zygotes:
        os.kill(zygote, signal.SIGSTOP)
    pod = server.run_pod(host_network=True)  # needs neither shim nor zygote
    server.launch(pod)
    server.remove_all()
    before = shims(server)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not shims(server) & before, 30)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(code_of, lambda: server.run_pod(host_network=True))
        time.sleep(0.5)
        assert not running.done(), "there is no shim, and no zygote that forks one"
        for zygote in zygotes:
            os.kill(zygote, signal.SIGKILL)
        assert running.result(30) == grpc.StatusCode.UNAVAILABLE
    server.run_pod(host_network=True)
    server.remove_all()
    nothing_left(server)


def test_a_container_that_runs_unknown_to_the_server_ends_with_its_pod(server: Server) -> None:
    """If the server is killed before the shim has answered StartContainer, the next server believes
    that the container does not run. Stopping the pod ends its processes."""
    pod = server.run_pod(host_network=True)
    container = server.create(pod)
    asyncio.run(start_unknown(server, pod, container))
    assert code_of(lambda: server.start_container(container)) == grpc.StatusCode.ALREADY_EXISTS
    assert server.status(container).state == api.CONTAINER_EXITED
    assert entered(groups(server, container))
    server.stop_pod(pod)
    assert not entered(groups(server, container))
    server.remove_all()
    nothing_left(server)


async def start_unknown(server: Server, pod: str, container: str) -> None:
    client = await ShimClient.connect(server.state / "sandboxes" / pod)
    await client.start_container(container)
    client.close()


def words_below(pid: int) -> str:
    files = [Path(f"/proc/{child}/cmdline") for child in below(pid)]
    return "".join(file.read_bytes().decode() for file in files if file.exists())


def test_a_container_whose_start_was_not_answered_runs_on(server: Server) -> None:
    """StartContainer succeeds although the shim is killed between storing the container in the
    keeper and answering."""
    pod = server.run_pod(host_network=True)
    container = server.create(pod)
    shim = shim_pid(server, pod)
    stored = StoredPods(server.state)
    with ThreadPoolExecutor(1) as pool:
        with stopped_at({shim}, "sendto", "enter"):
            starting = pool.submit(server.start_container, container)
            assert wait_until(lambda: container in stored._ids(1), 30, 0.001), server.tail()
            os.kill(shim, signal.SIGKILL)
        starting.result(30)
    assert entered(groups(server, container))
    assert server.status(container).state == api.CONTAINER_RUNNING
    assert server.exec(container, "echo", "x").stdout == b"x\n"
    server.remove_all()
    nothing_left(server)
