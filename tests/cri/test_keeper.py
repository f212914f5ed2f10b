"""Tests the keeper (pause/keeper.c): pods continue when any or all other processes are killed, or
the keeper alone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.pod.processes import default_count
from pyrunc.errors import Unavailable
from pyrunc.keeper.client import Keeper
from pyrunc.kernel.process import alive_since, stat
from pyrunc.zygote.descendants import below
from tests.cri.server_harness import Server, server_fixture
from tests.cri.streaming_session import collect, open_session
from tests.cri.test_recovery import nothing_left, pid_of, shim_pid
from tests.cri.test_takeover import at_the_end, life_of, lose_shim
from tests.support.keeper import end_keeper, keeper_pid
from tests.support.processes import comm, wait_until

KILLS = 10
SHIMS = default_count()
MODULE = "tests.cri.without_exit_info"


server = server_fixture("function", module=MODULE)


def parent_of(pid: int) -> int:
    process_stat = stat(pid)
    assert process_stat is not None
    return process_stat.parent


def shims_below(server: Server) -> set[int]:
    """Return the pids of the shims that descend from the keeper."""
    return {pid for pid in below(keeper_pid(server.state)) if is_called(pid, "pyrunc-shim")}


def is_called(pid: int, name: str) -> bool:
    try:
        return comm(pid) == name
    except OSError:  # the process has ended meanwhile
        return False


def zygote_of_shims(server: Server) -> int:
    (zygote,) = [pid for pid in server.zygotes() if parent_of(pid) == keeper_pid(server.state)]
    return zygote


def test_only_shims_are_protected_like_the_keeper_from_the_oom_killer(server: Server) -> None:
    """The zygote, a child of the keeper, is not protected: one of its jobs may process a hostile
    image."""

    def score_of(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    server.run_pod()  # starts a network worker
    workers = [pid for pid in server.processes() if is_called(pid, "pyrunc-cni")]
    assert workers
    expected = score_of(server.pid)
    assert {score_of(pid) for pid in (*server.zygotes(), *workers)} == {expected}
    assert {score_of(pid) for pid in shims_below(server)} == {score_of(keeper_pid(server.state))}
    server.remove_all()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGKILL, 137)])
def test_the_exit_code_of_a_killed_shims_container_is_reported(
    server: Server, number: int, code: int
) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("exit 42")))
    server.wait_logged(container, "ready")
    assert parent_of(pid_of(server, container)) == shim_pid(server, pod)
    lose_shim(server, pod)
    assert parent_of(pid_of(server, container)) == keeper_pid(server.state)
    os.kill(pid_of(server, container), number)
    status = server.wait_exit(container)
    assert (status.state, status.exit_code) == (api.CONTAINER_EXITED, code)
    server.remove_all()
    nothing_left(server)


def test_a_killed_keeper_loses_at_most_exit_codes_of_its_own_time(server: Server) -> None:
    """If a shim is killed after the keeper, containers of this shim may lose their exit codes;
    containers of later shims do not."""
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("exit 42")))
    server.wait_logged(container, "ready")
    zygote = zygote_of_shims(server)
    end_keeper(server.state, signal.SIGKILL)
    assert wait_until(lambda: alive_since(zygote) is None and keeper_pid(server.state), 30), (
        server.tail()
    )
    assert parent_of(zygote_of_shims(server)) == keeper_pid(server.state)
    assert wait_until(
        lambda: "has taken its place" in server.tail() and len(shims_below(server)) == SHIMS, 30
    )
    assert shim_pid(server, pod) not in shims_below(server), "the earlier shim keeps its pods"
    # Until the shim has filled the new keeper, the pod's descriptors exist in the shim alone.
    assert wait_until(lambda: f"container/{container}" in stored(server), 30), server.tail()
    lose_shim(server, pod)
    assert server.output(container, "echo", "on") == "on\n"
    server.stop_container(container, 30)
    # 255: init reaps the process, and the kernel does not report the code.
    # 42 if the shim sees the zombie before init reaps it.
    assert server.status(container).exit_code in (255, 42)
    next_pod = server.run_pod()
    other = server.launch(next_pod, server.container_config(at_the_end("exit 43")))
    server.wait_logged(other, "ready")
    assert shim_pid(server, next_pod) in below(keeper_pid(server.state))
    lose_shim(server, next_pod)
    server.stop_container(other, 30)
    assert server.status(other).exit_code == 43
    server.remove_all()
    nothing_left(server)


def test_a_keeper_survives_the_server_and_its_zygote_does_not(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(at_the_end("exit 42")))
    server.wait_logged(container, "ready")
    keeper, zygote = keeper_pid(server.state), zygote_of_shims(server)
    server.kill()
    assert wait_until(lambda: alive_since(zygote) is None, 30)
    server.start()
    assert keeper_pid(server.state) == keeper
    lose_shim(server, pod)
    os.kill(pid_of(server, container), signal.SIGTERM)
    assert server.wait_exit(container).exit_code == 42
    server.remove_all()
    nothing_left(server)
    server.stop()
    assert wait_until(lambda: not keeper_pid(server.state), 30), "the store is empty"


COUNTS = [
    "sh",
    "-c",
    "trap 'exit 42' TERM; i=0; while true; do echo $i; i=$((i+1)); usleep 2000; done",
]


def shims(server: Server) -> set[int]:
    """Return the pids of the shims of all listed pods."""
    return {shim_pid(server, pod.id) for pod in server.pods()}


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stored(server: Server) -> set[str]:
    """Return the names of the keeper's entries for pods, without those for image mounts."""
    keeper = Keeper(server.state)
    try:
        return {name for name in keeper.names() if not name.startswith("image/")}
    except Unavailable:
        return set()
    finally:
        keeper.close()


