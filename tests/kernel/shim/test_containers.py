"""Tests the shim with real containers, which the runtime library starts with a pause process, in
namespaces, on an overlay."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cri_server.pod.client import ExecSession
from pyrunc.errors import Error, NotFound, WrongState
from pyrunc.shim.messages import PauseExited, PauseStarted, StartExec
from tests.kernel.shim.pod import (
    TIMEOUT_S,
    TestPod,
    children,
    gone,
    open_gate,
    read_all,
    read_some,
    until,
)
from tests.support.capabilities import holds

PAUSE: dict[str, Any] = {
    "version": 1,
    "hostname": "the-pod",
    "namespaces": {"network": "new", "ipc": "new", "uts": "new", "pid": "none"},
    "sysctls": {},
    "cgroup": {"driver": "cgroupfs", "missing_controllers": "warn"},
    "oom_score_adj": None,
    "seccomp": None,
    "shm_size_bytes": 1 << 20,
}


@pytest_asyncio.fixture
async def pod(tmp_path: Path) -> AsyncIterator[TestPod]:
    async with TestPod(tmp_path / "pod", library=True) as test_pod:
        yield test_pod


async def start_pause(pod: TestPod, **changes: Any) -> PauseStarted:
    describe(pod, **changes)
    return await pod.start_pause()


def describe(pod: TestPod, **changes: Any) -> None:
    pause = PAUSE | {"cgroups_path": f"{pod.group}/pause"} | changes
    (pod.sandbox / "pause.json").write_text(json.dumps(pause))


def namespace(pid: int, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


# -- the pause process


async def test_the_shim_starts_the_pause_process_and_pins_the_pods_namespaces(pod: TestPod) -> None:
    pause = await start_pause(pod)
    assert pause.netns_path == f"/proc/{pod.pid}/fd/{pause.netns_path.rpartition('/')[2]}"  # type: ignore[union-attr]
    assert os.stat(pause.netns_path).st_ino == os.stat(f"/proc/{pause.pid}/ns/net").st_ino  # type: ignore[arg-type]
    for kind in ("net", "ipc", "uts", "mnt"):
        assert namespace(pause.pid, kind) != namespace(os.getpid(), kind)
    assert namespace(pause.pid, "pid") == namespace(os.getpid(), "pid")
    state = await pod.client.state()
    assert state.pause is not None and state.pause_running
    assert (state.pause.pid, state.pause.start_time) == (pause.pid, pause.start_time)
    assert state.netns == pause.netns_path
    await pod.client.stop_pause()
    assert not os.path.exists(f"/proc/{pause.pid}")
    assert os.stat(pause.netns_path).st_ino  # type: ignore[arg-type]
    await until(lambda: not pod.cgroup("pause").exists() and pod.events)
    assert [type(event) for event in pod.events] == [PauseExited]
    await pod.client.stop_pause()
    await pod.client.shutdown()


@pytest_asyncio.fixture
async def networked(tmp_path: Path) -> AsyncIterator[TestPod]:
    async with TestPod(tmp_path / "networked", library=True, network=True) as one:
        yield one


async def test_the_network_namespace_is_made_with_the_pod_and_joined_by_the_pause_process(
    networked: TestPod,
) -> None:
    pod, path = networked, networked.netns_path
    assert path and path == f"/proc/{pod.pid}/fd/{path.rpartition('/')[2]}"
    prepared = os.stat(path)
    assert (await pod.client.state()).netns_path == path and prepared.st_ino != os.stat(
        "/proc/self/ns/net"
    ).st_ino
    assert os.stat(f"/proc/{pod.pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino
    pause = await start_pause(pod, namespaces=PAUSE["namespaces"] | {"network": "pinned"})
    assert (
        pause.netns_path == path and os.stat(f"/proc/{pause.pid}/ns/net").st_ino == prepared.st_ino
    )
    shown = ["nsenter", f"--net={path}", "ip", "-o", "link", "show", "up"]
    links = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    assert links.startswith("1: lo: <LOOPBACK,UP,LOWER_UP>") and links.count("\n") == 1
    await pod.client.stop_pause()
    assert os.stat(path).st_ino == prepared.st_ino
    await pod.client.shutdown()
    await until(lambda: not os.path.exists(path) or os.stat(path).st_ino != prepared.st_ino)


async def test_a_pause_process_stopped_during_its_start_is_gone_afterwards(
    pod: TestPod,
) -> None:
    describe(pod)
    starting = asyncio.ensure_future(pod.client.start_pause())
    await asyncio.sleep(0)
    # A server that gives up on the pod stops the pause process, then the shim.
    await pod.client.stop_pause()
    assert not (await pod.client.state()).pause_running
    await pod.client.shutdown()
    started = await starting
    await until(lambda: gone(started.pid))


async def test_a_failed_start_of_the_pause_process_is_reported_despite_a_stop(pod: TestPod) -> None:
    describe(pod, sysctls={"net.no.such": "1"})
    starting = asyncio.ensure_future(pod.client.start_pause())
    await asyncio.sleep(0)
    await pod.client.stop_pause()
    with pytest.raises(Error, match="such"):
        await starting
    await pod.client.shutdown()


async def test_no_container_starts_in_a_pod_whose_pause_process_has_ended(pod: TestPod) -> None:
    pause = await start_pause(pod)
    os.kill(pause.pid, signal.SIGKILL)
    await until(lambda: pod.events)
    # The configuration names the namespaces by the pid of the pause process, which another process
    # of the host may have by then.
    with pytest.raises(WrongState, match="pause process"):
        await pod.run("a", "exit 0")
    assert (await pod.client.state()).containers == []


async def test_a_pod_with_host_networking_has_no_network_namespace(pod: TestPod) -> None:
    shared = {"network": "host", "ipc": "host", "uts": "host", "pid": "none"}
    pause = await start_pause(pod, namespaces=shared, hostname="")
    assert pause.netns_path is None
    for kind in ("net", "ipc", "uts"):
        assert namespace(pause.pid, kind) == namespace(os.getpid(), kind)
    await pod.client.stop_pause()


async def test_a_failed_start_of_the_pause_process_is_an_error_and_can_be_repeated(
    pod: TestPod,
) -> None:
    with pytest.raises(Error):
        await start_pause(pod, sysctls={"net.no.such": "1"})
    assert (await pod.client.state()).pause is None
    pause = await start_pause(pod)
    with pytest.raises(Error, match=r"already|not empty"):
        await pod.start_pause()
    os.kill(pause.pid, signal.SIGKILL)
    await until(lambda: pod.events)
    assert not (await pod.client.state()).pause_running


async def test_containers_share_the_pods_namespaces_and_shm(pod: TestPod) -> None:
    pause = await start_pause(pod)
    shared = [
        {"type": "network", "path": pause.netns_path},
        *({"type": kind, "path": f"/proc/{pause.pid}/ns/{kind}"} for kind in ("ipc", "uts")),
        {"type": "pid"},
        {"type": "mount"},
    ]
    shm = {
        "destination": "/dev/shm",
        "source": "pyrunc:shm",
        "type": "bind",
        "options": ["rbind", "rw"],
    }
    for name, script in (
        ("a", "echo hi > /dev/shm/file; hostname; exec sleep 100"),
        ("b", "cat /dev/shm/file; hostname"),
    ):
        pod.container(name, script, linux={"namespaces": shared})
        path = pod.containers / name / "config.json"
        config = json.loads(path.read_text())
        config["mounts"] = [m for m in config["mounts"] if m["destination"] != "/dev/shm"] + [shm]
        del config["hostname"]
        path.write_text(json.dumps(config))
        await pod.start(name)
        await until(
            lambda name=name: b"the-pod" in pod.logged(name) or b"pyrunc" in pod.logged(name)
        )
    assert pod.logged("b").startswith(b"hi\n")
    await pod.client.stop("a", signal.SIGTERM, 0)


@pytest.mark.requirement("8.14")
async def test_the_end_of_a_container_kills_its_processes_in_a_shared_pid_namespace(
    pod: TestPod,
) -> None:
    pause = await start_pause(pod, namespaces=PAUSE["namespaces"] | {"pid": "new"})
    assert namespace(pause.pid, "pid") != namespace(os.getpid(), "pid")
    # The pause process is pid 1 of the namespace, which the container's end does not end.
    shared = [{"type": "pid", "path": f"/proc/{pause.pid}/ns/pid"}, {"type": "mount"}]
    script = "tr '\\0' '\\n' </proc/1/cmdline; setsid sleep 1000 & exit 3"
    pod.container("a", script, linux={"namespaces": shared})
    path = pod.containers / "a" / "config.json"
    config = json.loads(path.read_text())
    del config["hostname"]
    path.write_text(json.dumps(config))
    await pod.start("a")
    assert (await pod.exited("a")).exit_code == 3
    assert pod.logged("a") == b"pause\n"
    await until(lambda: pod.processes() == [pause.pid])
    assert (await pod.client.state()).pause_running


# -- containers


async def test_a_container_is_the_shims_child_and_leaves_nothing(pod: TestPod) -> None:
    started = await pod.run("a", "echo hello; id -u; exec sleep 100")
    status = Path(f"/proc/{started.pid}/status")
    # the worker that started it is ending
    await until(lambda: f"PPid:\t{pod.pid}\n" in status.read_text())
    assert started.start_time == int(
        Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()[19]
    )
    await until(lambda: pod.logged("a") == b"hello\n0\n")
    streams = ["", *(os.readlink(f"/proc/{started.pid}/fd/{number}") for number in (1, 2))]
    assert all(stream.startswith("pipe:[") for stream in streams[1:])
    assert (await pod.client.stop("a", signal.SIGTERM, 0)).signal == 9
    await until(lambda: not pod.cgroup("a").exists())
    record = json.loads((pod.containers / "a" / "state.json").read_text())
    assert (record["pid"], record["start_time"]) == (started.pid, started.start_time)
    assert record["streams"] == streams


async def test_the_start_error_of_a_missing_program_has_the_errno_text_of_execve(
    pod: TestPod,
) -> None:
    pod.container("a", "nothing", "x")
    with pytest.raises(NotFound, match=r"executable file not found in \$PATH"):
        await pod.start("a")
    recorded = pod.exit_record("a")
    assert (recorded["exit_code"], recorded["reason"]) == (128, "StartError")
    assert "executable file not found" in recorded["message"]
    await until(lambda: not pod.cgroup("a").exists())


async def test_an_exec_runs_in_the_container(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 100")
    process = {
        "args": ["sh", "-c", "hostname; echo $EXTRA; exit 4"],
        "cwd": "/tmp",
        "env": ["PATH=/bin", "EXTRA=yes"],
    }
    session = await pod.exec("a", "e", process)
    assert session.stdout_fd is not None
    assert await read_all(session.stdout_fd) == b"pyrunc\nyes\n"
    assert await session.exited == 4
    session.close()
    with pytest.raises(NotFound, match="executable file not found"):
        await pod.exec("a", "e2", {"args": ["nothing"], "cwd": "/"})


async def test_a_short_exec_is_answered_once_with_its_exit_and_output(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 100")
    before = len(pod.events)

    async def run(script: str, wait_ms: int = 30_000, **streams: bool) -> ExecSession:
        process = {"args": ["sh", "-c", script], "cwd": "/"}
        streams = {"stdout": True, "stderr": True, **streams}
        return await pod.client.exec(
            StartExec("a", f"e{time.monotonic_ns()}", process, exit_within_ms=wait_ms, **streams)
        )

    session = await run(r"printf '\377\0out'; echo err >&2; sleep 300 & exit 3")
    assert session.output == (b"\xff\0out", b"err\n") and session.exited.result() == 3
    assert session.stdout_fd is None and len(pod.events) == before
    for script, streams in (
        ("head -c 5000 /dev/zero", {}),  # longer than an answer may be
        ("exit 0", {"stdin": True}),
        ("exit 0", {"stderr": False}),
    ):
        session = await run(script, **streams)
        assert session.output is None and session.stdout_fd is not None
        assert len(await read_all(session.stdout_fd)) == (5000 if "head" in script else 0)
        assert await session.exited == 0
        session.close()
    session = await run("echo early; sleep 0.5; echo late", wait_ms=1)
    assert session.output is None and not session.exited.done() and session.stdout_fd is not None
    assert await read_all(session.stdout_fd) == b"early\nlate\n" and await session.exited == 0
    session.close()


async def test_an_exec_can_have_a_terminal_of_the_container(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 100")
    process = {
        "args": ["sh", "-c", "read x; stty size; tty"],
        "cwd": "/",
        "consoleSize": {"width": 80, "height": 24},
    }
    session = await pod.exec("a", "e", process, tty=True, stdin=True)
    assert session.stdin_fd is not None and session.stdout_fd is not None
    await pod.client.resize(101, 44, exec_id="e")
    os.write(session.stdin_fd, b"\n")
    output = await read_all(session.stdout_fd)
    assert b"44 101\r\n" in output and b"/dev/pts/" in output
    session.close()


async def test_a_killed_session_leaves_no_descendant_in_the_container(pod: TestPod) -> None:
    started = await pod.run("a", "exec sleep 100")
    script = "sleep 1000 & (sleep 1001 &) ; setsid sleep 1002 & echo ready; wait"
    session = await pod.exec("a", "e", {"args": ["sh", "-c", script], "cwd": "/"})
    assert session.stdout_fd is not None and await read_some(session.stdout_fd) == b"ready\n"
    await until(lambda: len(pod.processes()) == 5)
    await pod.client.kill_exec("e")
    assert await session.exited == 137
    await until(lambda: pod.processes() == [started.pid])
    session.close()


async def test_a_container_can_have_a_terminal(pod: TestPod) -> None:
    await pod.run("a", "read x; tty; stty size; echo got $x", tty=True, stdin=True)
    streams = await pod.client.attach("a", stdin=True, stdout=True)
    assert streams.stdin_fd is not None and streams.stdout_fd is not None
    await pod.client.resize(77, 22, container="a")
    os.write(streams.stdin_fd, b"hello\n")
    output = await read_all(streams.stdout_fd)
    assert b"22 77\r\ngot hello\r\n" in output
    assert (await pod.exited("a")).exit_code == 0
    streams.close()


async def test_hooks_run_in_their_order_around_a_container(pod: TestPod) -> None:
    trace = pod.folder / "trace"
    # Each hook writes its name and the status that it received.
    script = (
        """read -r state; echo $0 $(echo "$state" | sed 's/.*"status":"\\([a-z]*\\)".*/\\1/')"""
        f" >> {trace}"
    )
    kinds = ("prestart", "createRuntime", "createContainer", "poststart", "poststop")
    hooks = {kind: [{"path": "/bin/sh", "args": ["sh", "-c", script, kind]}] for kind in kinds}
    pod.container("a", "echo run; read x", stdin=True, stdin_once=True)
    path = pod.containers / "a" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hooks": hooks}))
    await pod.start("a")
    streams = await pod.client.attach("a", stdin=True, stdout=False)
    assert streams.stdin_fd is not None
    os.write(streams.stdin_fd, b"\n")
    assert (await pod.exited("a")).exit_code == 0
    streams.close()
    await until(lambda: "poststop" in trace.read_text())
    traced = dict(line.split() for line in trace.read_text().splitlines())
    assert [*traced] == list(kinds)
    assert (traced["createRuntime"], traced["poststart"], traced["poststop"]) == (
        "creating",
        "running",
        "stopped",
    )


async def test_a_failing_hook_is_a_start_error(pod: TestPod) -> None:
    pod.container("a", "echo never")
    path = pod.containers / "a" / "config.json"
    hook = {"path": "/bin/sh", "args": ["sh", "-c", "echo because >&2; exit 3"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hooks": {"createRuntime": [hook]}}))
    with pytest.raises(Error, match=r"createRuntime hook #0: exit status 3.*because"):
        await pod.start("a")
    assert pod.exit_record("a")["reason"] == "StartError"
    await until(lambda: not pod.cgroup("a").exists())
    assert pod.logged("a") == b""


@pytest.mark.parametrize("failed", [False, True])
async def test_poststop_hooks_run_before_the_container_is_forgotten(
    pod: TestPod, failed: bool
) -> None:
    """The shim forgets a container only after the poststop hooks have ended, also after a failed
    start."""
    gate, trace = pod.folder / "gate", pod.folder / "trace"
    os.mkfifo(gate)
    pod.container("a", "true")
    path = pod.containers / "a" / "config.json"
    # The hook waits at a named pipe.
    script = f"cat > {trace}; read -r x < {gate}; cat {path} >> {trace}"
    hooks = {
        "createRuntime": [{"path": "/bin/false" if failed else "/bin/true"}],
        "poststop": [{"path": "/bin/sh", "args": ["sh", "-c", script]}],
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hooks": hooks}))
    if failed:
        with pytest.raises(Error, match="createRuntime hook #0"):
            await pod.start("a")
    else:
        await pod.start("a")
        assert (await pod.exited("a")).exit_code == 0
    forgetting = asyncio.create_task(pod.client.forget("a"))
    await until(lambda: trace.exists() and '"stopped"' in trace.read_text())
    await pod.client.state()  # answered after `forget` was received
    assert not forgetting.done()
    await open_gate(gate)
    await forgetting
    assert "cgroupsPath" in trace.read_text()


async def test_a_worker_killed_during_a_start_leaves_nothing(pod: TestPod) -> None:
    """After a stop kills the worker of a start, no process and no cgroup of the container
    remains."""
    reached = pod.folder / "reached"
    # This hook blocks the start when the container's process exists.
    hook = {"path": "/bin/sh", "args": ["sh", "-c", f"echo > {reached}; exec sleep 100"]}
    pod.container("a", "echo never")
    path = pod.containers / "a" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hooks": {"createRuntime": [hook]}}))
    starting = asyncio.create_task(pod.start("a"))
    await until(reached.exists)
    assert pod.processes()
    exit = await pod.client.stop("a", signal.SIGTERM, 10)
    assert exit.reason == "StartError"
    with pytest.raises(Error, match="killed"):
        await starting
    await until(lambda: not pod.cgroup("a").exists())
    await until(lambda: not children(pod.pid))
    with pytest.raises(WrongState):
        await pod.client.attach("a")


async def test_a_container_of_a_killed_shim_runs_on_without_an_exit_record(
    pod: TestPod,
) -> None:
    started = await pod.run("a", "exec sleep 100")
    os.kill(pod.pid, signal.SIGKILL)
    await until(lambda: pod.closed)
    assert pod.processes() == [started.pid]
    # No process waits for the exit any more: the server ends the remaining processes through the
    # cgroup.
    assert not (pod.containers / "a" / "exit.json").exists()


async def test_an_exec_into_a_frozen_container_blocks_no_other_call(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 100")
    freeze = pod.cgroup("a") / "cgroup.freeze"
    freeze.write_text("1")
    stuck = asyncio.create_task(pod.exec("a", "e", {"args": ["true"], "cwd": "/"}))
    await asyncio.sleep(0.3)
    assert not stuck.done()
    await pod.run("b", "echo quick")
    assert (await pod.exited("b")).exit_code == 0
    await pod.client.kill_exec("e")
    with pytest.raises(Error, match="killed"):
        await stuck
    again = asyncio.create_task(pod.exec("a", "e2", {"args": ["true"], "cwd": "/"}))
    await asyncio.sleep(0.2)
    freeze.write_text("0")
    session = await again
    assert await session.exited == 0
    session.close()


@pytest.mark.parametrize("after_ms", [0, 0.5, 1, 1.5, 2, 3, 5, 10])
async def test_a_cancelled_exec_is_killed(pod: TestPod, after_ms: float) -> None:
    started = await pod.run("a", "exec sleep 100")
    for n in range(5):
        process = {"args": ["sleep", "100"], "cwd": "/"}
        task = asyncio.create_task(pod.exec("a", f"e{n}", process))
        await asyncio.sleep(after_ms / 1000)
        task.cancel()
        try:
            (await task).close()
            await pod.client.kill_exec(f"e{n}")
        except asyncio.CancelledError:
            pass
    await pod.client.state()
    await until(lambda: pod.processes() == [started.pid])
    async with asyncio.timeout(TIMEOUT_S):  # the last one may be about to be reaped
        while (await pod.client.state()).execs:
            await asyncio.sleep(0.01)


async def test_a_container_does_not_inherit_the_shims_oom_score(pod: TestPod) -> None:
    """A container and its execs have the configured score, or else the score of this test."""
    # The shim has the score -999 where it may lower it. Elsewhere it is raised: no process may go
    # below the lowest score that was set with CAP_SYS_RESOURCE.
    if not holds("CAP_SYS_RESOURCE"):
        own_score = int(Path("/proc/self/oom_score_adj").read_text())
        Path(f"/proc/{pod.pid}/oom_score_adj").write_text(str(own_score + 300))
    started = await pod.run("a", "exec sleep 100")
    own = Path("/proc/self/oom_score_adj").read_text()
    assert Path(f"/proc/{started.pid}/oom_score_adj").read_text() == own
    request = await pod.run("b", "exec sleep 100", process={"oomScoreAdj": int(own) + 77})
    assert int(Path(f"/proc/{request.pid}/oom_score_adj").read_text()) == int(own) + 77
    session = await pod.exec("b", "e", {"args": ["cat", "/proc/self/oom_score_adj"], "cwd": "/"})
    assert session.stdout_fd is not None and int(await read_all(session.stdout_fd)) == int(own) + 77
    session.close()
