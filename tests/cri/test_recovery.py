"""Tests restarts of the server after it has died at any step: pods continue, no record is lost,
nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.operations.steps import FAILPOINT, Steps
from pyrunc.kernel.process import alive_since
from tests.cri.server_harness import Server, code_of, message_of, server_fixture
from tests.support.processes import wait_until


def all_points() -> list[str]:
    """Return every step of every verb."""
    # The server's modules define the steps.
    import cri_server.rpc.runtime  # noqa: F401

    return Steps.points()


server = server_fixture("function")


def named(server: Server, name: str, script: str) -> api.ContainerConfig:
    return server.container_config(
        ["sh", "-c", script], metadata=api.ContainerMetadata(name=name), log_path=f"{name}.log"
    )


@pytest.mark.requirement("1.4", "1.12", "11.6", "11.8")
@pytest.mark.parametrize("how", [Server.kill, Server.stop])
def test_pods_survive_the_server(server: Server, how: object) -> None:
    pod = server.run_pod()
    container = server.launch(
        pod, named(server, "tick", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done")
    )
    created = server.create(pod, named(server, "waits", "echo started"))
    before, sandbox = server.status(container), server.pod_status(pod)
    address = sandbox.network.ip
    server.restart(how)  # type: ignore[arg-type]
    after = server.status(container)
    assert after == before and server.pod_status(pod) == sandbox
    assert server.status(created).state == api.CONTAINER_CREATED
    assert server.output(container, "echo", "again") == "again\n"
    assert address in server.output(container, "ip", "addr")
    server.start_container(created)
    assert server.wait_exit(created).exit_code == 0 and server.log_lines(created) == ["started"]
    time.sleep(0.2)
    server.stop_container(container)
    numbers = [int(line) for line in server.log_lines(container)]
    assert numbers == list(range(1, len(numbers) + 1)), "log lines were lost"


@pytest.mark.requirement("1.12", "11.7")
def test_exits_during_an_outage_are_reported_afterwards(server: Server) -> None:
    pod = server.run_pod()
    wait = server.folder / "go"
    mount = api.Mount(container_path="/shared", host_path=str(server.folder / "shared"))
    containers = {}
    for code in (0, 1, 42, 255):
        config = named(
            server,
            f"c{code}",
            f"until [ -e /shared/go ]; do sleep 0.02; done; echo out{code}; exit {code}",
        )
        config.mounts.append(mount)
        containers[server.launch(pod, config)] = code
    server.kill()
    (server.folder / "shared" / wait.name).touch()
    exits = [server.state / "containers" / container / "exit.json" for container in containers]
    assert wait_until(lambda: all(path.exists() for path in exits), 60)
    server.start()
    for container, code in containers.items():
        status = server.status(container)
        assert (status.state, status.exit_code) == (api.CONTAINER_EXITED, code)
        assert status.finished_at > status.started_at > 0
        assert server.log_lines(container) == [f"out{code}"]
    assert server.pod_status(pod).state == api.SANDBOX_READY


@pytest.mark.requirement("1.12", "11.8")
def test_a_start_that_outlives_its_server_is_undone(tmp_path: Path) -> None:
    """If the server is killed during StartContainer, the container ends with the reason
    StartError."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    script = f"touch {begun}; until [ -e {go} ]; do sleep 0.05; done"
    hook = {
        "version": "1.0.0",
        "hook": {"path": "/bin/sh", "args": ["sh", "-c", script]},
        "when": {"always": True},
        "stages": ["createRuntime"],
    }
    (tmp_path / "hook.json").write_text(json.dumps(hook))
    with (
        Server(settings={"containers": {"hooks_dirs": [str(tmp_path)]}}) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        server.load_image()
        pod = server.run_pod()
        container = server.create(pod)
        start = pool.submit(server.start_container, container)
        assert wait_until(begun.exists, 30)
        server.restart(Server.kill)
        assert isinstance(start.exception(), grpc.RpcError)
        # If it ran while it is listed as CREATED, kubelet would start another one beside it.
        assert server.wait_exit(container).reason == "StartError"
        go.touch()
        with pytest.raises(grpc.RpcError, match="is CONTAINER_EXITED, not CONTAINER_CREATED"):
            server.start_container(container)
        server.remove_pod(pod)


@pytest.mark.requirement("11.7")
def test_names_stay_reserved_and_identical_requests_are_joined(server: Server) -> None:
    config = server.pod_config("kept")
    pod = server.run_pod(config)
    container = server.create(pod)
    server.restart()
    assert server.run_pod(config) == pod and server.create(pod) == container


@pytest.mark.requirement("1.12", "4.7.1")
def test_updated_limits_survive(server: Server) -> None:
    container = server.create(server.run_pod())
    request = api.UpdateContainerResourcesRequest(container_id=container)
    request.linux.cpu_shares = 512
    server.runtime.UpdateContainerResources(request)
    server.restart()
    assert server.status(container).resources.linux.cpu_shares == 512


@pytest.mark.requirement("2.6")
def test_a_shim_that_died_with_the_server_is_replaced(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod)
    shim = shim_pid(server, pod)
    server.kill()
    os.kill(shim, signal.SIGKILL)
    server.start()
    assert server.status(container).state == api.CONTAINER_RUNNING
    assert server.output(container, "echo", "here") == "here\n"
    server.stop_container(container)
    assert server.status(container).exit_code == 137
    server.remove_pod(pod)
    assert not server.pods() and not server.containers()


@pytest.mark.requirement("2.5")
def test_stop_ends_the_container_of_a_silent_shim(server: Server) -> None:
    pod, other = server.run_pod(), server.run_pod()
    container, healthy = server.launch(pod), server.launch(other)
    shim = shim_pid(server, pod)
    server.kill()
    os.kill(shim, signal.SIGSTOP)
    server.start()
    assert server.output(healthy, "echo", "fine") == "fine\n"
    assert "does not answer" in message_of(lambda: server.exec(container, "true"))
    server.stop_container(container)
    status = server.status(container)
    assert (status.state, status.reason) == (api.CONTAINER_EXITED, "Unknown")
    server.remove_pod(pod)
    assert alive_since(shim) is None


def _answers(server: Server, container: str) -> bool:
    """Return whether an exec works; it fails while the server has no connection to the shim."""
    try:
        return bool(server.exec(container, "echo", "again").stdout == b"again\n")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        return False


@pytest.mark.requirement("1.4", "1.a.10")
def test_a_shim_that_answers_late_keeps_its_pod(server: Server) -> None:
    """While a shim is stopped, a restarted server lists its containers as running; they continue
    when the shim answers."""
    pod = server.run_pod()
    lives = server.launch(
        pod, named(server, "lives", "trap 'exit 7' TERM; echo up; while :; do sleep 0.05; done")
    )
    dies = server.launch(pod, named(server, "dies", "sleep 3600"))
    server.wait_logged(lives, "up")
    shim, process = shim_pid(server, pod), pid_of(server, dies)
    server.kill()
    os.kill(shim, signal.SIGSTOP)
    try:
        # The server waits a limited time for the shim before it answers clients.
        server.start()
        assert server.pod_status(pod).state == api.SANDBOX_READY
        assert {server.status(c).state for c in (lives, dies)} == {api.CONTAINER_RUNNING}
        os.kill(process, signal.SIGKILL)
        assert wait_until(lambda: server.status(dies).state == api.CONTAINER_UNKNOWN, 60)
    finally:
        os.kill(shim, signal.SIGCONT)
    status = server.wait_exit(dies)
    assert (status.exit_code, status.reason) == (137, "Error")
    assert wait_until(lambda: _answers(server, lives), 60)
    server.stop_container(lives, timeout_s=30)
    assert server.status(lives).exit_code == 7
    assert server.pod_status(pod).state == api.SANDBOX_READY
    server.remove_pod(pod)


def test_a_stop_uses_a_shim_that_answers_again(server: Server) -> None:
    """If a stopped shim continues while StopContainer waits for it, the container still gets its
    grace period."""
    pod = server.run_pod()
    container = server.launch(
        pod, named(server, "ends", "trap 'exit 7' TERM; echo up; while :; do sleep 0.05; done")
    )
    server.wait_logged(container, "up")
    shim = shim_pid(server, pod)
    server.kill()
    os.kill(shim, signal.SIGSTOP)
    try:
        server.start()
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(server.stop_container, container, 30)
            os.kill(shim, signal.SIGCONT)
            stopping.result()
    finally:
        os.kill(shim, signal.SIGCONT)
    assert server.status(container).exit_code == 7


def test_a_deleted_folder_ends_no_container(server: Server) -> None:
    """If the folder of a running container is deleted, the container runs on, and its exit is still
    recorded."""
    pod = server.run_pod()
    container = server.launch(
        pod, named(server, "runs", "until [ -e /go ]; do sleep 0.02; done; exit 5")
    )
    process = pid_of(server, container)
    server.kill()
    shutil.rmtree(server.state / "containers" / container)
    server.start()
    assert server.status(container).state == api.CONTAINER_RUNNING
    Path(f"/proc/{process}/root/go").touch()
    assert server.wait_exit(container).exit_code == 5
    server.restart()
    assert server.status(container).exit_code == 5
    server.remove_pod(pod)


def test_a_dead_zygote_is_replaced(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod)
    zygotes = server.zygotes()
    assert len(zygotes) == 1
    for zygote in zygotes:
        os.kill(zygote, signal.SIGKILL)
    assert wait_until(lambda: not any(map(alive_since, zygotes)), 60)
    assert server.output(container, "echo", "alive") == "alive\n"
    other = server.launch(server.run_pod())
    assert server.status(other).state == api.CONTAINER_RUNNING
    server.remove_pod(pod)


@pytest.mark.requirement("3.4.2")
def test_a_dead_pause_process_makes_the_pod_not_ready(server: Server) -> None:
    pod = server.run_pod()
    request = api.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=True)
    pid = json.loads(server.runtime.PodSandboxStatus(request).info["info"])["pid"]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: server.pod_status(pod).state != api.SANDBOX_READY, 60)


