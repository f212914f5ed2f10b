"""Runs real containers from a busybox root: `Box` makes the bundle, starts containers for a test,
and removes everything."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pyrunc.compile.container import CreateRequest
from pyrunc.compile.exec import ExecRequest, merged
from pyrunc.compile.requests import CgroupChoice, Overlay, PauseRequest
from pyrunc.compile.sources import Directory
from pyrunc.container.create import create
from pyrunc.container.exec import execute
from pyrunc.container.process import ContainerProcess
from pyrunc.spec.check import check
from pyrunc.spec.default import default
from pyrunc.spec.parse import parse
from tests.kernel.pause_process import PauseProcess, hold
from tests.support import session

T = TypeVar("T")

APPLETS = [
    "sh",
    "cat",
    "ls",
    "id",
    "true",
    "false",
    "mount",
    "umount",
    "stat",
    "touch",
    "sleep",
    "grep",
    "hostname",
    "readlink",
    "echo",
    "mkdir",
    "rm",
    "ln",
    "chmod",
    "env",
    "tty",
    "stty",
    "ps",
    "kill",
    "head",
    "wc",
    "ulimit",
    "setsid",
    "test",
    "nice",
    "ip",
    "dnsdomainname",
    "nsenter",
    "umask",
    "cut",
    "tr",
    "sort",
    "sysctl",
    "mknod",
    "dd",
    "renice",
]
PASSWD = "root:x:0:0:root:/root:/bin/sh\nweb:x:1000:1000:web:/home/web:/bin/sh\n"


class Box:
    """A bundle with an overlay root whose lower layer is `image`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.image = folder, folder / "image"
        for name in ("bin", "proc", "dev", "sys", "etc", "tmp", "root", "home/web", "var", "run"):
            (self.image / name).mkdir(parents=True)
        shutil.copy("/bin/busybox", self.image / "bin/busybox")
        for applet in APPLETS:
            (self.image / "bin" / applet).symlink_to("busybox")
        (self.image / "etc/passwd").write_text(PASSWD)
        os.chmod(self.image / "tmp", 0o1777)
        self.config = default()
        process = self.config["process"]
        process["terminal"] = False
        process["rlimits"] = []
        process["capabilities"] = None
        process["noNewPrivileges"] = False
        self.config["root"]["readonly"] = False
        self.mount_fds: dict[str, int] = {}
        self.count = 0

    @property
    def process(self) -> dict[str, Any]:
        process: dict[str, Any] = self.config["process"]
        return process

    @property
    def linux(self) -> dict[str, Any]:
        linux: dict[str, Any] = self.config["linux"]
        return linux

    def add_mount(
        self, destination: str, source: str = "", *options: str, kind: str = "bind"
    ) -> None:
        self.config["mounts"].append(
            {"destination": destination, "type": kind, "source": source, "options": list(options)}
        )

    def bind(self, source: Path, destination: str, *options: str) -> None:
        self.add_mount(destination, str(source), *(options or ("rbind",)))

    def request(
        self, *args: str, overlay: bool = True, stdio: tuple[int, int, int] = (0, 1, 2), **more: Any
    ) -> CreateRequest:
        """Return a request for the current configuration with these arguments."""
        config = copy.deepcopy(self.config)
        if args:
            config["process"]["args"] = list(args)
        spec = parse(config)
        check(spec)
        self.count += 1
        self.upper, work = self.folder / f"upper{self.count}", self.folder / f"work{self.count}"
        self.upper.mkdir()
        work.mkdir()
        rootfs = (
            Overlay((str(self.image),), str(self.upper), str(work), True)
            if overlay
            else Directory(str(self.image))
        )
        name = f"{session.name('t')}-{self.folder.name}-{self.count}"
        more.setdefault("cgroup", CgroupChoice(missing_controllers="warn"))
        return CreateRequest(
            name, str(self.folder), spec, rootfs, stdio, mount_fds=self.mount_fds, **more
        )

    def run(self, script: str, **more: Any) -> str:
        """Return the output of `sh -c script` in a container, stderr included; the exit code
        must be 0."""
        code, text = self.outcome("sh", "-c", script, **more)
        assert code == 0, f"exit code {code}: {text}"
        return text

    def outcome(self, *args: str, **more: Any) -> tuple[int, str]:
        """Return exit code (128 + signal) and output of a container that runs to its end."""
        created, output = _with_output(
            lambda stdio: create(self.request(*args, stdio=stdio, **more))
        )
        return finish(created), output

    @contextmanager
    def running(self, *args: str, **more: Any) -> Iterator[tuple[ContainerProcess, CreateRequest]]:
        """Run a container during the block."""
        null = os.open("/dev/null", os.O_RDWR)
        try:
            request = self.request(*(args or ("sleep", "1000")), stdio=(null, null, null), **more)
            created = create(request)
        finally:
            os.close(null)
        try:
            yield created, request
        finally:
            if created.console_fd is not None:
                os.close(created.console_fd)
            try:
                os.kill(created.pid, 9)
            except ProcessLookupError:
                pass
            finish(created)

    def execute(
        self,
        created: ContainerProcess,
        request: CreateRequest,
        script: str,
        process_object: dict[str, Any] | None = None,
    ) -> str:
        """Return the output of `sh -c script` as another process of the container; the exit code
        must be 0."""
        process = merged(request.spec, {"args": ["sh", "-c", script], **(process_object or {})})
        done, output = _with_output(
            lambda stdio: execute(
                ExecRequest(
                    created.pid, created.pidfd, request.spec, process, stdio, created.cgroup
                )
            )
        )
        code = reap(done)
        assert code == 0, f"exit code {code}: {output}"
        return output


