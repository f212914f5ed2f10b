"""Tests a pod whose network add-on is gone: nothing unfinished stays, and a pod that cannot be
detached from its network can be removed by force."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cri.client_verbs import cli
from tests.cri.server_harness import IMAGE, Server
from tests.cri.test_recovery import nothing_left

MANIFEST = f"""
apiVersion: v1
kind: Pod
metadata: {{name: web}}
spec:
  containers: [{{name: c, image: '{IMAGE}', imagePullPolicy: Never, command: [sleep, '1000']}}]
"""
PLUGIN = """#!/bin/sh
[ $CNI_COMMAND = ADD ] || exit 0
echo '{"cniVersion": "1.0.0", "ips": [{"address": "10.9.9.9/24"}]}'
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(network=False) as server:
        (server.folder / "bin").mkdir()
        server.load_image()
        (tmp_path / "pod.yaml").write_text(MANIFEST)
        yield server


def configure(server: Server, *kinds: str) -> None:
    conflist = {"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": kind} for kind in kinds]}
    (server.folder / "net.d/10-net.conflist").write_text(json.dumps(conflist))


def install(server: Server, kind: str, script: str = PLUGIN) -> Path:
    plugin = server.folder / "bin" / kind
    plugin.write_text(script)
    plugin.chmod(0o755)
    return plugin


def run(server: Server, tmp_path: Path, code: int = 0) -> str:
    done = cli(
        server, "run", "--folder", str(tmp_path / "pods"), str(tmp_path / "pod.yaml"), code=code
    )
    return done.stderr.decode()


def gc(server: Server, *words: str) -> list[dict[str, str]]:
    items: list[dict[str, str]] = json.loads(cli(server, "gc", "--json", *words).stdout)
    return items


def test_a_plugin_that_is_not_there_leaves_no_pod(server: Server, tmp_path: Path) -> None:
    configure(server, "nowhere")
    refused = run(server, tmp_path, code=1)
    path = f"{server.folder}/net.d/10-net.conflist"
    assert (
        f"the pod network is not ready: {path}: CNI plugin 'nowhere' is not in {server.folder}/bin"
        in refused
    )
    assert not server.pods() and not [i for i in gc(server) if i["kind"] in ("pod", "address")]
    nothing_left(server)
    configure(server, "add-on")
    install(server, "add-on")
    run(server, tmp_path)
    cli(server, "rm", "--force", "web")
    nothing_left(server)


def test_a_pod_of_a_missing_plugin_stays_until_its_removal_is_forced(
    server: Server, tmp_path: Path
) -> None:
    configure(server, "add-on")
    plugin = install(server, "add-on")
    run(server, tmp_path)
    (pod,) = [p.id for p in server.pods()]
    plugin.unlink()
    configure(server, "loopback")  # another add-on, which does not know earlier pods
    gone = f"CNI plugin 'add-on' is not in {server.folder}/bin"
    assert gone in cli(server, "stop", "-t", "0", "web", code=1).stderr.decode()
    (item,) = [i for i in gc(server) if i["kind"] == "pod"]
    assert item["action"] == "keep" and "rm --force` removes it all the same" in item["why"]
    assert not [i for i in gc(server) if i["kind"] == "address"], (
        "the pod exists and keeps its address"
    )
    done = cli(server, "rm", "--force", "--folder", str(tmp_path / "pods"), "web")
    assert done.stdout == b"web\n"
    assert (
        f"pyrunc-cri: warning: the pod's network was not detached: {gone}" in done.stderr.decode()
    )
    assert re.search(
        rf"network of sandbox {pod} was released although a CNI plugin failed: {re.escape(gone)}",
        server.log.read_text(),
    )
    nothing_left(server)


def test_a_pod_with_a_failed_roll_back_is_listed_and_removed_by_force(
    server: Server, tmp_path: Path
) -> None:
    configure(server, "broken")
    install(server, "broken", "#!/bin/sh\necho no >&2\nexit 7\n")
    assert "CNI plugin broken failed ADD with exit code 7: no" in run(server, tmp_path, code=1)
    (pod,) = server.pods()
    assert [i["action"] for i in gc(server) if i["kind"] == "address"] == []
    assert "failed DEL with exit code 7" in cli(server, "rm", pod.id, code=1).stderr.decode()
    server.restart()
    assert "failed DEL with exit code 7" in cli(server, "rm", "--force", pod.id).stderr.decode()
    nothing_left(server)


def test_the_network_of_a_running_pod_is_not_released(server: Server, tmp_path: Path) -> None:
    configure(server, "add-on")
    install(server, "add-on")
    run(server, tmp_path)
    container = server.containers()[0].id
    from cri_server.cli.connection.client import Client, ServerError
    from cri_server.rpc import private

    with (
        Client(f"unix://{server.socket}") as client,
        pytest.raises(ServerError, match="stop it first"),
    ):
        client.admin(private.ReleaseNetwork(server.pods()[0].id), private.Refusals)
    assert server.output(container, "echo", "here") == "here\n"
    cli(server, "rm", "--force", "web")


def test_gc_knows_the_folders_of_run(server: Server) -> None:
    """gc keeps the folders that `run` has made, and reports none as unknown."""
    configure(server, "add-on")
    install(server, "add-on")
    folder = server.state / "pods"  # the default of `run --folder`
    manifest = server.folder / "pod.yaml"
    manifest.write_text(MANIFEST)
    cli(server, "run", "--folder", str(folder), str(manifest))
    (folder / "default_other_1").mkdir()
    (folder / "default_other_1/pod").write_text("0" * 64)
    (folder / "default_killed_1").mkdir()
    items = {
        Path(i["name"]).name.rsplit("_", 1)[0]: i for i in gc(server) if str(folder) in i["name"]
    }
    assert {i["action"] for i in items.values()} == {"keep"} and {
        i["kind"] for i in items.values()
    } == {"pod's files"}
    assert "of pod default/web" in items["default_web"]["why"]
    assert (
        "of another server" in items["default_other"]["why"]
        and "was killed" in items["default_killed"]["why"]
    )
    assert not [i for i in gc(server) if i["kind"] == "unknown"]
    cli(server, "rm", "--force", "--folder", str(folder), "web")
    assert sorted(p.name for p in folder.iterdir()) == ["default_killed_1", "default_other_1"]


def test_gc_releases_the_network_of_a_lost_pod_only_by_force(
    server: Server, tmp_path: Path
) -> None:
    """If a pod's record and its network add-on are gone, only `gc --force` can release the pod's
    address."""
    configure(server, "add-on")
    plugin = install(server, "add-on")
    run(server, tmp_path)
    (pod,) = [p.id for p in server.pods()]
    record = server.root / "network" / f"{pod}.json"
    content = record.read_bytes()
    cli(server, "rm", "--force", "--folder", str(tmp_path / "pods"), "web")
    plugin.unlink()
    record.write_bytes(content)
    server.restart()

    def address(*words: str, code: int) -> dict[str, str]:
        items = json.loads(cli(server, "gc", "--json", *words, code=code).stdout)
        (item,) = [i for i in items if i["kind"] == "address"]
        assert item["name"] == pod
        return dict(item)

    gone = f"CNI plugin 'add-on' is not in {server.folder}/bin"
    failed = address(code=1)
    assert failed["action"] == "failed" and gone in failed["why"]
    assert address("--force", code=0)["action"] == "removed" and not record.exists()
    assert (
        f"network of sandbox {pod} was released although a CNI plugin failed: {gone}"
        in server.log.read_text()
    )
    nothing_left(server)