@pytest.mark.requirement("3.2.2", "11.7")
def test_after_a_reboot_everything_has_ended(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod)
    address = server.pod_status(pod).network.ip
    server.stop_container(container)
    running = server.launch(pod, named(server, "runs", "sleep 3600"))
    shim = shim_pid(server, pod)
    server.kill()
    os.kill(shim, signal.SIGKILL)
    kill_group(server)
    for record in [
        *(server.root / "sandboxes").glob("*.json"),
        *(server.root / "containers").glob("*.json"),
    ]:
        record.write_text(
            record.read_text().replace(
                Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "another-boot"
            )
        )
    shutil.rmtree(server.state)
    server.start()
    assert server.pod_status(pod).state == api.SANDBOX_NOTREADY
    status = server.status(running)
    assert (status.state, status.exit_code, status.reason) == (api.CONTAINER_EXITED, 255, "Unknown")
    assert {c.id for c in server.containers()} == {container, running}
    server.stop_pod(pod)
    server.remove_pod(pod)
    assert server.pod_status(server.run_pod()).network.ip and address


def test_damaged_records_are_put_aside(server: Server) -> None:
    pod, other = server.run_pod(), server.run_pod()
    container = server.launch(other)
    server.kill()
    record = server.root / "sandboxes" / f"{pod}.json"
    content = record.read_bytes()
    record.write_bytes(content[: len(content) // 2])
    (server.root / "containers" / ("ab" * 32 + ".json")).write_text('{"version": 1}')
    server.start()
    assert {p.id for p in server.pods()} == {other}
    assert server.status(container).state == api.CONTAINER_RUNNING
    assert not (server.state / "sandboxes" / pod).exists(), (
        "the server ends processes without a record"
    )


def test_a_stop_is_known_without_its_record(server: Server) -> None:
    """StopPodSandbox leaves the pod's record unchanged; a restarted server still reports that the
    pod is stopped."""
    pod, other = server.run_pod(), server.run_pod(host_network=True)
    records = [server.root / "sandboxes" / f"{each}.json" for each in (pod, other)]
    before = [record.stat().st_ino for record in records]
    for each in (pod, other):
        server.stop_pod(each)
    infos = [info(server, each) for each in (pod, other)]
    assert [each["phase"] for each in infos] == ["stopped"] * 2
    # No write is needed, because a reboot ends the pod anyway.
    assert [record.stat().st_ino for record in records] == before
    server.restart()
    assert [info(server, each) for each in (pod, other)] == infos
    server.remove_all()
    assert not list((server.state / "sandboxes").iterdir())


def info(server: Server, pod: str) -> dict[str, object]:
    request = api.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=True)
    document = json.loads(server.runtime.PodSandboxStatus(request, timeout=60).info["info"])
    return {name: document[name] for name in ("phase", "network")}


def test_an_empty_record_is_removed_as_an_unanswered_call(server: Server) -> None:
    """Pods and containers whose records a power cut has emptied are removed, and nothing is set
    aside."""
    pod, other = server.run_pod(), server.run_pod()
    container = server.create(other)
    server.kill()
    records = [
        server.root / "sandboxes" / f"{pod}.json",
        server.root / "containers" / f"{container}.json",
    ]
    for record in records:
        record.write_bytes(b"")
    server.start()
    assert {p.id for p in server.pods()} == {other} and not server.containers()
    left = [path for record in records for path in record.parent.glob(f"{record.stem}*")]
    assert not left
    assert "set aside" not in server.tail(200)


@contextlib.contextmanager
def second(server: Server, **folders: Path) -> Iterator[Server]:
    """Turn `server` into a second server for the block, with another log and socket and with
    `folders`."""
    before = {
        name: getattr(server, name) for name in ("_process", "log", "socket", "root", "state")
    }
    changes = {
        "log": server.folder / "second.log",
        "socket": server.folder / "second.sock",
        **folders,
    }
    for name, value in changes.items():
        setattr(server, name, value)
    try:
        yield server
    finally:
        for name, value in before.items():
            setattr(server, name, value)
        server._connect()


@pytest.mark.parametrize("change", [(), ("root",), ("state",)])
def test_a_second_server_on_any_of_the_folders_is_refused(
    server: Server, change: tuple[str, ...]
) -> None:
    pod = server.run_pod()
    container = server.launch(pod)
    folders = dict.fromkeys(change, server.folder / "other")
    with second(server, **folders), pytest.raises(AssertionError, match="another server uses"):
        server.start()
    assert server.output(container, "echo", "fine") == "fine\n"
    assert server.pod_status(pod).state == api.SANDBOX_READY


@pytest.mark.parametrize("change", ["root", "state"])
def test_folders_that_do_not_belong_together_are_refused(server: Server, change: str) -> None:
    """While pods run, a server with their root directory and another state directory, or the other
    way round, does not start."""
    pod = server.run_pod()
    container = server.launch(pod)
    server.stop()
    words = f"--{change} {getattr(server, change)}"
    # It would take running pods for partly created ones and end them.
    with (
        second(server, **{change: server.folder / "other"}),
        pytest.raises(AssertionError, match=words),
    ):
        server.start()
    server.start()
    assert server.output(container, "echo", "fine") == "fine\n"
    server.remove_pod(pod)
    server.stop()
    with second(server, **{change: server.folder / "other"}):  # no process uses it any more
        server.start()
        server.stop()
    if change == "state":
        assert not list((server.state / "sandboxes").iterdir())
    server.start()


def test_other_users_cannot_hold_a_lock(server: Server) -> None:
    for folder, mode in ((server.root, 0o700), (server.state, 0o711)):
        assert stat.S_IMODE((folder / "server.lock").stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == mode
    server.stop()
    (server.state / "server.lock").chmod(0o644)
    server.start()
    os.chmod(server.folder, 0o711)
    lock = ["flock", "-n", str(server.state / "server.lock"), "true"]
    result = subprocess.run(
        lock, user=65534, group=65534, extra_groups=[], capture_output=True, check=False
    )
    assert result.returncode != 0 and b"Permission denied" in result.stderr


VERBS = {
    "run_sandbox": "run",
    "create_container": "create",
    "start_container": "start",
    "update_container": "update",
    "stop_sandbox": "stop_pod",
    "remove_sandbox": "remove_pod",
    "remove_container": "remove",
}


def life(server: Server, config: api.PodSandboxConfig) -> None:
    """Run a pod from creation to removal, with every verb."""
    pod = server.run_pod(config)
    container = server.launch(pod)
    request = api.UpdateContainerResourcesRequest(container_id=container)
    request.linux.oom_score_adj = 500
    server.runtime.UpdateContainerResources(request, timeout=30)
    server.remove_container(container)
    server.launch(pod, named(server, "second", "sleep 3600"))
    server.stop_pod(pod)
    server.remove_pod(pod)


def nothing_left(server: Server) -> None:
    nothing_but_networks(server)
    assert not list(server.names.glob("*")), "names of network namespaces are left"
    assert f" {server.names}/" not in Path("/proc/self/mountinfo").read_text()


def nothing_but_networks(server: Server) -> None:
    """Check that no record, folder or cgroup is left. Names of network namespaces may remain."""
    # DEL needs the names until the plugin releases the networks.
    assert not server.pods() and not server.containers()
    for folder in (
        server.state / "sandboxes",
        server.state / "containers",
        server.root / "containers",
        server.root / "sandboxes",
    ):
        assert not list(folder.iterdir()), folder
    groups = (
        Path("/sys/fs/cgroup/unified")
        if Path("/sys/fs/cgroup/unified").is_dir()
        else Path("/sys/fs/cgroup")
    )
    assert not list((groups / server.folder.name).glob("*/")), "cgroups are left"


def test_the_list_of_verbs_is_complete() -> None:
    assert {point.partition(".")[0] for point in all_points()} == set(VERBS)


def points_of(verb: str) -> list[str]:
    return [point for point in all_points() if point.startswith(f"{verb}.")]


@pytest.mark.requirement("11.7")
@pytest.mark.timeout(600)  # six starts of a server for each step: half a minute on a quiet machine
@pytest.mark.parametrize("verb", VERBS)
def test_a_restarted_server_finishes_or_undoes_any_interrupted_step(
    server: Server, verb: str
) -> None:
    for point in points_of(verb):
        print(point)
        server.stop()
        server.start(**{FAILPOINT: f"{point}=kill"})
        config = server.pod_config("victim")
        with pytest.raises(grpc.RpcError):
            life(server, config)
        assert server.wait() == -signal.SIGKILL
        server.start()
        assert all(c.state != api.CONTAINER_UNKNOWN for c in server.containers())
        for pod in server.pods():
            if pod.state == api.SANDBOX_READY:
                assert server.run_pod(config) == pod.id
        server.remove_all()
        nothing_left(server)
        life(server, server.pod_config("victim"))
        nothing_left(server)


@pytest.mark.requirement("2.2", "3.1.12", "3.3.3")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", VERBS)
def test_a_failure_after_any_step_is_undone(server: Server, verb: str) -> None:
    for point in points_of(verb):
        print(point)
        server.stop()
        server.start(**{FAILPOINT: f"{point}=1*error"})
        config = server.pod_config("victim")
        assert code_of(lambda config=config: life(server, config)) == grpc.StatusCode.INTERNAL  # type: ignore[misc]
        if verb == "run_sandbox":
            nothing_left(server)
        if verb == "create_container":
            assert not server.containers()
        server.remove_all()
        nothing_left(server)
        life(server, server.pod_config("victim"))
        nothing_left(server)


def test_a_container_whose_pod_is_stopped_during_its_creation_is_undone(server: Server) -> None:
    server.stop()
    server.start(**{FAILPOINT: "create_container.launch=1*delay(1500)"})
    config = server.pod_config("victim")
    pod = server.run_pod(config)
    request = api.CreateContainerRequest(
        pod_sandbox_id=pod, config=server.container_config(), sandbox_config=config
    )
    creating = server.runtime.CreateContainer.future(request, timeout=30)
    time.sleep(0.5)
    server.stop_pod(pod)
    with pytest.raises(grpc.RpcError) as raised:
        creating.result()
    assert "was stopped while the container was created" in raised.value.details()
    assert not server.containers()
    assert os.listdir(server.root / "containers") == os.listdir(server.state / "containers") == []
    server.remove_pod(pod)
    nothing_left(server)


@pytest.mark.requirement("1.5", "3.1.13")
def test_a_caller_that_hangs_up_gets_the_result_on_its_next_try(server: Server) -> None:
    server.stop()
    server.start(
        **{FAILPOINT: "run_sandbox.network=1*delay(1000),create_container.spec=1*delay(1000)"}
    )
    config = server.pod_config("slow")
    request = api.RunPodSandboxRequest(config=config)
    assert (
        code_of(lambda: server.runtime.RunPodSandbox(request, timeout=0.3))
        == grpc.StatusCode.DEADLINE_EXCEEDED
    )
    pod = server.run_pod(config)
    assert [p.id for p in server.pods()] == [pod]
    container = api.CreateContainerRequest(pod_sandbox_id=pod, config=server.container_config())
    assert (
        code_of(lambda: server.runtime.CreateContainer(container, timeout=0.3))
        == grpc.StatusCode.DEADLINE_EXCEEDED
    )
    identifier = server.create(pod)
    assert [c.id for c in server.containers()] == [identifier]


@pytest.mark.requirement("1.5", "1.7")
def test_callers_may_hang_up_at_any_moment(server: Server) -> None:
    """If calls are cancelled after 1 to 40 ms and repeated at once, each caller gets one pod and
    one container, and nothing is left."""

    def impatient(number: int) -> tuple[str, str]:
        config = server.pod_config(f"hasty{number}")
        timeout_s = 0.001 * (1 + number)
        with contextlib.suppress(grpc.RpcError):
            server.runtime.RunPodSandbox(api.RunPodSandboxRequest(config=config), timeout=timeout_s)
        pod = server.run_pod(config)
        request = api.CreateContainerRequest(pod_sandbox_id=pod, config=server.container_config())
        with contextlib.suppress(grpc.RpcError):
            server.runtime.CreateContainer(request, timeout=timeout_s / 4)
        container = server.create(pod)
        start = api.StartContainerRequest(container_id=container)
        with contextlib.suppress(grpc.RpcError):
            server.runtime.StartContainer(start, timeout=timeout_s)
        with contextlib.suppress(grpc.RpcError):
            server.start_container(container)  # the container may run already
        assert server.status(container).state == api.CONTAINER_RUNNING
        for stop in (server.runtime.StopPodSandbox, server.runtime.RemovePodSandbox):
            request = (
                api.StopPodSandboxRequest
                if stop is server.runtime.StopPodSandbox
                else api.RemovePodSandboxRequest
            )
            with contextlib.suppress(grpc.RpcError):
                stop(request(pod_sandbox_id=pod), timeout=timeout_s / 2)
        server.remove_pod(pod)
        return pod, container

    with ThreadPoolExecutor(4) as pool:
        pods = list(pool.map(impatient, range(40)))
    assert len({pod for pod, _ in pods}) == 40
    nothing_left(server)


@pytest.mark.parametrize("how", [Server.kill, Server.stop])
def test_a_server_that_ends_under_load_recovers(
    server: Server, how: Callable[[Server], object]
) -> None:
    def one(number: int) -> None:
        try:
            pod = server.run_pod(server.pod_config(f"load{number}"))
            server.launch(pod)
            server.remove_pod(pod)
        except grpc.RpcError:
            pass

    for delay_s in (0.05, 0.15, 0.3):
        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(one, int(delay_s * 1000) + n) for n in range(6)]
            time.sleep(delay_s)
            how(server)
            for future in futures:
                future.result()
        server.start()
        server.remove_all()
        nothing_left(server)


def pid_of(server: Server, container: str) -> int:
    return int(
        json.loads((server.state / "containers" / container / "state.json").read_text())["pid"]
    )


def shim_pid(server: Server, pod: str) -> int:
    return int(json.loads((server.state / "sandboxes" / pod / "shim.json").read_text())["pid"])


def kill_group(server: Server) -> None:
    """Kill the processes in the server's cgroup, which a reboot would have ended."""
    for root in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        group = root / server.folder.name
        if (group / "cgroup.kill").exists():
            (group / "cgroup.kill").write_text("1")
            for child in group.glob("*/"):
                assert wait_until(lambda child=child: _removed(child), 60)  # type: ignore[misc]


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return not group.exists()
    return True


def test_the_error_names_a_full_folder() -> None:
    """Calls fail with RESOURCE_EXHAUSTED if the state's tmpfs or the file system of the network's
    records is full, although the disk is not."""
    with Server() as server:
        server.load_image()
        pod = server.run_pod()
        for folder, call in (
            (server.state / "containers", lambda: server.create(pod)),
            (server.state / "sandboxes", server.run_pod),
            (server.root / "network", server.run_pod),
        ):
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "full", folder], check=True
            )
            try:
                assert code_of(call) == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert f"no inodes left on the file system of {folder}/" in message_of(call)
            finally:
                subprocess.run(["umount", folder], check=True)
            assert call()


def test_a_full_disk_prevents_no_removal() -> None:
    with Server(disk_bytes=16 << 20) as server:
        server.load_image()
        pod, other = server.run_pod(), server.run_pod()
        container = server.launch(pod)
        filler = server.root / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"\0" * 4096)
        for call in (lambda: server.create(other), server.run_pod):
            assert code_of(call) == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"no space left on the file system of {server.root}/" in message_of(call)
        assert server.output(container, "echo", "alive") == "alive\n"
        code = code_of(lambda: server.exec(container, "head", "-c", "1000000", "/dev/zero"))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(server.pods()) == 2 and len(server.containers()) == 1
        server.stop_container(container)
        server.remove_container(container)
        server.stop_pod(pod)
        server.remove_pod(pod)
        server.restart()
        assert [p.id for p in server.pods()] == [other]
        filler.unlink()
        server.launch(other)
        server.remove_all()
        nothing_left(server)