def answers(server: Server, container: str) -> bool:
    try:
        return server.output(container, "echo", "here") == "here\n"
    except grpc.RpcError:
        return False


def counted_on(server: Server, container: str, kills: int) -> None:
    """Stop a container that counts. Assert that its exit code is 42, and that its log has each
    number once and in order, except at most one number per killed shim."""
    server.stop_container(container, 30)
    assert server.status(container).exit_code == 42
    numbers = [int(line) for line in server.log_lines(container)]
    assert numbers == sorted(set(numbers)) and numbers[-1] + 1 - len(numbers) <= kills


def launch_counting(server: Server) -> tuple[str, str]:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(COUNTS))
    server.wait_logged(container, "20")
    return pod, container


def test_pods_survive_when_all_killed_but_the_keeper(server: Server) -> None:
    """Pods continue, and the exit code and output of a container that ends meanwhile are known."""
    pods = dict(launch_counting(server) for _ in range(3))
    pod, *_ = pods
    ending = server.launch(
        pod,
        server.container_config(
            at_the_end("echo last; exit 9"), log_path="e.log", metadata={"name": "e"}
        ),
    )
    server.wait_logged(ending, "ready")
    process, lost = pid_of(server, ending), shims(server)
    zygotes = server.zygotes()
    os.kill(server.pid, signal.SIGSTOP)  # so that the server does not replace the first ones
    kill(*lost, *zygotes)
    server.kill()
    os.kill(process, signal.SIGTERM)
    assert wait_until(lambda: alive_since(process) is None, 30)
    time.sleep(0.5)
    server.start()
    status = server.wait_exit(ending)
    assert (status.exit_code, server.log_lines(ending)) == (9, ["ready", "last"])
    assert not lost & shims(server)
    for pod, container in pods.items():
        assert server.pod_status(pod).state == api.SANDBOX_READY
        assert server.output(container, "echo", "here") == "here\n"
        counted_on(server, container, 1)
    server.remove_all()
    nothing_left(server)


def test_sessions_of_killed_shims_are_ended_by_the_next_server(server: Server) -> None:
    pod, container = launch_counting(server)
    with ThreadPoolExecutor(1) as pool:
        executing = pool.submit(answers_nothing, server, container)
        assert wait_until(lambda: "1006" in server.output(container, "ps"), 30)
        os.kill(server.pid, signal.SIGSTOP)  # the shim would end a session whose client has gone
        kill(shim_pid(server, pod))
        server.kill()
        executing.result(60)
    server.start()
    assert wait_until(lambda: "1006" not in server.output(container, "ps"), 30)
    counted_on(server, container, 1)
    server.remove_all()


def answers_nothing(server: Server, container: str) -> None:
    with contextlib.suppress(grpc.RpcError):
        server.exec(container, "sh", "-c", "sleep 1006 & wait", timeout_s=30)


def test_a_new_keeper_is_filled_again(server: Server) -> None:
    pod, container = launch_counting(server)
    before = stored(server)
    assert before == {f"pod/{pod}", f"container/{container}"}
    end_keeper(server.state, signal.SIGKILL)
    assert wait_until(lambda: stored(server) == before, 30)
    lose_shim(server, pod)
    assert server.output(container, "echo", "here") == "here\n"
    server.stop_container(container)
    assert stored(server) == {f"pod/{pod}"}
    server.remove_all()
    nothing_left(server)


