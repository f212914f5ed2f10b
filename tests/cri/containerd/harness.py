"""Runs containerd's CRI integration tests against a pyrunc server and a registry with their
images."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cri_server.images.archives.build import BuiltImage
from tests.cri import inner_registry
from tests.cri.containerd import images
from tests.cri.server_harness import Server
from tests.support import toolchain
from tests.support.registry import without_host

TIMEOUT_S = 1800
NRI_SOCKET = "/var/run/nri-test.sock"
CONTAINERD_ROOT = "/var/lib/containerd-test"
"""The suite knows no others."""


class Suite:
    """Runs the executable of containerd's tests against `server`."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self._folder = server, folder
        listed = folder / "images.toml"
        listed.write_text(images.image_list())
        (folder / "bin").mkdir()
        (folder / "bin" / "runc").symlink_to(Path(sys.executable).parent / "pyrunc")
        # By containerd's root directory and a command `runc` the suite decides whether it skips
        # tests of user namespaces.
        private = (
            f"mount -t tmpfs suite /var/lib && mkdir {CONTAINERD_ROOT} && PATH={folder}/bin:$PATH"
            ' exec "$@"'
        )
        program = str(toolchain.containerd_integration())
        self._command = [
            *server.in_its_network("unshare", "--mount", "--propagation", "slave"),
            *("sh", "-c", private, "sh", program),
            *(f"-cri-endpoint=unix://{server.socket}", f"-image-list={listed}"),
        ]

    def names(self) -> set[str]:
        """Return the names of all tests of the suite."""
        return {*self._output("-test.list=^Test").split()}

    def run(self, names: Iterable[str]) -> tuple[Mapping[str, str], str]:
        """Run the tests; return a dict: name -> PASS, SKIP or FAIL, and the suite's output."""
        pattern = f"^({'|'.join(names)})$"
        output = self._output("-test.v", f"-test.run={pattern}", f"-test.timeout={TIMEOUT_S}s")
        return {
            name: state for state, name in re.findall(r"^--- (\w+): (\w+) ", output, re.MULTILINE)
        }, output

    def _output(self, *options: str) -> str:
        """Run the suite with these options; return its output."""
        log = self._folder / "suite.log"
        with open(log, "wb") as out:
            subprocess.run(
                [*self._command, *options],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                timeout=TIMEOUT_S + 60,
                check=False,  # it exits with 1 when a test fails
            )
        return log.read_text(errors="replace")


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[None]:
    """Make mounts below the folder visible in the suite's mount namespace during the block."""
    folder.mkdir(exist_ok=True)
    # The suite's NRI plugins open the pods' network namespaces by names in this folder.
    subprocess.run(["mount", "--bind", "--make-shared", folder, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def against_a_server(folder: Path, served: Mapping[str, BuiltImage]) -> Iterator[Suite]:
    """Provide the suite for a new server with NRI, whose registry has the images `served` (the
    suite's name -> image)."""
    for name in ("plugins", "plugin-config"):
        (folder / name).mkdir()
    settings = {
        "registry": {"config_path": str(folder / "certs.d")},
        "nri": {"enabled": True, "socket": NRI_SOCKET, "plugin_dir": str(folder / "plugins"),
                "plugin_config_dir": str(folder / "plugin-config")},
    }  # fmt: skip
    with (
        Server(settings=settings) as server,
        _shared(server.names),
        inner_registry.inside(server, folder / "registry") as registry,
    ):
        for word, image in served.items():
            registry.push(without_host(images.reference(word)), image, docker=True)
        hosts = folder / "certs.d" / images.HOST / "hosts.toml"
        hosts.parent.mkdir(parents=True)
        hosts.write_text(f'server = "{registry.url}"\n[host."{registry.url}"]\n')
        yield Suite(server, folder)
