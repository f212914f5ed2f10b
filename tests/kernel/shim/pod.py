"""A shim with its folders for one test: starts containers, reads logs and records, and takes
everything down again.

With `library` containers are real (a busybox root, namespaces, overlay); without, `process.args`
run on the host in their own cgroup, which is enough for everything that the shim does by
itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cri_server.pod.client import ExecSession, Exit, ShimClient, start_shim
from cri_server.zygote.client import Zygote
from pyrunc.cgroups.group import Cgroup
from pyrunc.errors import Error
from pyrunc.kernel.cgroup import root as cgroup_root
from pyrunc.shim import messages, tree
from pyrunc.spec.default import default
from tests.support import session
from tests.support.zygotes import start_zygote

TIMEOUT_S = 30.0  # for what takes milliseconds when the machine has nothing else to do
DIRECT = "tests.kernel.shim.starter:DirectStarter"
BUSYBOX = Path("/usr/bin/busybox")
APPLETS = (
    "sh",
    "sleep",
    "cat",
    "echo",
    "stty",
    "tty",
    "id",
    "ps",
    "true",
    "false",
    "head",
    "ls",
    "hostname",
    "setsid",
)
RECORD = re.compile(rb"\S+ (stdout|stderr) ([FP]) (.*)", re.DOTALL)


class TestPod:
    __test__ = False

    def __init__(
        self,
        folder: Path,
        *,
        library: bool = False,
        zygote: Zygote | None = None,
        network: bool = False,
    ) -> None:
        """`zygote` is closed by the caller; without one, the pod starts its own. With `network` the
        shim makes the pod's network namespace."""
        self.folder, self.library = folder, library
        self.starter = None if library else DIRECT
        self.network = network
        self.sandbox = folder / "sandbox"
        self.containers = folder / "containers"
        self.logs = folder / "logs"
        self.events: list[messages.Event] = []
        self.closed = 0
        self.pid = 0
        self.netns_path: str | None = None
        self.group = f"/{session.name('shim')}-{time.monotonic_ns()}"
        self._client: ShimClient | None = None
        self._shim: ShimClient | None = None
        self._zygote, self._given_zygote = zygote, zygote is not None
        self.shim = folder / "shim"
        for path in (self.sandbox, self.containers, self.shim):
            path.mkdir(parents=True)

    @property
    def client(self) -> ShimClient:
        assert self._client
        return self._client

    @property
    def shim_client(self) -> ShimClient:
        assert self._shim
        return self._shim

    @property
    def zygote(self) -> Zygote:
        assert self._zygote
        return self._zygote

    async def __aenter__(self) -> TestPod:
        if self._zygote is None:
            starter = [] if self.library else [DIRECT.partition(":")[0]]
            self._zygote = await start_zygote(["pyrunc.shim.main", *starter])
        self.pid, self._shim = await start_shim(self._zygote, self.shim, starter=self.starter)
        self.netns_path = await self._shim.take_pod(
            self.sandbox, self.containers, network=self.network
        )
        self._client = await self.connect()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.clean_up()

    async def connect(self) -> ShimClient:
        client = await ShimClient.connect(self.sandbox, on_event=self.events.append)
        client.on_close = self._on_close
        return client

    async def close_zygote(self) -> None:
        if self._zygote and not self._given_zygote:
            await self._zygote.close()
            self._zygote = None

    def container(self, name: str, *args: str, **launch: Any) -> None:
        """Write the files of a container that runs `args`; a single argument is a shell script."""
        directory = self.containers / name
        directory.mkdir()
        args = ("/bin/sh", "-c", args[0]) if len(args) == 1 else args
        config: dict[str, Any] = default() if self.library else {"process": {}, "linux": {}}
        config["process"] |= launch.pop("process", {}) | {
            "args": args,
            "terminal": bool(launch.get("tty")),
        }
        config["linux"] |= {"cgroupsPath": f"{self.group}/{name}"} | launch.pop("linux", {})
        launch = {
            "log_path": str(self.log_path(name)),
            "cgroup": {"missing_controllers": "warn"},
        } | launch
        if self.library:
            config["root"] = {"path": "rootfs"}
            launch |= {"rootfs": self._overlay(name)}
        for file, content in (("config.json", config), ("launch.json", launch)):
            (directory / file).write_text(json.dumps({"version": 1, **content}))

    async def run(self, name: str, *args: str, **launch: Any) -> messages.ContainerStarted:
        """Start a container."""
        self.container(name, *args, **launch)
        return await self.start(name)

    async def start(self, name: str, client: ShimClient | None = None) -> messages.ContainerStarted:
        """Create and start a container whose files are written."""
        client = client or self.client
        await client.create_container(messages.CreateContainer(name))
        return await client.start_container(name)

    async def start_pause(self) -> messages.PauseStarted:
        """Start the pause process that pause.json describes."""
        return await self.client.start_pause()

    async def exec(
        self, name: str, exec_id: str, process: dict[str, Any], tty: bool = False, **streams: bool
    ) -> ExecSession:
        """Run a process in a container."""
        streams = {"stdout": True, "stderr": True, **streams}
        return await self.client.exec(
            messages.StartExec(name, exec_id, process, tty=tty, **streams)
        )

    async def exited(self, name: str, timeout_s: float = TIMEOUT_S) -> Exit:
        """Wait for a container's exit event."""
        await until(lambda: self.exit_events(name), timeout_s)
        (event,) = self.exit_events(name)
        return event.replace(container=None)

    def exit_events(self, name: str) -> list[messages.Exit]:
        return [
            event
            for event in self.events
            if isinstance(event, messages.Exit) and event.container == name
        ]

    def exit_record(self, name: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.containers / name / "exit.json").read_text())
        return record

    def log_path(self, name: str) -> Path:
        return self.logs / name / "0.log"

    def logged(self, name: str, stream: str = "stdout") -> bytes:
        """Return the output of the container as a reader of its log restores it."""
        return read_log(self.log_path(name), stream)

    def cgroup(self, name: str) -> Path:
        return Path(cgroup_root() + self.group) / name

    def shim_log(self) -> str:
        return (self.shim / "shim.log").read_text()

    def processes(self) -> list[int]:
        """Return the pids of all processes in the pod's cgroups."""
        return Cgroup(self.group).processes()

    async def clean_up(self) -> None:
        """Kills the shim if it still runs, then all processes in its cgroups."""
        for client in (self._client, self._shim):
            if client:
                client.close()
        await self.close_zygote()
        if self.pid and not gone(self.pid):
            with contextlib.suppress(ProcessLookupError):  # it may be leaving by itself
                os.kill(self.pid, signal.SIGKILL)
        group = Cgroup(self.group)
        if group.exists():
            group.kill()
            try:
                group.remove(TIMEOUT_S)
            except Error:
                print("left in the cgroup:", group.processes())
                raise
        shutil.rmtree(self.folder, ignore_errors=True)

    def _overlay(self, name: str) -> dict[str, Any]:
        lower = self.folder / "lower"
        if not lower.exists():
            for part in ("bin", "proc", "dev", "sys", "tmp", "etc"):
                (lower / part).mkdir(parents=True)
            shutil.copy(BUSYBOX, lower / "bin" / "busybox")
            for applet in APPLETS:
                (lower / "bin" / applet).symlink_to("busybox")
        for part in ("upper", "work"):
            (self.folder / "overlay" / name / part).mkdir(parents=True)
        overlay = self.folder / "overlay" / name
        return {
            "lower": [str(lower)],
            "upper": str(overlay / "upper"),
            "work": str(overlay / "work"),
            "volatile": True,
        }

    def _on_close(self) -> None:
        self.closed += 1


def read_log(path: Path, stream: str = "stdout") -> bytes:
    """Returns the bytes of one stream; fails on an incomplete record."""
    content = path.read_bytes()
    if not content:
        return b""
    assert content.endswith(b"\n")
    lines = []
    for line in content[:-1].split(b"\n"):
        match = RECORD.fullmatch(line)
        assert match, line[:200]
        if match[1].decode() == stream:
            lines.append(match[3] + (b"\n" if match[2] == b"F" else b""))
    return b"".join(lines)


async def until(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> None:
    """Waits for a condition; fails after the timeout. A log may be read in the middle of a
    write(2), so an incomplete log does not count as a failure."""
    deadline = time.monotonic() + timeout_s
    while not _holds(condition):
        assert time.monotonic() < deadline, "it did not come to be"
        await asyncio.sleep(0.005)


def _holds(condition: Callable[[], Any]) -> bool:
    try:
        return bool(condition())
    except AssertionError:
        return False


def children(pid: int) -> list[int]:
    """Returns the living and dead children of a process with one thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid: int) -> str | None:
    """Returns the name of a process; None if it was reaped since it was listed (a read then fails
    with ESRCH, too)."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except (FileNotFoundError, ProcessLookupError):
        return None


def gone(pid: int) -> bool:
    """Returns whether a process has ended; an orphan may wait for the machine's process 1 to reap
    it."""
    fact = tree.stat(pid)
    return fact is None or not fact.alive


def descriptors(pid: int) -> set[str]:
    """Returns the numbers of the open descriptors of a process."""
    return set(os.listdir(f"/proc/{pid}/fd"))


async def settled(pod: TestPod, running: int = 0) -> set[str]:
    """Waits until a shim has only `running` children left and has handled the exits of the others;
    returns its descriptors."""
    await until(lambda: len(children(pod.pid)) == running)
    await pod.client.state()
    return descriptors(pod.pid)


async def open_gate(path: Path) -> None:
    """Opens the named pipe at which a process waits (see starter.py); returns when the process has
    continued."""
    os.close(await asyncio.to_thread(os.open, path, os.O_WRONLY))


async def read_all(fd: int, timeout_s: float = TIMEOUT_S) -> bytes:
    """Returns all bytes up to the end of a pipe or terminal."""
    data = b""
    while part := await read_some(fd, timeout_s):
        data += part
    return data


async def read_some(fd: int, timeout_s: float = TIMEOUT_S) -> bytes:
    """Returns the next bytes; empty at the end."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await asyncio.wait_for(ready.wait(), timeout_s)
    finally:
        loop.remove_reader(fd)
    try:
        return os.read(fd, 65536)
    except OSError:  # EIO: the terminal's last user has gone
        return b""
