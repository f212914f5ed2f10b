"""Tests callers with few or no descriptors, an odd umask, ignored signals or threads, many callers
at once, and callers that are killed during a start."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pyrunc.compile.container import CreateRequest
from pyrunc.container.create import create
from pyrunc.errors import KernelError
from pyrunc.launch import steps
from pyrunc.launch.run import ChildProcess, ParentSide
from pyrunc.plan import model
from tests.kernel.box import Box, finish
from tests.support.processes import wait_until


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a fork; returns its exit code, 1 with a trace on stderr when it raised."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_container_starts_under_a_low_limit_of_open_files(box: Box) -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        assert box.outcome("sh", "-c", "ulimit -n") == (0, "64\n")

    assert in_child(work) == 0


def test_a_container_starts_without_stdio_of_the_caller(box: Box, tmp_path: Path) -> None:
    """A container starts although its caller has closed the descriptors 0, 1 and 2, so that
    descriptors of the runtime get these numbers."""

    def work() -> None:
        for number in (0, 1, 2):
            os.close(number)
        null = os.open("/dev/null", os.O_RDWR)  # 0
        out = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)  # 1
        assert (null, out) == (0, 1)
        created = create(
            box.request("sh", "-c", "ls /proc/self/fd; echo done", stdio=(null, out, out))
        )
        assert finish(created) == 0

    assert in_child(work) == 0
    assert (tmp_path / "out").read_text().split() == ["0", "1", "2", "3", "done"]


def test_a_container_does_not_inherit_umask_nice_value_and_signals(box: Box) -> None:
    def work() -> None:
        os.umask(0o777)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
        code, text = box.outcome("grep", "-e", "Sig[BI]", "-e", "Umask", "/proc/self/status")
        assert code == 0
        assert text.split() == ["Umask:", "0022", "SigBlk:", "0" * 16, "SigIgn:", "0" * 16]
        assert box.run("stat -c %a /dev/null /dev /sys /dev/pts").split() == [
            "666",
            "755",
            "555",
            "755",
        ]

    assert in_child(work) == 0


def test_a_container_starts_from_a_deleted_working_directory(box: Box, tmp_path: Path) -> None:
    def work() -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        assert box.run("pwd") == "/\n"

    assert in_child(work) == 0


def test_a_container_starts_from_a_thread_beside_others(box: Box) -> None:
    """A container starts from any thread, whatever other threads run."""
    outputs: list[str] = []
    stop = threading.Event()
    noise = [threading.Thread(target=lambda: stop.wait(30)) for _ in range(8)]
    for thread in noise:
        thread.start()
    starter = threading.Thread(target=lambda: outputs.append(box.run("sleep 0.2; echo alive")))
    # The launcher is spawned, never forked from Python.
    starter.start()
    starter.join()
    stop.set()
    for thread in noise:
        thread.join()
    assert outputs == ["alive\n"]


def test_a_container_survives_the_thread_that_started_the_container(box: Box) -> None:
    pids = []
    null = os.open("/dev/null", os.O_RDWR)
    thread = threading.Thread(
        target=lambda: pids.append(create(box.request("sleep", "1000", stdio=(null, null, null))))
    )
    thread.start()
    thread.join()
    os.close(null)
    time.sleep(0.05)
    assert os.waitid(os.P_PIDFD, pids[0].pidfd, os.WEXITED | os.WNOHANG) is None
    os.kill(pids[0].pid, 9)
    assert finish(pids[0]) == 137


def test_many_containers_start_at_once(tmp_path: Path) -> None:
    pids = []
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                box = Box(folder)
                for _ in range(4):
                    assert box.run("echo $$; ls /dev | wc -l").split()[0] == "1"
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 12


def with_step_at(box: Box, point: str) -> CreateRequest:
    """Return a request for a container. During its start, the parent does a step of the kind
    STEPS[point] at the sync point `point`."""
    box.config["root"]["path"] = str(box.image)
    if point == "before-identity":
        identical = [{"containerID": 0, "hostID": 0, "size": 65536}]
        box.linux["namespaces"].append({"type": "user"})
        box.linux.update(uidMappings=identical, gidMappings=identical)
        box.process["rlimits"] = [{"type": "RLIMIT_CORE", "soft": 0, "hard": 0}]
    elif point != "cloned":
        kind = "createRuntime" if point == "mounted" else "createContainer"
        box.config["hooks"] = {kind: [{"path": "/bin/true"}]}
    return box.request("true", record=(lambda process: None) if point == "cloned" else None)


STEPS = {
    "cloned": model.RecordProcess,
    "mounted": model.RunHooks,
    "before-pivot": model.RunHooks,
    "before-identity": model.SetLimits,
}


@pytest.mark.parametrize("point", STEPS)
def test_a_process_ends_when_its_caller_dies_during_the_start(
    box: Box, tmp_path: Path, point: str
) -> None:
    """When the runtime is killed while the container's process waits at a sync point, the process
    exits."""
    reading, writing = os.pipe()

    def work() -> None:
        perform = steps.perform

        def die(step: model.ParentStep, process: ChildProcess, parent: ParentSide) -> None:
            if not isinstance(step, STEPS[point]):
                return perform(step, process, parent)
            os.write(writing, str(process.pid).encode())
            # The waiting process then reads the end of the socket.
            os.kill(os.getpid(), signal.SIGKILL)

        steps.perform = die  # in this child alone
        create(with_step_at(box, point).replace(cgroup=None))

    assert in_child(work) == -9
    os.close(writing)
    pid = int(os.read(reading, 20))
    os.close(reading)
    assert wait_until(lambda: not _runs(pid), 30, 0.01), f"process {pid} lives on"


def _runs(pid: int) -> bool:
    """Tell whether a process runs: not when it is a zombie that its new parent has not reaped."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("point", STEPS)
