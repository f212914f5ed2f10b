"""Provides `Server`: a real server in its own network namespace, with its own folders and with
methods for CRI calls.

The server is a child process of the test; `kill` ends it like a crash, `start` starts it again on
the same folders.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.api import api_pb2_grpc
from cri_server.images.archives import build
from cri_server.network.names import remove as remove_name
from cri_server.pod.orphans import kill_process
from cri_server.rpc import private
from cri_server.store.facts import ProcessIdentity
from pyrunc.kernel.process import stat
from pyrunc.zygote.descendants import below
from tests.support import session
from tests.support.keeper import end_keeper, keeper_pid
from tests.support.processes import comm, wait_until
from tests.support.service_manager import ServiceManager

REPOSITORY = Path(__file__).parents[2]
IMAGE = "registry.test/busybox:1"
START_TIMEOUT_S = 300.0  # an emulated machine reads its files for the first time
RPC_TIMEOUT_S = 60.0
CONFLIST = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": "10.88.0.0/16"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


class Server:
    """Runs `pyrunc-cri serve` with throwaway folders; a context manager that removes all pods at
    its end."""

    def __init__(
        self,
        *,
        network: bool = True,
        settings: dict[str, dict[str, Any]] | None = None,
        disk_bytes: int = 0,
        prefix: Sequence[str] = (),
        mount: Sequence[str] = (),
        manager: ServiceManager | None = None,
        module: str = "cri_server.cli.main",
    ) -> None:
        """Make the folders and start the server.

        - `mount`: mount(8)'s arguments for the root directory
        - `disk_bytes`: the size of a tmpfs to mount at the root directory
        - `prefix`: words put before the server's command line, such as a wrapper and its arguments
        - `manager`: the service manager that gets the server's notifications and stores its
          descriptors
        - `module`: the server's module
        """
        self.folder = Path(tempfile.mkdtemp(prefix=f"{session.name('pyrunc')}-", dir="/tmp"))
        self.root, self.state = self.folder / "root", self.folder / "state"
        self.logs = self.folder / "logs"
        self.names = self.folder / "netns"
        self.socket = self.folder / "cri.sock"
        self.log = self.folder / "server.log"
        self._prefix, self.module = prefix, module
        self._manager = manager
        self._network, self._settings = network, settings or {}
        self._mount = tuple(mount)
        if disk_bytes:
            self._mount = ("-t", "tmpfs", "-o", f"size={disk_bytes}", "disk")
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.Channel | None = None
        self._pods = 0
        self.runtime: Any = None
        self.image: Any = None

    def __enter__(self) -> Server:
        self.logs.mkdir()
        if self._mount:
            self.root.mkdir()
            subprocess.run(["mount", *self._mount, self.root], check=True)
        (self.folder / "net.d").mkdir()
        if self._network:
            conflist = json.loads(json.dumps(CONFLIST))
            conflist["plugins"][0]["ipam"]["dataDir"] = str(self.folder / "leases")
            (self.folder / "net.d" / "10-pods.conflist").write_text(json.dumps(conflist))
        self._write_config()
        self._netns = subprocess.Popen(
            ["unshare", "-n", "sh", "-c", "ip link set lo up && echo ready && exec sleep infinity"],
            stdout=subprocess.PIPE,
        )
        assert self._netns.stdout is not None and self._netns.stdout.readline() == b"ready\n"
        try:
            self.start()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _write_config(self) -> None:
        tables = {
            "cgroup": {
                "driver": "cgroupfs",
                "missing_controllers": "warn",
                "default_parent": f"/{self.folder.name}",
            },
            "images": {"store": os.environ.get("PYRUNC_TESTS_IMAGE_STORE", "auto")},
            **self._settings,
            "network": {"netns_dir": str(self.names), **self._settings.get("network", {})},
        }
        lines = []
        for table, values in tables.items():
            lines.append(f"[{table}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        (self.folder / "config.toml").write_text("\n".join(lines))

    def start(self, **environment: str) -> None:
        """Start the server and wait until it answers."""
        command = [
            *self.in_its_network(*self._prefix, sys.executable, "-m", self.module, "serve"),
            *("--config", str(self.folder / "config.toml")),
            *(
                "--listen",
                f"unix://{self.socket}",
                "--root",
                str(self.root),
                "--state",
                str(self.state),
            ),
            *(
                "--cni-conf-dir",
                str(self.folder / "net.d"),
                "--cni-bin-dir",
                str(self.folder / "bin"),
            ),
            *("--log-level", "info"),
        ]
        passed: Sequence[int] = ()
        if self._manager is not None:
            command, passed, more = self._manager.starting(command)
            environment |= more
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                pass_fds=passed,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        # Not by the channel: after a refused attempt it waits longer and longer.
        while not self._listens():
            self._expect_it_to_live(deadline)
            time.sleep(0.01)
        self._connect()
        while True:
            try:
                self.runtime.Version(api.VersionRequest(), timeout=5)
                return
            except grpc.RpcError:
                self._expect_it_to_live(deadline)
                time.sleep(0.05)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def _expect_it_to_live(self, deadline: float) -> None:
        assert self._process is not None
        if self._process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the server does not answer:\n{self.tail()}") from None

    def in_its_network(self, *command: str) -> list[str]:
        """Return the command line that runs `command` in the server's network namespace."""
        return ["nsenter", f"--net=/proc/{self._netns.pid}/ns/net", "--", *command]

    def _connect(self) -> None:
        self._disconnect()
        options = [
            ("grpc.max_receive_message_length", 16 << 20),
            ("grpc.initial_reconnect_backoff_ms", 100),
        ]
        self._channel = grpc.insecure_channel(f"unix://{self.socket}", options=options)
        self.runtime = api_pb2_grpc.RuntimeServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.image = api_pb2_grpc.ImageServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @property
    def channel(self) -> grpc.Channel:
        """Return the channel to the server, for calls that stubs would not send."""
        assert self._channel is not None
        return self._channel

    @property
    def pid(self) -> int:
        """Return the server's pid."""
        assert self._process is not None
        return self._process.pid  # nsenter has executed the server in its place

    def processes(self) -> set[int]:
        """Return the pids of all descendants of the server and of its keeper."""
        keeper = keeper_pid(self.state)
        # The keeper is the parent of the zygote.
        return below(self.pid) | (below(keeper) if keeper else set())

    def zygotes(self) -> list[int]:
        """Return the pids of the living zygotes."""
        parents: dict[int, int] = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                if comm(pid) == "pyrunc-zygote" and (process := stat(pid)) is not None:
                    parents[pid] = process.parent
        # A job that a zygote has forked has the zygote's name.
        return [pid for pid, parent in parents.items() if parent not in parents]

    def kill(self) -> None:
        """Kill the server with SIGKILL, like a crash."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait until the server has ended by itself; return its exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self) -> int:
        """End the server with SIGTERM; return its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(START_TIMEOUT_S)

    def restart(self, how: Callable[[Server], object] = kill) -> None:
        """End the server with `how` and start it again."""
        how(self)
        self.start()

    def tail(self, lines: int = 60) -> str:
        """Return the end of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if self._process is not None and self._process.poll() is None:
                self.remove_all()
                self.stop()
            if kind is not None:
                print(self.tail())
        finally:
            if self._process is not None and self._process.poll() is None:
                self.kill()
            self._disconnect()
            self._end_orphans()
            end_keeper(self.state)
            self._end_namespace()
            self._remove_cgroup()
            if self._mount:
                subprocess.run(["umount", self.root], check=True)
            while self.folder.exists():
                # processes that end with the server may be removing files, too
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(self.folder)

    def _end_namespace(self) -> None:
        self._netns.send_signal(signal.SIGKILL)
        self._netns.wait()
        assert self._netns.stdout is not None
        self._netns.stdout.close()

    def _end_orphans(self) -> None:
        """End the shims and pods of a server that died, so that a failed test does not make the
        next ones fail."""
        for folder in self.state.glob("sandboxes/*"):
            with contextlib.suppress(FileNotFoundError, ValueError):
                record = json.loads((folder / "shim.json").read_text())
                kill_process(ProcessIdentity(record["pid"], record["start_time"]))
        for name in self.names.glob("*"):
            remove_name(str(name))
        for group in self._cgroups():
            with contextlib.suppress(FileNotFoundError):
                (group / "cgroup.kill").write_text("1")
            for child in group.glob("*/"):
                wait_until(lambda child=child: _remove(child), 30)  # type: ignore[misc]

    def _cgroups(self) -> list[Path]:
        roots = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
        return [
            root / self.folder.name
            for root in roots
            if (root / self.folder.name / "cgroup.procs").exists()
        ]

    def _remove_cgroup(self) -> None:
        for group in Path("/sys/fs/cgroup").glob(f"*/{self.folder.name}"):
            # of v1: runc makes groups there, too, and leaves our parent group
            if group.parent.name != "unified":
                _remove(group)
        for group in self._cgroups():
            if not wait_until(lambda group=group: _remove(group), 30):  # type: ignore[misc]
                group.rmdir()

    def end_boot(self) -> None:
        """Kill all processes of the server and its pods and remove its state directory, like a
        power cut; the root directory stays."""
        self.kill()
        self._end_orphans()
        end_keeper(self.state)
        shutil.rmtree(self.state)

    # -- calls

    def load_image(self, content: bytes | None = None) -> str:
        """Load a docker-archive, by default busybox's, built from /bin/busybox; return the image's
        id."""
        archive = self.folder / "busybox.tar"
        archive.write_bytes(content or busybox_archive(IMAGE))
        assert self._channel is not None
        call = self._channel.unary_unary(
            private.path(private.LoadImage.call),
            request_serializer=private.encode,
            response_deserializer=private.decode,
        )
        (image,) = call({"path": str(archive)}, timeout=RPC_TIMEOUT_S)["images"]
        return str(image["id"])

    def pod_config(self, name: str = "", **changes: Any) -> api.PodSandboxConfig:
        """Return the configuration of a small pod; `changes` are fields of the message."""
        self._pods += 1
        name = name or f"pod{self._pods}"
        config = api.PodSandboxConfig(
            metadata=api.PodSandboxMetadata(name=name, uid=f"{name}-uid", namespace="default"),
            log_directory=str(self.logs / name),
            linux=api.LinuxPodSandboxConfig(),
        )
        config.linux.security_context.namespace_options.pid = api.CONTAINER
        config.MergeFrom(api.PodSandboxConfig(**changes))
        return config

    def run_pod(
        self, config: api.PodSandboxConfig | None = None, *, host_network: bool = False
    ) -> str:
        """Call RunPodSandbox; return the id."""
        config = config or self.pod_config()
        if host_network:
            config.linux.security_context.namespace_options.network = api.NODE
        request = api.RunPodSandboxRequest(config=config)
        return str(self.runtime.RunPodSandbox(request, timeout=RPC_TIMEOUT_S).pod_sandbox_id)

    def container_config(
        self, command: Iterable[str] = ("sleep", "3600"), **changes: Any
    ) -> api.ContainerConfig:
        """Return the configuration of a container of the busybox image; `changes` are fields of the
        message."""
        config = api.ContainerConfig(
            metadata=api.ContainerMetadata(name="c"),
            image=api.ImageSpec(image=IMAGE),
            command=list(command),
            log_path="c.log",
            linux=api.LinuxContainerConfig(),
        )
        config.linux.security_context.namespace_options.pid = api.CONTAINER
        config.MergeFrom(api.ContainerConfig(**changes))
        return config

    def create(self, pod: str, config: api.ContainerConfig | None = None) -> str:
        """Call CreateContainer; return the id. A container in a pod with host networking gets host
        networking, too."""
        config = config or self.container_config()
        sandbox = self.pod_status(pod)
        options = config.linux.security_context.namespace_options
        options.network = sandbox.linux.namespaces.options.network
        request = api.CreateContainerRequest(pod_sandbox_id=pod, config=config)
        return str(self.runtime.CreateContainer(request, timeout=RPC_TIMEOUT_S).container_id)

    def launch(self, pod: str, config: api.ContainerConfig | None = None) -> str:
        """Create and start a container; return its id."""
        container = self.create(pod, config)
        self.start_container(container)
        return container

    def start_container(self, container: str) -> None:
        self.runtime.StartContainer(
            api.StartContainerRequest(container_id=container), timeout=RPC_TIMEOUT_S
        )

    def stop_container(self, container: str, timeout_s: int = 0) -> None:
        request = api.StopContainerRequest(container_id=container, timeout=timeout_s)
        self.runtime.StopContainer(request, timeout=RPC_TIMEOUT_S + timeout_s)

    def remove_container(self, container: str) -> None:
        self.runtime.RemoveContainer(
            api.RemoveContainerRequest(container_id=container), timeout=RPC_TIMEOUT_S
        )

    def stop_pod(self, pod: str) -> None:
        self.runtime.StopPodSandbox(
            api.StopPodSandboxRequest(pod_sandbox_id=pod), timeout=RPC_TIMEOUT_S
        )

    def remove_pod(self, pod: str) -> None:
        self.runtime.RemovePodSandbox(
            api.RemovePodSandboxRequest(pod_sandbox_id=pod), timeout=RPC_TIMEOUT_S
        )

    def remove_all(self) -> None:
        """Stop and remove every pod."""
        for pod in self.pods():
            self.stop_pod(pod.id)
            self.remove_pod(pod.id)

    def pods(self, **filters: Any) -> list[api.PodSandbox]:
        request = api.ListPodSandboxRequest(filter=api.PodSandboxFilter(**filters))
        return list(self.runtime.ListPodSandbox(request, timeout=RPC_TIMEOUT_S).items)

    def containers(self, **filters: Any) -> list[api.Container]:
        request = api.ListContainersRequest(filter=api.ContainerFilter(**filters))
        return list(self.runtime.ListContainers(request, timeout=RPC_TIMEOUT_S).containers)

    def status(self, container: str) -> api.ContainerStatus:
        request = api.ContainerStatusRequest(container_id=container)
        return self.runtime.ContainerStatus(request, timeout=RPC_TIMEOUT_S).status

    def pod_status(self, pod: str) -> api.PodSandboxStatus:
        request = api.PodSandboxStatusRequest(pod_sandbox_id=pod)
        return self.runtime.PodSandboxStatus(request, timeout=RPC_TIMEOUT_S).status

    def exec(self, container: str, *command: str, timeout_s: int = 60) -> api.ExecSyncResponse:
        request = api.ExecSyncRequest(container_id=container, cmd=command, timeout=timeout_s)
        return self.runtime.ExecSync(request, timeout=RPC_TIMEOUT_S + timeout_s)

    def output(self, container: str, *command: str) -> str:
        """Run a command in the container; return its output. Fails when the exit code is not 0."""
        answer = self.exec(container, *command)
        assert answer.exit_code == 0, (answer.exit_code, answer.stdout, answer.stderr)
        return str(answer.stdout.decode())

    def wait_exit(self, container: str, timeout_s: float = 60.0) -> api.ContainerStatus:
        """Wait until the container has exited; return its status."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status(container)
            if status.state == api.CONTAINER_EXITED:
                return status
            assert time.monotonic() < deadline, f"{container} still runs:\n{self.tail()}"
            time.sleep(0.02)

    def log_lines(self, container: str) -> list[str]:
        """Return the content of the container's log lines, without time, stream and tag; an
        unfinished line is left out."""
        content = Path(self.status(container).log_path).read_text()
        return [line.split(" ", 3)[3] for line in content[: content.rfind("\n") + 1].splitlines()]

    def wait_logged(self, container: str, text: str) -> None:
        """Wait until the container's log contains this line."""
        assert wait_until(lambda: text in self.log_lines(container), 60), self.log_lines(container)


