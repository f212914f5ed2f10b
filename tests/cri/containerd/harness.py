"""Runs containerd's suite against a pyrunc server, with images made here, from a registry on
loopback in the server's network namespace."""

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
    """Runs the suite's executable against `server`, which has no pods or containers left once the
    tests have cleaned up."""

    def __init__(self, server: Server, folder: Path) -> None:
        """Provide containerd's root directory and a command called runc. By both the suite decides
        whether it skips tests of user namespaces."""
        self.server, self._folder = server, folder
        listed = folder / "images.toml"
        listed.write_text(images.image_list())
        (folder / "bin").mkdir()
        (folder / "bin" / "runc").symlink_to(Path(sys.executable).parent / "pyrunc")
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
        """Run the tests; returns each one's result, PASS, SKIP or FAIL, and their output."""
        pattern = f"^({'|'.join(names)})$"
        output = self._output("-test.v", f"-test.run={pattern}", f"-test.timeout={TIMEOUT_S}s")
        return {
            name: state for state, name in re.findall(r"^--- (\w+): (\w+) ", output, re.MULTILINE)
        }, output

    def _output(self, *options: str) -> str:
        """Run the suite; return its output. The suite exits with 1 when a test fails."""
        log = self._folder / "suite.log"
        with open(log, "wb") as out:
            subprocess.run(
                [*self._command, *options],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                timeout=TIMEOUT_S + 60,
                check=False,
            )
        return log.read_text(errors="replace")


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[None]:
    """Make mounts below the folder visible in the suite's mount namespace, where its NRI plugins
    open the pods' network namespaces by their names."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", "--make-shared", folder, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def against_a_server(folder: Path, served: Mapping[str, BuiltImage]) -> Iterator[Suite]:
    """Provide the suite and a server with NRI. Its registry has the images `served`, which maps the
    suite's names to images."""
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
