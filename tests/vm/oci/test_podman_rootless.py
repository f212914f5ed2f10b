"""Tests podman of an ordinary user with our runtime: the user's systemd makes the cgroups, pasta
the network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.oci import commands, engines
from tests.vm.oci.commands import User
from tests.vm.oci.engines import IMAGE, Podman

pytestmark = pytest.mark.slow
MIB = 1 << 20


@pytest.fixture(scope="module")
def podman(alice: User, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    engines.configure()
    engine = Podman(alice)
    engine("import", str(engines.box(tmp_path_factory.mktemp("image"))), IMAGE)
    facts = engine.output(
        "info",
        "--format",
        "{{.Host.OCIRuntime.Name}} {{.Host.CgroupManager}} {{.Host.Security.Rootless}}",
    )
    assert facts == "pyrunc systemd true"
    yield engine
    engine("rm", "--all", "--force", "--time", "0")
    assert not list(Path(f"{alice.runtime_dir}/pyrunc").glob("[0-9a-f]" * 64))


def test_a_rootless_podman_container_has_mapped_ids(podman: Podman) -> None:
    first, count = commands.granted_ids("alice")
    output = podman.run(
        IMAGE, "sh", "-c", "id -u; cat /proc/self/uid_map; cat /proc/self/cgroup"
    ).split()
    assert output == ["0", "0", "1000", "1", "1", str(first), str(count), "0::/"]
    assert podman.run("--user", "7:8", IMAGE, "sh", "-c", "id -u; id -g").split() == ["7", "8"]
    assert podman.run("--userns", "keep-id", IMAGE, "id", "-u") == "1000"


def test_a_rootless_podman_container_is_limited_paused_and_stopped(podman: Podman) -> None:
    podman.start("a", "--memory", "64m", "--pids-limit", "44")
    group = podman.group("a")
    assert "/user@1000.service/" in str(group)
    assert (group / "memory.max").read_text().strip() == str(64 * MIB)
    assert (group / "pids.max").read_text().strip() == "44"
    assert podman.output("exec", "a", "id", "-u") == "0"
    assert "/dev/pts/0" in podman("exec", "-it", "a", "tty", terminal=True).stdout
    assert "sleep" in podman.output("top", "a", "args")
    podman("pause", "a")
    assert "frozen 1" in (group / "cgroup.events").read_text()
    podman("unpause", "a")
    podman("stop", "--time", "20", "a")
    assert podman.output("inspect", "a", "--format", "{{.State.ExitCode}}") == "5"
    podman("rm", "a")
    assert not group.exists()


def test_a_rootless_podman_container_has_a_network_and_a_volume(podman: Podman) -> None:
    output = podman.output(
        "run",
        "--rm",
        "--network",
        "pasta",
        "-v",
        "data:/data",
        IMAGE,
        "sh",
        "-c",
        "ip -o -4 addr; touch /data/x; stat -c %u /data/x",
    )
    assert "inet 127.0.0.1" in output and output.count("inet ") == 2 and output.endswith("0")
    podman("volume", "rm", "data")


def test_rootless_podman_builds_an_image(podman: Podman) -> None:
    folder = Path(podman.user.home) / "build"
    folder.mkdir(exist_ok=True)
    (folder / "Containerfile").write_text(
        f"FROM {IMAGE}\nRUN echo built > /built\nCMD cat /built\n"
    )
    podman(
        "build", "--network", "none", "--runtime", str(commands.PYRUNC), "-t", "built", str(folder)
    )
    assert podman.run("localhost/built") == "built"
