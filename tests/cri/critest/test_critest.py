"""Runs critest, Kubernetes' own validation suite for CRI runtimes, against a real server: every
spec passes.

The images of tests/cri/critest/images.py come from a registry on the loopback of the server's
network namespace.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cri import inner_registry
from tests.cri.critest import images
from tests.cri.server_harness import Server
from tests.support import toolchain
from tests.support.registry import without_host

TIMEOUT_S = 1200

LEFT_OUT = {
    "public image with digest should be pulled": (
        "names an image by a digest whose bytes only its registry has"
    ),
    "should terminate with exitCode 137 and reason OOMKilled": (
        "this machine may have no memory controller in cgroup v2; tests/vm shows it"
    ),
    "runtime should support MaskedPaths": (
        "masks /bin/ls, which the shell of Debian's busybox does not look for"
    ),
}


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    """Remove the System V shared memory that the test leaves on the machine."""
    before = _segments()
    yield
    for segment in _segments() - before:
        subprocess.run(["ipcrm", "-m", segment], check=True)


def _segments() -> set[str]:
    """Return the ids of System V shared memory of 1 MiB that no process has attached."""
    # `ipcmk -M 1048576` leaves such memory.
    lines = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    return {words[1] for words in lines if words[3] == "1048576" and words[6] == "0"}


@pytest.fixture(params=["erofs", "unpacked"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    settings = {
        "registry": {"config_path": str(tmp_path / "certs.d")},
        "images": {"store": request.param},
    }
    with (
        Server(settings=settings) as server,
        inner_registry.inside(server, tmp_path / "registry") as registry,
    ):
        for name, image in images.all_of_them().items():
            registry.push(without_host(name), image, docker=True)
        for host in images.HOSTS:
            hosts = tmp_path / "certs.d" / host / "hosts.toml"
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f'server = "{registry.url}"\n[host."{registry.url}"]\n')
        yield server


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_every_spec_passes(server: Server, tmp_path: Path) -> None:
    specs = run_critest(server, tmp_path)
    bad = [
        _description(spec)
        for spec in specs
        if spec["State"] != "passed" and not _may_be_skipped(spec)
    ]
    assert not bad, "\n\n".join(bad)
    assert len([spec for spec in specs if spec["State"] == "passed"]) > 100
    assert not server.pods() and not server.containers()


def _may_be_skipped(spec: dict[str, Any]) -> bool:
    name = " ".join([*spec["ContainerHierarchyTexts"], spec["LeafNodeText"]])
    may_skip = "benchmark" in name or any(left_out in name for left_out in LEFT_OUT)
    no_apparmor = "AppArmor" in name and not Path("/sys/kernel/security/apparmor").exists()
    return spec["State"] == "skipped" and (may_skip or no_apparmor)


def run_critest(server: Server, folder: Path) -> list[dict[str, Any]]:
    """Run critest; return its specs with name and state."""
    report = folder / "report.json"
    command = [
        *("nsenter", f"--net=/proc/{server.pid}/ns/net", "--"),
        *(str(toolchain.critest()), f"--runtime-endpoint=unix://{server.socket}"),
        *(
            f"--image-endpoint=unix://{server.socket}",
            f"--ginkgo.json-report={report}",
            "--ginkgo.no-color",
        ),
        *("--config=/dev/null", f"--ginkgo.skip={'|'.join(re.escape(name) for name in LEFT_OUT)}"),
    ]
    with open(folder / "critest.log", "wb") as log:
        subprocess.run(command, stdout=log, stderr=log, cwd=folder, timeout=TIMEOUT_S, check=False)
    assert report.exists(), (folder / "critest.log").read_text()[-4000:]
    (suite,) = json.loads(report.read_text())
    return [spec for spec in suite["SpecReports"] if spec["LeafNodeType"] == "It"]


def _description(spec: dict[str, Any]) -> str:
    name = " ".join([*spec["ContainerHierarchyTexts"], spec["LeafNodeText"]])
    return f"{spec['State']}: {name}\n{spec.get('Failure', {}).get('Message', '')}"
