"""Tests killed shims: another shim takes over the pod, with the descriptors that the keeper has
stored (`pyrunc.shim.messages.StoredContainer`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.pod.client import start_shim
from cri_server.pod.shims import ANSWER_S
from cri_server.zygote.client import Zygote
from pyrunc.keeper.client import Keeper
from pyrunc.kernel.process import alive_since
from pyrunc.zygote.descendants import below
from tests.cri.server_harness import Server, code_of, server_fixture
from tests.cri.test_recovery import nothing_left, pid_of, shim_pid
from tests.support.keeper import keeper_pid
from tests.support.processes import comm, wait_until

KILLS = 12


def at_the_end(script: str) -> list[str]:
    """Return the command of a process that prints "ready" and runs `script` on SIGTERM."""
    return ["sh", "-c", f"trap '{script}' TERM; echo ready; sleep 1000 & wait"]


COUNTS = ["sh", "-c", "i=0; while true; do echo $i; i=$((i+1)); usleep 1000; done"]


own_server = server_fixture("function")


def lose_shim(server: Server, pod: str) -> int:
    """Kill the pod's shim; return the pid of the shim that takes over."""
    lost = shim_pid(server, pod)
    os.kill(lost, signal.SIGKILL)
    assert wait_until(lambda: shim_pid(server, pod) != lost, 30), server.tail()
    wait_for_it(server, pod)
    return shim_pid(server, pod)


def verbose_info(server: Server, pod: str) -> dict[str, Any]:
    request = api.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=True)
    info: dict[str, Any] = json.loads(
        server.runtime.PodSandboxStatus(request, timeout=10).info["info"]
    )
    return info


def wait_for_it(server: Server, pod: str) -> None:
    line = f"sandbox {pod}: another shim has taken over"
    assert wait_until(lambda: line in server.tail(1000), 30), server.tail()


def test_containers_run_on_and_report_their_exit_code(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("exit 7")))
    server.wait_logged(container, "ready")
    process = pid_of(server, container)
    lose_shim(server, pod)
    assert server.status(container).state == api.CONTAINER_RUNNING
    assert pid_of(server, container) == process
    assert server.pod_status(pod).state == api.SANDBOX_READY
    assert server.output(container, "echo", "here") == "here\n"
    server.stop_container(container, 30)
    status = server.status(container)
    assert (status.exit_code, status.reason) == (7, "Error")
    server.remove_all()
    nothing_left(server)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda pid: os.kill(pid, signal.SIGKILL), 137),
        (lambda pid: os.kill(pid, signal.SIGTERM), 143),
    ],
)
def test_a_signal_is_reported_as_exit_code_after_a_takeover(
    server: Server, end: Callable[[int], None], code: int
) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("exit 143")))
    server.wait_logged(container, "ready")
    lose_shim(server, pod)
    end(pid_of(server, container))
    assert server.wait_exit(container).exit_code == code
    server.remove_all()


def test_output_without_a_shim_is_logged_later(server: Server) -> None:
    pod = server.run_pod()
    counts = "while [ $i -lt 500 ]; do i=$((i+1)); echo $i; done"
    script = (
        f"i=0; trap '{counts}; echo end; touch /done' USR1; echo ready; while true; do sleep 1000 &"
        " wait; done"
    )
    container = server.launch(pod, server.container_config(["sh", "-c", script]))
    server.wait_logged(container, "ready")
    process, log = pid_of(server, container), Path(server.status(container).log_path)
    with without_shim(server, pod):
        os.kill(process, signal.SIGUSR1)
        assert wait_until(Path(f"/proc/{process}/root/done").exists, 30)
        assert len(log.read_text().splitlines()) == 1
    server.wait_logged(container, "end")
    assert server.log_lines(container) == ["ready", *map(str, range(1, 501)), "end"]
    server.remove_all()