def server_fixture(scope: Literal["function", "module", "package"], **options: Any) -> Any:
    """Return a fixture that provides a server with these options, which has loaded the busybox
    image."""

    @pytest.fixture(scope=scope)
    def server() -> Iterator[Server]:
        with Server(**options) as started:
            started.load_image()
            yield started

    return server


def busybox_archive(reference: str) -> bytes:
    """Return a docker-archive of busybox with the accounts and the environment that tests use."""
    accounts = {
        "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nwww:x:33:33::/home/www:/bin/sh\n",
        "etc/group": "root:x:0:\nwww:x:33:\nextra:x:50:www\n",
    }
    config = {"Env": ["PATH=/bin", "FROM_IMAGE=yes"], "Cmd": ["sh"]}
    image = build.image([*build.busybox().layers, build.layer(accounts)], config)
    return build.docker_archive({reference: image})


def image_archive(reference: str, *layers: dict[str, bytes]) -> bytes:
    """Return a docker-archive of an image. Each layer maps paths to contents; the bottom layer is
    first."""
    return build.docker_archive({reference: build.image([build.layer(files) for files in layers])})


def _remove(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    """Return the status code of a call that must fail."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code()  # type: ignore[attr-defined,no-any-return]
    raise AssertionError("the call succeeded")


def message_of(call: Callable[[], object]) -> str:
    """Return the error message of a call that must fail."""
    try:
        call()
    except grpc.RpcError as error:
        return str(error.details())  # type: ignore[attr-defined]
    raise AssertionError("the call succeeded")
