"""A node of one machine: the server's own unit and a kubelet in standalone mode, without API
server, under systemd.

In that mode kubelet only runs the pods of its folder `staticPodPath`; its own HTTPS API shows them,
their logs and streams.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from cri_server.config import NetworkConfig, ServerConfig
from tests.support import images
from tests.support.guest import PROJECT
from tests.support.processes import installed, wait_until

Json = dict[str, Any]
Value = TypeVar("Value")
DISK, PROGRAMS = Path("/dev/disk/by-label/kubelet"), Path("/opt/kubelet")
BRIDGE = "pods0"
NAME, API = "guest", "127.0.0.1:10250"
UNIT = Path("/etc/systemd/system/pyrunc-cri.service")
SETTINGS = Path("/etc/pyrunc/config.toml")
NETWORK = Path(NetworkConfig().conf_dir) / "10-pods.conflist"
FOLDER = Path("/var/lib/standalone")
MANIFESTS = FOLDER / "manifests"
PATIENCE_S = 300.0  # for emulated processors
CONFLIST: Json = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": BRIDGE,
            "isDefaultGateway": True,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]]},
        }
    ],
}
KUBELET: Json = {
    "kind": "KubeletConfiguration",
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "containerRuntimeEndpoint": ServerConfig().listen,
    "cgroupDriver": "systemd",
    "cgroupsPerQOS": True,
    "enforceNodeAllocatable": ["pods"],
    "failSwapOn": False,
    "address": "127.0.0.1",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "makeIPTablesUtilChains": False,
    "staticPodPath": str(MANIFESTS),
    "fileCheckFrequency": "5s",
}


class Node:
    """The machine itself, which is a node between `start` and `stop`."""

    def __init__(self) -> None:
        self._tls = ssl.create_default_context()
        # kubelet signs its certificate itself
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE

    def start(self) -> None:
        """Start the server, load busybox and start kubelet; return when kubelet serves its API."""
        for folder in (SETTINGS.parent, NETWORK.parent, MANIFESTS, PROGRAMS):
            folder.mkdir(parents=True, exist_ok=True)
        SETTINGS.write_text('[cgroup]\ndriver = "systemd"\nmissing_controllers = "error"\n')
        NETWORK.write_text(json.dumps(CONFLIST))
        unit = (PROJECT / "cri_server/install/data/pyrunc-cri.service").read_text()
        UNIT.write_text(unit.replace("@PROGRAM@", " ".join(installed("pyrunc-cri"))))
        run("systemctl", "daemon-reload")
        run("systemctl", "start", UNIT.name)
        run(*installed("pyrunc-cri"), "image", "load", str(images.busybox()))
        run("mount", "-o", "ro", str(DISK), str(PROGRAMS))
        self._start_kubelet()

    def _start_kubelet(self) -> None:
        (FOLDER / "kubelet.yaml").write_text(json.dumps(KUBELET))
        options = ("--unit=kubelet", "--property=KillMode=process", "--property=Delegate=yes")
        program = (str(PROGRAMS / "kubelet"), f"--config={FOLDER}/kubelet.yaml")
        places = (f"--root-dir={FOLDER}/kubelet", f"--cert-dir={FOLDER}/pki")
        run("systemd-run", *options, *program, *places, f"--hostname-override={NAME}", "--v=2")
        self.until(lambda: self.get("/healthz") == b"ok", "kubelet's healthz")

    def stop(self) -> None:
        """Remove the pods, end kubelet and the server, and remove their files."""
        run("systemctl", "stop", "kubelet", check=False)
        run(*installed("pyrunc-cri"), "rm", "--all", "--kubelet", "--force", check=False)
        run("systemctl", "stop", UNIT.name, check=False)
        run("ip", "link", "delete", BRIDGE, check=False)
        for path in (UNIT, SETTINGS, NETWORK):
            path.unlink(missing_ok=True)
        run("systemctl", "daemon-reload")
        run("umount", str(PROGRAMS), check=False)
        shutil.rmtree(FOLDER, ignore_errors=True)

    def until(self, condition: Callable[[], Value | None], what: str) -> Value:
        """Wait until `condition()` is true, and return its value. The error has the log of the two
        units."""
        answers: list[Value] = []

        def met() -> bool:
            try:
                answer = condition()
            except OSError:  # urllib.error.URLError is one, too
                return False
            if answer:
                answers.append(answer)
            return bool(answer)

        if not wait_until(met, PATIENCE_S, 1):
            journal = run(
                "journalctl",
                "--no-pager",
                "-n",
                "60",
                "-o",
                "cat",
                "-u",
                "kubelet",
                "-u",
                UNIT.name,
            )
            raise AssertionError(f"no {what} in {PATIENCE_S:.0f} s\n{journal}")
        return answers[-1]

    def get(self, path: str) -> bytes:
        """Return the body of kubelet's reply. Raises urllib.error.HTTPError for an error status."""
        with urllib.request.urlopen(
            f"https://{API}{path}", timeout=60, context=self._tls
        ) as answer:
            return bytes(answer.read())

    def pod(self, name: str) -> Json | None:
        """Return the pod `name` from kubelet's list, or None."""
        for pod in json.loads(self.get("/pods"))["items"] or []:
            # The name of a static pod ends with the node's.
            if pod["metadata"]["name"] == f"{name}-{NAME}":
                manifest: Json = pod
                return manifest
        return None

    def execute(self, pod: str, container: str, *command: str) -> tuple[str, Json]:
        """Run `command` by kubelet's /exec over WebSocket, v5.channel.k8s.io; return its stdout and
        the final status."""
        return asyncio.run(self._execute(pod, container, *command))

    async def _execute(self, pod: str, container: str, *command: str) -> tuple[str, Json]:
        words = "&".join(f"command={quote(word)}" for word in command)
        url = f"wss://{API}/exec/default/{pod}-{NAME}/{container}?output=1&error=1&{words}"
        protocols = [Subprotocol("v5.channel.k8s.io")]
        output, status = b"", b""
        # Not the client with threads: it reads and writes a TLS connection at the same time, and
        # Python 3.13.5 does not lock OpenSSL's object. In the emulated guest one request of twenty
        # was then never sent.
        async with connect(
            url, ssl=self._tls, subprotocols=protocols, open_timeout=120, ping_timeout=None
        ) as stream:
            async for message in stream:
                assert isinstance(message, bytes)
                output += message[1:] if message[0] == 1 else b""
                status += message[1:] if message[0] == 3 else b""
        return output.decode(), json.loads(status)


def run(*command: str, check: bool = True) -> str:
    """Run a command and return its output; the error of a failed command has both streams."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        print(done.stdout, done.stderr, sep="\n")
        raise RuntimeError(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout
