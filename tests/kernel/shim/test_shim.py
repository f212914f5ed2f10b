"""Tests the shim with processes of the host, without containers: exits, stops, execs, attaches,
logs, and cost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cri_server.pod.client import ShimClient, start_shim
from cri_server.zygote.peer import wait_answer
from pyrunc.errors import (
    AlreadyExists,
    Error,
    InvalidArgument,
    NotFound,
    PeerError,
    Unsupported,
    WrongState,
)
from pyrunc.shim import messages, tree
from tests.kernel.shim.pod import (
    TestPod,
    children,
    descriptors,
    gone,
    name_of,
    open_gate,
    settled,
    until,
)
from tests.support.capabilities import holds

# Where the alternative is to wait for minutes or for ever: "at once" on a machine that is busy with
# something else, too.
AT_ONCE_S = 19  # what is waited for otherwise takes 20 at least


# -- exits


@pytest.mark.parametrize(
    ("script", "code", "number"),
    [("exit 0", 0, None), ("exit 3", 3, None), ("kill -9 $$", 137, 9), ("kill -TERM $$", 143, 15)],
)
async def test_an_exit_is_on_disk_before_clients_are_notified(
    pod: TestPod, script: str, code: int, number: int | None
) -> None:
    before = time.time_ns()
    await pod.run("a", script)
    exit = await pod.exited("a")
    recorded = pod.exit_record("a")  # the event came: the file must be there
    assert (exit.exit_code, exit.signal, exit.oom_killed) == (code, number, False)
    assert before < exit.finished_at_ns < time.time_ns()
    assert {
        "exit_code": code,
        "signal": number,
        "finished_at_ns": exit.finished_at_ns,
    }.items() <= recorded.items()
    state = await pod.client.state()
    assert [(c.id, c.running, c.exit) for c in state.containers] == [("a", False, exit)]
    await pod.client.forget("a")
    assert (await pod.client.state()).containers == []


async def test_every_connected_client_gets_an_exit_event(pod: TestPod) -> None:
    events_by_client: list[list[object]] = [[], [], []]
    clients = [
        await ShimClient.connect(pod.sandbox, on_event=events.append) for events in events_by_client
    ]
    await pod.start(_container(pod, "a", "exit 1"), clients[0])
    await until(lambda: all(events_by_client))
    assert events_by_client[0] == events_by_client[1] == events_by_client[2]
    for client in clients:
        client.close()


async def test_a_failed_start_leaves_only_an_exit_record(pod: TestPod) -> None:
    pod.container("a", "/no/such/program", "x")
    with pytest.raises(NotFound, match="/no/such/program: no such file"):
        await pod.start("a")
    recorded = pod.exit_record("a")
    assert (recorded["exit_code"], recorded["reason"]) == (128, "StartError")
    assert "no such file" in recorded["message"]
    assert not pod.exit_events("a")
    await until(lambda: not children(pod.pid))  # the fork that tried may be ending still
    with pytest.raises(AlreadyExists):
        await pod.start("a")


async def test_a_container_without_its_files_is_not_found(pod: TestPod) -> None:
    with pytest.raises(NotFound):
        await pod.start("nothing")
    for call in (pod.client.stop("x", 15, 1), pod.client.attach("x")):
        with pytest.raises(NotFound):
            await call


@pytest.mark.requirement("11.6", "14.7")
async def test_exits_are_recorded_while_no_client_is_connected(pod: TestPod) -> None:
    await pod.run("a", "sleep 0.3; echo last words; exit 7")
    pod.client.close()
    await pod.close_zygote()
    await until(lambda: (pod.containers / "a" / "exit.json").exists())
    assert pod.exit_record("a")["exit_code"] == 7
    assert pod.logged("a") == b"last words\n"
    again = await pod.connect()
    assert [(c.id, c.exit and c.exit.exit_code) for c in (await again.state()).containers] == [
        ("a", 7)
    ]
    again.close()


async def test_orphans_are_reaped(pod: TestPod) -> None:
    gates = [pod.folder / name for name in ("gate", "gate-of-a-session")]
    for gate in gates:
        os.mkfifo(gate)
    started = await pod.run(
        "a", f"( cat {gates[0]} & ) ; ( setsid cat {gates[1]} & ) ; exec sleep 100"
    )
    await until(lambda: [name_of(child) for child in children(pod.pid)].count("cat") == 2)
    for gate in gates:
        # each waits for the one process that opens it, which may have its name only
        await open_gate(gate)
    await until(lambda: children(pod.pid) == [started.pid])


def test_a_child_that_ended_before_the_shim_listened_is_reaped() -> None:
    script = (
        "import os\n"
        "from pyrunc.shim.loop import EventLoop\n"
        "from pyrunc.shim.reaper import Reaper\n"
        "child = os.fork() or os._exit(0)\n"
        "os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)\n"
        "Reaper(EventLoop())\n"
        "assert not os.path.exists(f'/proc/{child}')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_expected_exit_is_seen_behind_a_zombie_of_a_start() -> None:
    script = (
        "import os\n"
        "from pyrunc.shim.loop import EventLoop\n"
        "from pyrunc.shim.reaper import Reaper\n"
        "loop = EventLoop()\n"
        "reaper = Reaper(loop)\n"
        "reaper.hold()\n"
        "helper = os.fork() or os._exit(0)\n"
        "os.waitid(os.P_PID, helper, os.WEXITED | os.WNOWAIT)\n"
        "reading, writing = os.pipe()\n"
        "expected = os.fork() or os._exit(len(os.read(reading, 1)))\n"
        "ended = []\n"
        "reaper.expect(expected, ended.append)\n"
        "os.write(writing, b'x')\n"
        "while not ended: loop.turn()\n"
        "assert (ended[0].pid, ended[0].exit_code) == (expected, 1)\n"
        "assert os.waitpid(helper, 0) == (helper, 0), 'the helper is the starting code\\'s'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


async def test_remaining_processes_of_an_ended_container_are_killed(pod: TestPod) -> None:
    started = time.monotonic()
    await pod.run("a", "setsid sleep 1000 & echo done")
    exit = await pod.exited("a")
    assert exit.exit_code == 0 and time.monotonic() - started < AT_ONCE_S
    await until(lambda: not pod.cgroup("a").exists())
    assert pod.logged("a") == b"done\n"


# -- stop


async def test_stop_sends_the_signal_and_returns_after_the_exit(pod: TestPod) -> None:
    await _ready(
        pod, "a", "trap 'echo got it; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    )
    exit = await pod.client.stop("a", signal.SIGTERM, 10)
    assert exit.exit_code == 5 and pod.exit_record("a")["exit_code"] == 5
    assert pod.logged("a").endswith(b"got it\n")


async def test_stop_sends_sigkill_after_the_grace_period(pod: TestPod) -> None:
    await _ready(pod, "a", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    started = time.monotonic()
    exit = await pod.client.stop("a", signal.SIGTERM, 0.5)
    assert exit.signal == 9 and 0.5 <= time.monotonic() - started < AT_ONCE_S


@pytest.mark.requirement("4.3.1")
async def test_stop_without_a_grace_period_kills_all_processes_at_once(pod: TestPod) -> None:
    await _ready(pod, "a", "trap 'exit 5' TERM; setsid sleep 1000 & echo ready; wait")
    assert (await pod.client.stop("a", signal.SIGTERM, 0)).signal == 9
    await until(lambda: not pod.cgroup("a").exists())


@pytest.mark.requirement("4.3.3")
async def test_concurrent_stops_send_one_signal_and_use_the_shortest_grace_period(
    pod: TestPod,
) -> None:
    script = "trap 'echo signal' TERM; echo ready; while :; do sleep 0.02; done"
    await _ready(pod, "a", script)
    started = time.monotonic()
    stops = [asyncio.create_task(pod.client.stop("a", signal.SIGTERM, after)) for after in (20, 30)]
    await until(lambda: b"signal" in pod.logged("a"))
    last = time.monotonic()
    stops.append(asyncio.create_task(pod.client.stop("a", signal.SIGTERM, 0.3)))
    exits = await asyncio.gather(*stops)
    assert len({exit.finished_at_ns for exit in exits}) == 1 and exits[0].signal == 9
    assert time.monotonic() - last >= 0.3 and time.monotonic() - started < AT_ONCE_S
    assert pod.logged("a") == b"ready\nsignal\n"


@pytest.mark.parametrize("timeout_s", [2**62, 1e300, -(2**62)])
async def test_any_length_of_the_grace_period_is_accepted(pod: TestPod, timeout_s: float) -> None:
    await _ready(pod, "a", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    stopping = asyncio.create_task(pod.client.stop("a", signal.SIGTERM, timeout_s))
    await asyncio.sleep(0.1)
    assert (await pod.client.state()).pid == pod.pid
    assert (await pod.client.stop("a", signal.SIGTERM, 0)).signal == 9
    assert (await stopping).signal == 9


async def test_stop_of_an_exited_container_returns_its_exit(pod: TestPod) -> None:
    await pod.run("a", "exit 4")
    exit = await pod.exited("a")
    assert await pod.client.stop("a", signal.SIGTERM, 10) == exit


async def test_sigkill_follows_the_grace_period_without_the_server(pod: TestPod) -> None:
    await _ready(pod, "a", "trap 'echo stopping' TERM; echo ready; while :; do sleep 0.05; done")
    stop = asyncio.create_task(pod.client.stop("a", signal.SIGTERM, 2))
    await until(lambda: b"stopping" in pod.logged("a"))
    pod.client.close()
    await pod.close_zygote()
    with pytest.raises(PeerError):
        await stop
    await until(lambda: (pod.containers / "a" / "exit.json").exists())
    assert pod.exit_record("a")["signal"] == 9


async def test_a_stop_continues_when_the_server_is_killed(pod: TestPod) -> None:
    """The shim completes a stop although the process that called it is killed after the first
    signal, during the grace period."""
    await _ready(pod, "a", "trap 'echo stopping' TERM; echo ready; while :; do sleep 0.05; done")
    script = (
        "import asyncio, sys\n"
        "from cri_server.pod.client import ShimClient\n"
        "async def main():\n"
        "    await (await ShimClient.connect(sys.argv[1])).stop('a', 15, 3)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(pod.sandbox))
    await until(lambda: b"stopping" in pod.logged("a"))
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    assert (await pod.exited("a")).signal == 9


async def test_a_frozen_container_can_be_stopped(pod: TestPod) -> None:
    await _ready(pod, "a", "trap '' TERM; echo ready; sleep 100")
    (pod.cgroup("a") / "cgroup.freeze").write_text("1")
    await until(lambda: "frozen 1" in (pod.cgroup("a") / "cgroup.events").read_text())
    started = time.monotonic()
    assert (await pod.client.stop("a", signal.SIGTERM, 0.3)).signal == 9
    assert time.monotonic() - started < AT_ONCE_S


async def test_an_invalid_signal_is_an_error(pod: TestPod) -> None:
    await _ready(pod, "a", "echo ready; sleep 100")
    with pytest.raises(InvalidArgument):
        await pod.client.stop("a", 0, 1)


# -- the whole pod


async def test_shutdown_is_refused_while_a_container_runs_and_then_leaves_nothing(
    pod: TestPod,
) -> None:
    await pod.run("a", "sleep 100")
    with pytest.raises(WrongState, match="a"):
        await pod.client.shutdown()
    with pytest.raises(WrongState):
        await pod.client.forget("a")
    await pod.client.stop("a", 15, 0)
    await pod.client.shutdown()
    await until(lambda: {path.name for path in pod.sandbox.iterdir()} == {"shim.lock"})
    assert not gone(pod.pid)
    assert pod.shim_log() == ""
    with pytest.raises(NotFound):
        await pod.connect()


async def test_a_killed_shim_is_noticed_and_refuses_connections(pod: TestPod) -> None:
    waiting = asyncio.create_task(
        pod.client.stop(await _named(pod, "a", "sleep 100"), signal.SIGURG, 100)
    )
    await asyncio.sleep(0.1)
    os.kill(pod.pid, signal.SIGKILL)
    with pytest.raises(PeerError):
        await waiting
    assert pod.closed == 1
    await until(lambda: gone(pod.pid))  # its descriptors close one after the other
    with pytest.raises(NotFound):
        await pod.connect()


async def ask(pod: TestPod, call: object, **parameters: Any) -> list[int]:
    """Sends a request that no client of ours sends; returns the descriptors of the reply."""
    _, answer = pod.client._peer.ask({"call": call, **parameters})
    return (await wait_answer(answer))[1]


async def test_an_unknown_call_is_an_error_and_the_connection_stays_open(pod: TestPod) -> None:
    with pytest.raises(Unsupported, match="dance"):
        await ask(pod, "dance")
    with pytest.raises(InvalidArgument):
        await ask(pod, "stop", container="../../etc", signal=9, timeout_s=0)
    with pytest.raises(InvalidArgument):
        await ask(pod, "start_container", container=["a"])
    assert (await pod.client.state()).pid == pod.pid


async def test_requests_with_invalid_parameters_get_a_reply(pod: TestPod) -> None:
    """Parameters of the wrong type must neither leave a call without a reply, nor end the shim, nor
    be logged as an internal error."""
    await pod.run("a", "exec sleep 1000")
    random = Random(1)
    values = [
        None,
        True,
        -1,
        0,
        1.5,
        2**70,
        1e308,
        "",
        "a",
        "b",
        "x/y",
        "..",
        [],
        ["a"],
        {},
        {"args": 3},
        {"args": []},
    ]
    calls = [
        "start_container",
        "exec",
        "kill_exec",
        "signal",
        "attach",
        "resize",
        "reopen_log",
        "forget",
        "state",
    ]
    names = [
        "container",
        "exec",
        "process",
        "signal",
        "timeout_s",
        "width",
        "height",
        "tty",
        "stdin",
        "stdout",
    ]
    for _ in range(1000):
        request: dict[str, Any] = {
            name: random.choice(values) for name in names if random.random() < 0.7
        }
        request |= {"container": "a"} if random.random() < 0.5 else {}
        request["signal"] = random.choice([v for v in values if v != -1] + [28])
        call = random.choice([*calls, None, 7, "no such"])
        try:
            for fd in await asyncio.wait_for(ask(pod, call, **request), 30):
                os.close(fd)
        except (TimeoutError, PeerError):
            raise
        except Error:
            pass
    assert (await pod.client.state()).pid == pod.pid
    assert "Traceback" not in pod.shim_log(), pod.shim_log()


async def test_a_client_that_never_reads_does_not_block_other_clients(pod: TestPod) -> None:
    deaf = await ShimClient.connect(pod.sandbox)
    asyncio.get_running_loop().remove_reader(deaf._peer._socket)
    for _ in range(3000):
        deaf._peer.send({"id": 1, "call": "state"})
    await pod.run("a", "exit 0")
    await pod.exited("a")
    deaf.close()


async def test_a_slow_start_does_not_block_other_calls(pod: TestPod) -> None:
    gate = _with_gate(pod, "slow")
    slow = asyncio.create_task(pod.start("slow"))
    await until(lambda: children(pod.pid))
    await pod.run("a", "echo quick")
    await pod.exited("a")
    assert pod.logged("a") == b"quick\n"
    assert not slow.done()
    await open_gate(gate)
    await slow
    await pod.exited("slow")


async def test_stop_ends_a_container_during_its_start(pod: TestPod) -> None:
    _with_gate(pod, "slow")
    slow = asyncio.create_task(pod.start("slow"))
    await until(lambda: children(pod.pid))
    exit = await pod.client.stop("slow", signal.SIGTERM, 10)
    assert (exit.exit_code, exit.reason) == (128, "StartError")
    with pytest.raises(Exception, match="killed"):
        await slow


async def test_the_cgroup_and_pipe_of_a_refused_container_are_removed(pod: TestPod) -> None:
    await pod.run("other", "exec sleep 1000")
    before = await settled(pod, running=1)
    pod.container("a", "exit 0", process={"first": "no luck"})
    with pytest.raises(WrongState, match="no luck"):
        await pod.client.create_container(messages.CreateContainer("a"))
    await until(lambda: not pod.cgroup("a").exists())
    assert await settled(pod, running=1) == before


async def test_a_failed_start_of_the_pause_process_leaves_nothing(pod: TestPod) -> None:
    os.mkfifo(gate := pod.folder / "gate")
    pause = {"version": 1, "cgroups_path": f"{pod.group}/pause"}
    (pod.sandbox / "pause.json").write_text(
        json.dumps(pause | {"gate": str(gate), "fails": "no luck"})
    )
    starting = asyncio.create_task(pod.start_pause())
    await until(lambda: pod.processes())
    assert (await pod.client.state()).pid == pod.pid, "the others need not wait for it"
    await open_gate(gate)
    with pytest.raises(Error, match="no luck"):
        await starting
    await until(lambda: not pod.cgroup("pause").exists() and not children(pod.pid))
    (pod.sandbox / "pause.json").write_text(json.dumps(pause))
    started = await pod.start_pause()
    # it joins its group by itself, after the fork
    await until(lambda: pod.processes() == [started.pid])
    await pod.client.stop_pause()


async def test_a_worker_killed_during_a_start_is_a_start_error(
    pod: TestPod,
) -> None:
    _with_gate(pod, "a", "blocks")
    starting = asyncio.create_task(pod.start("a"))
    await until(lambda: children(pod.pid))
    os.kill(children(pod.pid)[0], signal.SIGKILL)
    with pytest.raises(Error, match="killed"):
        await starting
    assert pod.exit_record("a")["reason"] == "StartError"
    await until(lambda: not pod.cgroup("a").exists() and not children(pod.pid))


async def test_many_ended_containers_leave_nothing(pod: TestPod) -> None:
    await pod.run("first", "exit 0")
    await pod.exited("first")
    await pod.client.forget("first")
    before = await settled(pod)
    for n in range(30):
        await pod.run(f"c{n}", f"echo {n}; exit {n}", stdin=n % 2 == 0)
    for n in range(30):
        assert (await pod.exited(f"c{n}")).exit_code == n
        assert pod.logged(f"c{n}") == b"%d\n" % n
        await pod.client.forget(f"c{n}")
    await until(lambda: descriptors(pod.pid) <= before and not children(pod.pid))
    assert pod.shim_log() == ""


async def test_the_shim_records_its_pid_and_start_time(pod: TestPod) -> None:
    await pod.client.state()
    own = tree.stat(pod.pid)
    assert own
    recorded = (pod.sandbox / "shim.json").read_text()
    assert f'"pid":{pod.pid}' in recorded and f'"start_time":{own.start_time}' in recorded
    assert Path(f"/proc/{pod.pid}/comm").read_text().strip() == "pyrunc-shim"


async def test_a_request_to_take_a_pod_is_refused_after_its_deadline(pod: TestPod) -> None:
    sandbox = pod.folder / "late"
    sandbox.mkdir()
    os.kill(pod.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            await pod.shim_client.take_pod(sandbox, pod.containers, timeout_s=0.01)
    finally:
        os.kill(pod.pid, signal.SIGCONT)
    await pod.shim_client.shim()  # answers are in the order of the requests
    assert not (sandbox / "shim.json").exists()


async def test_the_end_of_a_pod_leaves_the_files_of_the_shim_that_has_taken_it_since(
    pod: TestPod,
) -> None:
    folder = pod.folder / "other"
    folder.mkdir()
    other, shim = await start_shim(pod.zygote, folder, starter=pod.starter)
    await shim.take_pod(pod.sandbox, pod.containers)
    await pod.client.shutdown()
    assert json.loads((pod.sandbox / "shim.json").read_text())["pid"] == other
    client = await pod.connect()
    await client.shutdown()
    await until(lambda: not (pod.sandbox / "shim.json").exists())
    shim.close()
    await until(lambda: gone(other))


async def test_the_shim_lowers_its_oom_score_where_permitted(pod: TestPod) -> None:
    await pod.client.state()
    own = Path("/proc/self/oom_score_adj").read_text()
    score = Path(f"/proc/{pod.pid}/oom_score_adj").read_text()
    assert score.strip() == ("-999" if holds("CAP_SYS_RESOURCE") else own.strip())


async def _ready(pod: TestPod, name: str, script: str) -> None:
    """Starts a container and waits for its first line."""
    await pod.run(name, script)
    await until(lambda: pod.log_path(name).exists() and pod.logged(name))


def _with_gate(pod: TestPod, name: str, how: str = "gate") -> Path:
    """Writes a container whose start waits until the test opens a named pipe; returns the pipe's
    path."""
    os.mkfifo(gate := pod.folder / "gate")
    pod.container(name, "exit 0", process={how: str(gate)})
    return gate


async def _named(pod: TestPod, name: str, script: str) -> str:
    await pod.run(name, script)
    return name


def _container(pod: TestPod, name: str, script: str) -> str:
    pod.container(name, script)
    return name