@contextlib.contextmanager
def without_shim(server: Server, pod: str) -> Iterator[None]:
    """Kill the pod's shim, and keep the server from noticing until the end of the block."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        os.kill(shim_pid(server, pod), signal.SIGKILL)
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_a_terminal_is_taken_over(server: Server) -> None:
    pod = server.run_pod()
    config = server.container_config(command=["cat"])
    config.tty = config.stdin = True
    container = server.launch(pod, config)
    lose_shim(server, pod)
    assert server.status(container).state == api.CONTAINER_RUNNING
    terminal = os.open(f"/proc/{pid_of(server, container)}/fd/0", os.O_RDWR | os.O_NOCTTY)
    os.write(terminal, b"written\n")
    os.close(terminal)
    assert wait_until(lambda: "written" in "".join(server.log_lines(container)), 30)
    server.stop_container(container)
    server.remove_all()


def test_the_network_namespace_is_taken_over_with_the_pod(server: Server) -> None:
    """After the takeover a new container joins the pod's network namespace and has its /dev/shm."""
    pod = server.run_pod()
    first = server.launch(pod)
    address = server.pod_status(pod).network.ip
    lose_shim(server, pod)
    config = server.container_config(log_path="second.log")
    config.metadata.name = "second"
    second = server.launch(pod, config)
    assert address in server.output(second, "ip", "addr")
    assert server.output(first, "ip", "addr") == server.output(second, "ip", "addr")
    info = verbose_info(server, pod)
    assert [i["sandbox"] for i in info["cniResult"]["interfaces"] if i["name"] == "eth0"] == [
        info["netns"]
    ]
    assert server.output(second, "df", "/dev/shm") == server.output(first, "df", "/dev/shm")
    server.stop_pod(pod)
    assert server.status(first).exit_code == 137
    server.remove_all()
    nothing_left(server)


def test_a_session_of_the_lost_shim_is_ended(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod)
    with ThreadPoolExecutor(1) as pool:
        executing = pool.submit(
            code_of, lambda: server.exec(container, "sh", "-c", "sleep 1005 & wait")
        )
        assert wait_until(lambda: "1005" in server.output(container, "ps"), 30)
        lose_shim(server, pod)
        assert executing.result(30) == grpc.StatusCode.UNAVAILABLE
    assert wait_until(lambda: "1005" not in server.output(container, "ps"), 30)
    assert server.status(container).state == api.CONTAINER_RUNNING
    server.remove_all()


def test_an_exit_without_a_shim_is_reported_later(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("echo last; exit 9")))
    server.wait_logged(container, "ready")
    process = pid_of(server, container)
    with without_shim(server, pod):
        os.kill(process, signal.SIGTERM)
        assert wait_until(lambda: alive_since(process) is None, 30)
    assert server.wait_exit(container).exit_code == 9
    assert server.log_lines(container) == ["ready", "last"]
    server.remove_all()


def test_a_created_container_is_started_by_the_next_shim(server: Server) -> None:
    pod = server.run_pod()
    container = server.create(pod)
    lose_shim(server, pod)
    server.start_container(container)
    assert server.status(container).state == api.CONTAINER_RUNNING
    server.remove_all()


def test_a_restarted_server_can_replace_a_lost_shim(own_server: Server) -> None:
    server = own_server
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(command=COUNTS))
    server.restart()
    lose_shim(server, pod)
    server.restart()  # the server finds the new shim by the new record
    assert server.status(container).state == api.CONTAINER_RUNNING
    server.stop_container(container)
    assert server.status(container).exit_code == 137
    server.remove_all()
    nothing_left(server)


def test_a_pod_is_taken_over_when_zygotes_are_killed_too(own_server: Server) -> None:
    server = own_server
    pod = server.run_pod()
    container = server.launch(pod)
    zygotes = server.zygotes()
    for pid in (*zygotes, shim_pid(server, pod)):
        os.kill(pid, signal.SIGKILL)
    wait_for_it(server, pod)
    assert server.output(container, "echo", "here") == "here\n"
    server.remove_all()
    nothing_left(server)


def test_stored_descriptors_are_closed_with_their_pod(server: Server) -> None:
    folder = Path(f"/proc/{keeper_pid(server.state)}/fd")
    before = len(list(folder.iterdir()))
    pod = server.run_pod()
    container = server.launch(pod)
    keeper = Keeper(server.state)
    before += len(keeper.names("image/"))
    assert keeper.names("pod/") == [f"pod/{pod}"]
    assert keeper.names("container/") == [f"container/{container}"]
    server.stop_container(container)
    assert keeper.names("container/") == [] and keeper.names("pod/") == [f"pod/{pod}"]
    server.remove_pod(pod)
    assert keeper.names("pod/") == []
    keeper.close()
    assert wait_until(lambda: len(list(folder.iterdir())) <= before, 30)


