"""containerd's own CRI integration tests against a real server of ours: all that speak only CRI or NRI pass.

Images are made here and come from a registry on the loopback of the server's network namespace.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cri import inner_registry
from tests.cri.containerd import images, selection
from tests.cri.server_harness import Server
from tests.support import toolchain
from tests.support.registry import without_host

TIMEOUT_S = 1800
NRI_SOCKET = "/var/run/nri-test.sock"
CONTAINERD_ROOT = "/var/lib/containerd-test"
"""The suite knows no others."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    for name in ("plugins", "plugin-config"):
        (tmp_path / name).mkdir()
    settings = {
        "registry": {"config_path": str(tmp_path / "certs.d")},
        "nri": {"enabled": True, "socket": NRI_SOCKET, "plugin_dir": str(tmp_path / "plugins"),
                "plugin_config_dir": str(tmp_path / "plugin-config")},
    }  # fmt: skip
    with (
        Server(settings=settings) as server,
        inner_registry.inside(server, tmp_path / "registry") as registry,
    ):
        for word, image in images.all_of_them().items():
            registry.push(without_host(images.reference(word)), image, docker=True)
        hosts = tmp_path / "certs.d" / images.HOST / "hosts.toml"
        hosts.parent.mkdir(parents=True)
        hosts.write_text(f'server = "{registry.url}"\n[host."{registry.url}"]\n')
        yield server


@pytest.fixture
def suite(server: Server, tmp_path: Path) -> list[str]:
    """The suite's command line but for what it shall do.

    Whether a test of user namespaces skips itself it finds out from a folder of containerd's and a command called runc.
    """
    listed = tmp_path / "images.toml"
    listed.write_text(images.image_list())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "runc").symlink_to(Path(sys.executable).parent / "pyrunc")
    private = (
        f'mount -t tmpfs suite /var/lib && mkdir {CONTAINERD_ROOT} && PATH={tmp_path}/bin:$PATH exec "$@"'
    )
    return [
        *server.in_its_network(
            "unshare", "--mount", "sh", "-c", private, "sh", str(toolchain.containerd_integration())
        ),
        *(f"-cri-endpoint=unix://{server.socket}", f"-image-list={listed}"),
    ]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 1200)
def test_all_that_apply_pass(server: Server, suite: list[str], tmp_path: Path) -> None:
    names = _output(tmp_path, *suite, "-test.list=^Test")
    known = {*selection.APPLY, *selection.NEED_CONTROLLERS, *selection.DIFFERENT, *selection.NOT_OURS}
    assert {*names.split()} == known, "the suite has other tests"

    chosen = [*selection.APPLY, *(selection.NEED_CONTROLLERS if _has_controllers() else ())]
    wanted = f"^({'|'.join(chosen)})$"
    said = _output(tmp_path, *suite, "-test.v", f"-test.run={wanted}", f"-test.timeout={TIMEOUT_S}s")
    states = {name: state for state, name in re.findall(r"^--- (\w+): (\w+) ", said, re.MULTILINE)}
    assert {*states.values()} <= {"PASS", "SKIP"} and set(states) == {*chosen}, said[-100_000:]
    assert list(states.values()).count("PASS") >= selection.FEWEST
    assert not server.pods() and not server.containers()


def _has_controllers() -> bool:
    there = Path("/sys/fs/cgroup/cgroup.controllers")
    return there.exists() and {"memory", "cpuset"} <= {*there.read_text().split()}


def _output(folder: Path, *command: str) -> str:
    """What the suite prints, which ends with 1 when a test failed."""
    log = folder / "suite.log"
    with open(log, "wb") as out:
        subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=folder, timeout=TIMEOUT_S + 60, check=False
        )
    return log.read_text(errors="replace")