def _with_output(start: Callable[[tuple[int, int, int]], T]) -> tuple[T, str]:
    """Start a process with /dev/null and a pipe as stdio; return it and its whole output."""
    reading, writing = os.pipe()
    null = os.open("/dev/null", os.O_RDONLY)
    try:
        process = start((null, writing, writing))
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
        os.close(null)
    with open(reading, "rb") as file:
        return process, file.read().decode("utf-8", "replace")


@contextmanager
def started_pause(box: Box) -> Iterator[dict[str, str]]:
    """Start a pause process in whose mount namespace the box's mounts are attached. Yield the
    fields that a container's request needs on kernels that cannot clone detached mounts."""
    pod = hold(
        f"{session.name('h')}-{box.folder.name}",
        PauseRequest({"ipc": "new"}, CgroupChoice(missing_controllers="warn")),
        mounts={f"/{name}": number for name, number in box.mount_fds.items()},
    )
    try:
        yield {"mount_namespace": f"/proc/{pod.pid}/ns/mnt"}
    finally:
        release(pod)


def release(pod: PauseProcess) -> None:
    """End a pause process and remove its cgroup."""
    os.kill(pod.pid, 9)
    reap(pod)
    assert pod.cgroup is not None
    pod.cgroup.remove()


def reap(process: ContainerProcess | PauseProcess) -> int:
    """Wait for the process and close its descriptor; return the exit code, or 128 + signal."""
    result = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED)
    os.close(process.pidfd)
    assert result is not None
    return result.si_status if result.si_code == os.CLD_EXITED else 128 + result.si_status


def finish(created: ContainerProcess) -> int:
    """Call `reap`, and remove the cgroup."""
    code = reap(created)
    if created.cgroup is not None:
        created.cgroup.kill()
        created.cgroup.remove()
    return code


def mounts(mountinfo: str) -> dict[str, tuple[str, str, str]]:
    """Return a dict: mount point -> (options, type, propagation fields); of mounts on top of each
    other only the topmost."""
    by_path = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        by_path[fields[4]] = (fields[5], right.split()[0], " ".join(fields[6:]))
    return by_path