def test_all_shims_can_be_killed_at_once(server: Server) -> None:
    pods = [server.run_pod() for _ in range(4)]
    containers = [server.launch(pod) for pod in pods]
    lost = {shim_pid(server, pod) for pod in pods}
    for shim in lost:
        os.kill(shim, signal.SIGKILL)
    for pod in pods:
        wait_for_it(server, pod)
    assert {server.status(container).state for container in containers} == {api.CONTAINER_RUNNING}
    server.remove_all()
    nothing_left(server)


def test_shims_may_be_killed_while_pods_are_busy(server: Server) -> None:
    """Containers that write numbers lose at most one line for each kill; meanwhile other containers
    start and end."""
    chance = random.Random(7)
    pods = [server.run_pod() for _ in range(3)]
    counting = [server.launch(pod, server.container_config(COUNTS)) for pod in pods]
    done = threading.Event()

    def lives(pod: str) -> int:
        for number in itertools.count():
            if done.is_set():
                break
            # A call at the moment of a kill gets UNAVAILABLE.
            with contextlib.suppress(grpc.RpcError):
                life_of(server, pod, f"other{number}")
        return number

    with ThreadPoolExecutor(len(pods)) as pool:
        others = [pool.submit(lives, pod) for pod in pods]
        try:
            for _ in range(KILLS):
                shim = shim_pid(server, chance.choice(pods))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(shim, signal.SIGKILL)
                time.sleep(chance.random() * 0.4)
        finally:
            done.set()
        assert all(other.result(60) for other in others)
    for pod, container in zip(pods, counting, strict=True):
        assert wait_until(lambda c=container: executes(server, c), 30), server.tail()  # type: ignore[misc]
        assert server.status(container).state == api.CONTAINER_RUNNING
        assert server.pod_status(pod).state == api.SANDBOX_READY
        server.stop_container(container)
        numbers = [int(line) for line in server.log_lines(container)]
        assert numbers == sorted(set(numbers)), "each number is logged once, in order"
        assert numbers[-1] + 1 - len(numbers) <= KILLS, (
            "a killed shim may have read one line without writing it"
        )
    server.remove_all()
    nothing_left(server)


def life_of(server: Server, pod: str, name: str) -> None:
    """Create a container, start it, run an exec, stop and remove it; it is removed even if a call
    fails."""
    config = server.container_config(log_path=f"{name}.log")
    config.metadata.name = name
    container = server.create(pod, config)
    try:
        server.start_container(container)
        server.output(container, "true")
        server.stop_container(container)
    finally:
        server.remove_container(container)


def executes(server: Server, container: str) -> bool:
    try:
        return server.output(container, "echo", "here") == "here\n"
    except grpc.RpcError:
        return False


def shims_zygote(server: Server) -> int:
    """Return the pid of the zygote that has forked shims; 0 if there is none."""
    zygotes = server.zygotes()
    return next((zygote for zygote in zygotes if "pyrunc-shim" in map(comm, below(zygote))), 0)


def test_a_stop_without_a_shim_ends_nothing_else(own_server: Server) -> None:
    """If a container is stopped while its pod has no shim, only this container ends."""
    server = own_server
    pod = server.run_pod()
    stopped, other = (server.launch(pod, named(server, name)) for name in ("stopped", "other"))
    assert wait_until(lambda: shims_zygote(server), 30)
    zygote = shims_zygote(server)
    # The takeover then takes longer than a caller waits for a silent shim.
    os.kill(zygote, signal.SIGSTOP)
    try:
        os.kill(shim_pid(server, pod), signal.SIGKILL)
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(server.stop_container, stopped)
            time.sleep(2 * ANSWER_S)
            os.kill(zygote, signal.SIGCONT)
            stopping.result(60)
    finally:
        os.kill(zygote, signal.SIGCONT)
    assert server.status(stopped).exit_code == 137
    assert server.status(other).state == api.CONTAINER_RUNNING
    assert server.output(other, "echo", "here") == "here\n"
    server.remove_all()
    nothing_left(server)


def named(server: Server, name: str) -> api.ContainerConfig:
    config = server.container_config(log_path=f"{name}.log")
    config.metadata.name = name
    return config


