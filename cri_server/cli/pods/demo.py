"""`pyrunc-cri demo POD.YAML`: runs a pod on a temporary server in a new network namespace,
shows the pod, and removes everything.

The demo needs no configuration. It makes the image `busybox` from the machine's own busybox.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from cri_server import config
from cri_server.api import api_pb2 as api
from cri_server.cli.arguments.files import FILE
from cri_server.cli.connection.client import Client, ServerError
from cri_server.cli.manifest import folders, pod_model
from cri_server.cli.pods import run as pod_run
from cri_server.cli.server.serve import require_root
from cri_server.images.archives import build
from pyrunc.abi.clone import CLONE_NEWNET
from pyrunc.errors import Error, NotFound
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.namespace import setns
from pyrunc.shim.network import open_network

# as long as the server waits for its zygote, whose imports take a minute on emulated processors
START_TIMEOUT_S = 300.0
EXEC = ("sh", "-c", "echo this is $(hostname), process $$; id")
NETWORK = {
    "cniVersion": "1.0.0",
    "name": "demo",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": "10.88.0.0/16"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}

NEXT = f"""
kubelet, with a CNI configuration in {config.NetworkConfig().conf_dir}:
  pyrunc-cri serve &
  kubelet --container-runtime-endpoint={config.ServerConfig().listen} ..."""


@click.command()
@click.argument("file", type=FILE, metavar="POD.YAML")
def demo(file: Path) -> None:
    """Run a pod on a temporary server, show its processes, and remove it."""
    pod = pod_run.load(file)
    require_root()
    folder = Path(tempfile.mkdtemp(prefix="pyrunc-demo-"))
    try:
        with _server(folder) as server, Client(_address(folder)) as client:
            _wait(client, folder, server)
            _provide_busybox(client, folder, pod)
            running = pod_run.start(client, pod, folder / "pods")
            try:
                pod_run.describe(client, running)
                _execute(client, running)
            finally:
                pod_run.clean_up(client, running, 0)
            click.echo("stopped and removed")
    finally:
        folders.delete(folder)
    click.echo(NEXT)


@click.command(hidden=True)
@click.argument("folder", type=FILE)
def demo_server(folder: Path) -> None:
    """Run the demo's server in a new network namespace, so that it does not change the host's
    network."""
    from cri_server import app

    with closing_fd(open_network()) as network:
        setns(network, CLONE_NEWNET)

    def read() -> config.Config:
        return config.load(folder / "config.toml", {})

    app.serve(read(), read)


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the demo's server for the `with` block, and terminate it afterwards. The server has its
    own session, so that ^C does not reach it."""
    network = NETWORK | {}
    network["plugins"][0]["ipam"]["dataDir"] = str(folder / "leases")  # type: ignore[index]
    (folder / "net.d").mkdir()
    (folder / "net.d" / "10-demo.conflist").write_text(json.dumps(network))
    (folder / "config.toml").write_text(_config(folder))
    command = [sys.executable, "-m", "cri_server.cli.main", "demo-server", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    # ^C reaches all processes of a terminal's foreground group: in its own session the server lives
    # on until the client has cleaned up.
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _address(folder: Path) -> str:
    return f"unix://{folder}/cri.sock"


def _config(folder: Path) -> str:
    return f"""
[server]
listen = "{_address(folder)}"
root = "{folder}/root"
state = "{folder}/state"
[network]
conf_dir = "{folder}/net.d"
bin_dir = "{folder}/bin"
[cgroup]
missing_controllers = "warn"
"""


def _wait(client: Client, folder: Path, server: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    while True:
        try:
            client.call(api.VersionRequest(), 1.0)
        except Error:
            if server.poll() is not None:
                raise _start_failed(f"exit code {server.returncode}", folder) from None
            if time.monotonic() - began > START_TIMEOUT_S:
                raise _start_failed(f"no reply within {START_TIMEOUT_S:g} s", folder) from None
            time.sleep(0.02)
        else:
            click.echo(f"server up in {(time.monotonic() - began) * 1e3:.0f} ms")
            return


def _start_failed(reason: str, folder: Path) -> ServerError:
    """Return the error for a server that did not start. Its message has the reason and the end of
    the server's log."""
    log = (folder / "server.log").read_text(errors="replace")[-2000:]
    return ServerError(f"the server did not start: {reason}\n{log}")


def _provide_busybox(client: Client, folder: Path, pod: pod_model.PodManifest) -> None:
    """Load the machine's busybox into the server as the image `busybox`, if the pod uses that
    image."""
    references = {c.image for c in (*pod.spec.init_containers, *pod.spec.containers)}
    if not references & {"busybox", "busybox:latest", build.BUSYBOX_NAME}:
        return
    with contextlib.suppress(NotFound):
        client.load_image(str(build.busybox_archive(folder / "busybox.tar")), None)


def _execute(client: Client, running: pod_run.Running) -> None:
    """Run a command in the first running container and print its output."""
    for name, identifier in running.containers.items():
        request = api.ExecSyncRequest(container_id=identifier, cmd=EXEC, timeout=10)
        try:
            began = time.perf_counter()
            answer = client.call(request)
        except Error:
            continue
        click.echo(f"exec in {name} ({(time.perf_counter() - began) * 1e3:.1f} ms)")
        click.echo("".join(f"  {line}\n" for line in answer.stdout.decode().splitlines()), nl=False)
        return
