"""Tests pods that share a shim: a pod with a volume that does not answer, a pod that floods its log
and a pod with constant execs do not delay a fourth pod."""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, server_fixture
from tests.cri.test_foreign_paths import mounted
from tests.cri.test_recovery import nothing_left, shim_pid
from tests.support.processes import wait_until

ROUNDS = 40
RATIO = 50
"""On processors that the flood and the other commands keep busy; a shim that waited for one of them
would not answer at all."""


server = server_fixture("function", settings={"shims": {"count": 1}})


def times(server: Server, container: str) -> list[float]:
    durations = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        server.exec(container, "true")
        durations.append(time.monotonic() - began)
    return durations


def test_a_pod_is_served_beside_three_busy_pods_of_its_shim(server: Server, tmp_path: Path) -> None:
    pods = [server.run_pod() for _ in range(4)]
    assert len({shim_pid(server, pod) for pod in pods}) == 1
    fourth = server.launch(pods[3])
    quiet = times(server, fourth)
    with mounted(server, tmp_path) as volume:
        below = api.Mount(container_path="/v", host_path=str(volume.path / "file"))
        config = server.container_config()
        config.mounts.append(below)
        waits = server.create(pods[0], config)
        volume.hang()
        flood = server.launch(pods[1], server.container_config(["sh", "-c", "yes flood"]))
        commands, done = server.launch(pods[2]), threading.Event()

        def run_commands() -> None:
            while not done.is_set():
                server.exec(commands, "true")

        with ThreadPoolExecutor(5) as pool:
            starting = pool.submit(server.start_container, waits)
            assert wait_until(lambda: volume.waiting, 30)
            running = [pool.submit(run_commands) for _ in range(4)]
            busy = times(server, fourth)
            done.set()
            assert Path(server.status(flood).log_path).stat().st_size > 1 << 20, (
                "the container floods its log"
            )
            server.stop_container(flood)
            assert not starting.done()
            volume.answer()
            starting.result(60)
            for each in running:
                each.result(60)
    p50, p99 = statistics.median(busy), sorted(busy)[-1]
    print(
        f"median {statistics.median(quiet) * 1e3:.1f} ms quiet, {p50 * 1e3:.1f} busy,"
        f" {p99 * 1e3:.1f} at most"
    )
    assert p50 < RATIO * statistics.median(quiet)
    nothing_left(server)