def test_a_full_disk_ends_no_pod() -> None:
    """A server with a full disk cannot record which shim took over a pod; the next server learns it
    from the shim."""
    with Server(disk_bytes=16 << 20) as server:
        server.load_image()
        pod = server.run_pod()
        container = server.launch(pod)
        filler = server.root / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"\0" * 4096)
        shim = lose_shim(server, pod)
        assert server.output(container, "echo", "here") == "here\n"
        assert "cannot write to disk which shim serves it now" in server.tail()
        filler.unlink()
        for _ in range(2):
            server.restart()
            info = verbose_info(server, pod)
            assert info["shimPid"] == shim and info["netns"] == f"{server.names}/{pod}"
        assert server.status(container).state == api.CONTAINER_RUNNING
        server.remove_all()
        nothing_left(server)


def test_a_log_that_cannot_be_opened_ends_no_container(server: Server) -> None:
    """If the shim that takes over cannot open the log, output waits until the log can be opened."""
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("")))
    server.wait_logged(container, "ready")
    folder = Path(server.status(container).log_path).parent
    moved = folder.rename(folder.with_name("moved"))
    # The shim does not follow this link.
    folder.symlink_to(moved)
    lose_shim(server, pod)
    server.output(container, "sh", "-c", "echo later >/proc/1/fd/1")
    folder.unlink()
    moved.rename(folder)
    server.wait_logged(container, "later")
    assert server.log_lines(container) == ["ready", "later"]
    assert server.status(container).state == api.CONTAINER_RUNNING
    server.remove_all()
    nothing_left(server)


def test_a_failed_takeover_ends_no_other_shim() -> None:
    """If a pod cannot be taken over, all attempts use the same new shim. Then the pod ends, and
    that shim still serves another pod."""
    with Server(settings={"shims": {"count": 1}}) as server:
        server.load_image()
        pod, other_pod = server.run_pod(), server.run_pod()
        container, other = server.launch(pod), server.launch(other_pod)
        sibling = server.launch(pod, named(server, "sibling"))
        keeper = Keeper(server.state)
        # This entry is malformed.
        keeper.put(f"container/{container}", b"{}")
        os.kill(shim_pid(server, pod), signal.SIGKILL)
        failed = f"sandbox {pod}: another shim failed to take over"
        assert wait_until(lambda: server.tail(1000).count(failed) == 2, 30), server.tail()
        next_shim = shim_pid(server, other_pod)
        assert wait_until(lambda: server.status(container).state == api.CONTAINER_EXITED, 30)
        assert server.tail(1000).count(failed) == 4
        assert wait_until(lambda: server.status(sibling).state == api.CONTAINER_EXITED, 30)
        assert server.pod_status(pod).state == api.SANDBOX_NOTREADY
        assert server.output(other, "echo", "here") == "here\n"
        assert shim_pid(server, other_pod) == next_shim
        assert len(re.findall(r": shim \d+ has ended", server.tail(1000))) == 1
        keeper.close()
        server.remove_all()
        nothing_left(server)


def test_a_takeover_continues_after_its_server_was_killed(own_server: Server) -> None:
    """If the server is killed when the next shim has just taken a pod, the next server lets this
    shim take over the pod's containers."""
    server = own_server
    pod = server.run_pod()
    container, created = server.launch(pod), server.create(pod, named(server, "created"))
    lost = shim_pid(server, pod)
    server.kill()
    os.kill(lost, signal.SIGKILL)
    assert wait_until(lambda: alive_since(lost) is None, 30)
    asyncio.run(begin_shim(server, pod))
    server.start()
    assert server.status(container).state == api.CONTAINER_RUNNING
    assert server.output(container, "echo", "here") == "here\n"
    assert server.status(created).state == api.CONTAINER_CREATED
    assert server.pod_status(pod).state == api.SANDBOX_READY
    server.start_container(created)
    server.remove_all()
    nothing_left(server)


async def begin_shim(server: Server, pod: str) -> None:
    zygote = Zygote(["pyrunc.shim.main"], keeper=str(server.state))
    folder = server.state / "shims" / "next"
    folder.mkdir()
    try:
        zygote.begin()
        await zygote.ready()
        _, client = await start_shim(zygote, folder)
        await client.take_pod(server.state / "sandboxes" / pod, server.state / "containers")
        client.close()
    finally:
        await zygote.close()