def test_a_step_that_fails_undoes_all(
    box: Box, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    perform = steps.perform

    def fail(step: model.ParentStep, process: ChildProcess, parent: ParentSide) -> None:
        if not isinstance(step, STEPS[point]):
            return perform(step, process, parent)
        raise KernelError("step", "of the parent", errno.EIO)

    request = with_step_at(box, point)
    monkeypatch.setattr(steps, "perform", fail)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(KernelError, match=r"step of the parent: EIO \(plan line \d+\.1\)"):
        create(request)
    assert set(os.listdir("/proc/self/fd")) == before
    from pyrunc.cgroups.naming import place

    assert not place("", request.id, "cgroupfs").exists()


def test_a_large_specification_is_accepted(box: Box) -> None:
    """A specification with hundreds of mounts and a megabyte of environment is accepted: the
    runtime does not limit them."""
    (box.image / "data").mkdir()
    for number in range(300):
        box.bind(box.image / "data", f"/many/{number:03}", "rbind", "rprivate")
    box.process["env"] = ["PATH=/bin", *(f"V{n}={'x' * 1000}" for n in range(1000))]
    assert box.run("ls /many | wc -l; env | wc -c").split()[0] == "300"


def test_a_container_can_share_our_mount_namespace(box: Box) -> None:
    box.linux.update(
        namespaces=[{"type": "pid"}, {"type": "uts"}], maskedPaths=[], readonlyPaths=[]
    )
    box.config["mounts"] = []
    code, text = box.outcome("sh", "-c", "ls /; pwd", overlay=False)
    assert code == 0
    assert text.split()[-1] == "/"
    assert "home" in text


def test_root_of_a_user_namespace_can_start_a_container(box: Box, tmp_path: Path) -> None:
    """The runtime can start a container as root of a user namespace, in a new mount namespace:
    podman without privileges calls it in this way."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.kernel.box import Box\n"
        "box = Box(Path(sys.argv[1]))\n"
        "text = box.run('id -u; cat /proc/self/setgroups; echo > /dev/null; touch /x; ls /proc | "
        "grep -c cpuinfo',"
        " cgroup=None, overlay=False)\n"
        "assert text.split() == ['0', 'deny', '1'], text\n"
        "box.process['user'] = {'additionalGids': [5]}\n"
        "try:\n"
        "    box.run('true', cgroup=None, overlay=False)\n"
        "except Exception as error:\n"
        "    assert 'additionalGids' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('groups were ignored')\n"
    )
    inner = tmp_path / "inner"
    inner.mkdir()
    config = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        sys.executable,
        "-c",
        script,
        str(inner),
    ]
    done = subprocess.run(config, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
