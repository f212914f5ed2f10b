"""Tests that the client prints the same JSON as crictl, for this server and for containerd. On
containerd verbs of CRI work, and others report what they need."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.peer import Containerd, pause_archive
from tests.cri.client_verbs import call, ok
from tests.cri.server_harness import IMAGE, Server, busybox_archive
from tests.support import session, toolchain
from tests.support.processes import wait_until


@pytest.fixture(scope="module")
def containerd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Provide the address of a containerd on which `run` has made a pod."""
    folder = tmp_path_factory.mktemp("peer")
    name = session.name("verbs")
    (folder / "busybox.tar").write_bytes(busybox_archive(IMAGE))
    (folder / "pod.yaml").write_text(f"""
{{apiVersion: v1, kind: Pod, metadata: {{name: web, labels: {{app: web}}}}, spec: {{containers: [
  {{name: main, image: "{IMAGE}", command: [sh, -c, "echo hello; exec sleep 3600"]}}]}}}}
""")
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        peer = Containerd(folder / "containerd", name)
        try:
            peer.start([pause_archive(folder), folder / "busybox.tar"])
            address = f"unix://{peer.socket}"
            # an image that `ctr` imports is in the CRI's list a moment later, by an event
            assert wait_until(lambda: len(ok(address, "images", "-q").lines) == 2, 30)
            ok(address, "run", "--folder", str(folder / "pods"), str(folder / "pod.yaml"))
            yield address
            ok(address, "rm", "-f", "--folder", str(folder / "pods"), "web")
            assert ok(address, "pods", "-q").lines == []
        finally:
            peer.stop()
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def crictl(address: str, *arguments: str) -> object:
    command = [toolchain.crictl(), "-r", address, "-i", address, *arguments]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)


def by_id(listing: object) -> object:
    """Return a reply with its only list sorted by id."""
    assert isinstance(listing, dict) and len(listing) == 1
    ((key, items),) = listing.items()
    # containerd lists images in the random order of a Go map.
    return {key: sorted(items, key=lambda item: item["id"])}


def same_as_crictl(address: str, container: str, pod: str) -> None:
    for arguments in (["ps", "-a"], ["pods"], ["images"]):
        ours = ok(address, *arguments, "-o", "json").json
        theirs = crictl(address, *arguments, "-o", "json")
        assert by_id(ours) == by_id(theirs), arguments
    for arguments in (["inspect", container], ["inspectp", pod], ["inspecti", IMAGE]):
        ours, theirs = ok(address, *arguments).json, crictl(address, *arguments)
        assert isinstance(theirs, dict) and set(theirs) <= set(ours), (
            arguments,
            set(theirs) ^ set(ours),
        )
        for mount in ours["status"].get("mounts", ()):
            assert mount.pop("mountOptions") == [], "a field that is newer than this crictl"
        assert ours["status"] == theirs["status"], arguments
        assert set(ours["info"]) == set(theirs["info"]), arguments


def test_json_is_the_same_as_crictls(server: Server) -> None:
    pod = server.run_pod(server.pod_config("web"))
    container = server.launch(pod)
    same_as_crictl(f"unix://{server.socket}", container, pod)
    server.stop_container(container)
    same_as_crictl(f"unix://{server.socket}", container, pod)


def test_json_is_the_same_as_crictls_on_containerd(containerd: str) -> None:
    (container,) = ok(containerd, "ps", "-q").lines
    (pod,) = ok(containerd, "pods", "-q").lines
    same_as_crictl(containerd, container, pod)


def test_verbs_of_cri_work_on_containerd(containerd: str, tmp_path: Path) -> None:
    assert ok(containerd, "ps", "-o", "wide").lines[1].endswith("run")
    assert ok(containerd, "logs", "--tail", "1", "main").lines == ["hello"]
    assert ok(containerd, "version", "-o", "json").json["runtimeName"] == "containerd"
    assert [p["command"] for p in ok(containerd, "top", "-o", "json", "web").json["processes"]] == [
        "sleep 3600"
    ]
    assert len(ok(containerd, "stats", "--seconds", "0.1").lines) == 2
    (tmp_path / "file").write_text("copied")
    ok(containerd, "cp", str(tmp_path / "file"), "main:/etc/copied")
    ok(containerd, "cp", "main:/etc/copied", str(tmp_path / "back"))
    assert (tmp_path / "back").read_text() == "copied"
    assert "registry.test/busybox" in ok(containerd, "images").out
    assert "CREATED BY" in ok(containerd, "history", IMAGE).lines[0]


@pytest.mark.parametrize(
    "words",
    [
        ["restart", "main"],
        ["tag", IMAGE, "x"],
        ["save", "-o", "/dev/null", IMAGE],
        ["push", IMAGE],
        ["load", __file__],
    ],
)
def test_verbs_that_need_our_server_say_so(containerd: str, words: list[str]) -> None:
    error = call(containerd, *words).error
    assert "this needs a server of pyrunc-cri: CRI has no such call" in error