def test_stderr_is_attached_as_stderr_when_stdout_had_ended(server: Server) -> None:
    """A new keeper and the next shim get only the open stderr, and do not serve it as stdout."""
    pod = server.run_pod()
    script = "exec >&-; echo ready >&2; until test -e /done; do sleep 0.1; done; echo word >&2"
    container = server.launch(pod, server.container_config(["/bin/sh", "-c", script]))
    server.wait_logged(container, "ready")
    end_keeper(server.state, signal.SIGKILL)
    assert wait_until(lambda: f"container/{container}" in stored(server), 30), server.tail()
    lose_shim(server, pod)
    request = api.AttachRequest(container_id=container, stdout=True, stderr=True)
    with open_session(server, server.runtime.Attach(request, timeout=60).url) as session:
        server.output(container, "touch", "/done")
        stdout, stderr, _ = collect(session)
    assert (stdout, stderr) == (b"", b"word\n")
    server.remove_all()
    nothing_left(server)


def test_a_stopped_keeper_delays_no_call(server: Server) -> None:
    keeper = keeper_pid(server.state)
    os.kill(keeper, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        pod, container = launch_counting(server)
        assert time.monotonic() - begun < 10
        assert server.output(container, "echo", "here") == "here\n"
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert wait_until(lambda: stored(server) == {f"pod/{pod}", f"container/{container}"}, 30)
    lose_shim(server, pod)
    counted_on(server, container, 1)
    server.remove_all()
    nothing_left(server)


def test_keeper_and_shims_killed_at_once_leave_nothing(server: Server) -> None:
    """No shim can take over the pods afterwards: their processes are ended, and new pods run."""
    pod, container = launch_counting(server)
    process = pid_of(server, container)
    kill(keeper_pid(server.state), *shims(server))
    assert server.wait_exit(container).reason == "Unknown"
    assert wait_until(lambda: alive_since(process) is None, 30)
    assert server.pod_status(pod).state == api.SANDBOX_NOTREADY
    assert wait_until(lambda: keeper_pid(server.state), 30)
    launch_counting(server)
    server.remove_all()
    nothing_left(server)


def test_entries_without_a_pod_are_dropped_by_the_next_server(server: Server) -> None:
    pod, container = launch_counting(server)
    before = stored(server)
    keeper = Keeper(server.state)
    keeper.put(f"container/{64 * 'a'}", b"{}")
    keeper.close()
    server.restart()
    assert stored(server) == before
    counted_on(server, container, 0)
    server.remove_pod(pod)


@pytest.mark.parametrize("seed", [1, 2])
def test_containers_survive_kills_of_server_shims_and_keeper(seed: int) -> None:
    """Containers continue through a random sequence of kills while others start and end."""
    chance = random.Random(seed)
    with Server() as server:
        server.load_image()
        pods = dict(launch_counting(server) for _ in range(3))
        done = threading.Event()
        # The keeper is killed alone: if it and another process are killed within a second,
        # descriptors that only they have are lost.
        kinds = ("shim", "shims", "server", "server and shims", "keeper", "zygotes")
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(live_until, done, server, next(iter(pods)))
            try:
                for _ in range(KILLS):
                    kill_some(server, chance.choice(kinds), chance)
                    time.sleep(chance.random())
                    assert wait_until(lambda: all(answers(server, c) for c in pods.values()), 60), (
                        server.tail()
                    )
            finally:
                done.set()
            others.result(60)
        for pod, container in pods.items():
            assert server.pod_status(pod).state == api.SANDBOX_READY
            counted_on(server, container, KILLS)
        server.remove_all()
        nothing_left(server)


def kill_some(server: Server, kind: str, chance: random.Random) -> None:
    lost = shims(server) if "shim" in kind else set()
    if kind == "shim":
        lost = {chance.choice(sorted(lost))}
    if kind == "keeper":
        before = {name for name in stored(server) if name.startswith("pod/")}
        end_keeper(server.state, signal.SIGKILL)
        assert wait_until(lambda: before <= stored(server), 30), server.tail()
    elif kind == "zygotes":
        kill(*server.zygotes())
    kill(*lost)
    if "server" in kind:
        server.kill()
        server.start()


def live_until(done: threading.Event, server: Server, pod: str) -> None:
    number = 0
    while not done.wait(0.1):
        number += 1
        with contextlib.suppress(grpc.RpcError, ValueError):  # a closed channel
            life_of(server, pod, f"other{number}")
