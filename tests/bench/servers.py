"""Starts the servers that a benchmark compares: containerd + runc, CRI-O + crun, and ours, each in
a separate network namespace.

Containers have other network namespaces, so all processes in a server's namespace are the server or
its helpers, whatever their names are.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench import memory
from tests.bench.crio import Crio
from tests.bench.peer import Containerd, pause_archive
from tests.support import cri, images, session
from tests.support.cluster import Node
from tests.support.processes import Program, clean_up_on_signals

REMOVED_S = 60.0
IMAGE = "docker.io/library/busybox:latest"


@dataclass(frozen=True)
class Server:
    """A running server.

    - `name`: its name in tables.
    - `runtime`: name and version of its OCI runtime; "" for pyrunc's.
    - `store`: the folder of its images.
    - `launch`: starts the server again.
    """

    name: str
    runtime: str
    socket: Path
    namespace: str
    store: Path
    program: Program
    launch: Callable[[], None]

    def processes(self) -> list[int]:
        """Return the pids of the server, its helpers, and those processes of pods that are not the
        user's: shims, monitors, pause."""
        return memory.of_a_server(self.namespace)

    def helpers(self) -> list[int]:
        """Return `processes` without the server's own process."""
        return [pid for pid in self.processes() if pid != self.program.pid]

    def kill_and_launch(self) -> None:
        """Kill the server like `kill -9` and start it again, without waiting."""
        self.program.stop(signal.SIGKILL)
        self.launch()


def _containerd(folder: Path, namespace: str) -> tuple[Server, Callable[[], None]]:
    return _start_peer("containerd + runc", Containerd(folder, namespace), folder)


def _crio(folder: Path, namespace: str) -> tuple[Server, Callable[[], None]]:
    return _start_peer("CRI-O + crun", Crio(folder, namespace), folder)


def _start_peer(
    name: str, peer: Containerd | Crio, folder: Path
) -> tuple[Server, Callable[[], None]]:
    """Start the peer with its images; return (server, function that stops the peer)."""
    images_folder = folder / "root"
    server = Server(
        name,
        peer.runtime(),
        peer.socket,
        peer.namespace,
        images_folder,
        peer.program,
        peer.launch,
    )
    try:
        peer.start([images.busybox(), pause_archive(folder)])
    except BaseException:
        peer.stop()
        raise
    return server, peer.stop


def _ours(folder: Path, namespace: str) -> tuple[Server, Callable[[], None]]:
    node = Node(folder, namespace)
    server = Server(
        "pyrunc", "", node.socket, namespace, folder / "root", node.server, node.launch_server
    )
    try:
        node.write_configuration()
        node.start_server()
        node.load(images.busybox())
    except BaseException:
        node.stop_server()
        raise
    return server, node.stop_server


KINDS = {"containerd": _containerd, "crio": _crio, "pyrunc": _ours}
TWO, ALL = ("containerd", "pyrunc"), ("containerd", "crio", "pyrunc")


@contextlib.contextmanager
def running(folder: Path, kinds: Sequence[str] = TWO) -> Iterator[list[Server]]:
    """Provide the servers `kinds`, started in this order; they are stopped also when this process
    gets a signal. Images are on the disk of `folder`, state is on a tmpfs, as in /run."""
    clean_up_on_signals()
    with contextlib.ExitStack() as stack:
        servers = []
        for kind in kinds:
            namespace, state = session.name(f"bench-{kind}"), folder / kind / "state"
            subprocess.run(["ip", "netns", "add", namespace], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", namespace], check=False)
            subprocess.run(["ip", "-n", namespace, "link", "set", "lo", "up"], check=True)
            state.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "state", state], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(state)], check=False)
            server, stop = KINDS[kind](folder / kind, namespace)
            stack.callback(stop)
            # Pods are left when a run was cut short.
            stack.callback(cri.remove_pods_beside_others, server.socket, REMOVED_S)
            servers.append(server)
        yield servers
