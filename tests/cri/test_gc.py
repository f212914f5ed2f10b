"""Tests `pyrunc-cri gc`: it removes leftovers of every kind, reports why other objects stay, and
changes nothing in a dry run."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pyrunc.kernel.process import alive_since
from pyrunc.zygote.descendants import below
from tests.cri.client_verbs import local_cli
from tests.cri.server_harness import IMAGE, Server, image_archive, server_fixture
from tests.support.processes import comm

OTHER = "registry.test/other:1"
ID = "0123456789abcdef" * 4


server = server_fixture("module")


def run(server: Server, *words: str, code: int = 0) -> str:
    done = local_cli(server, "gc", *words, code=code)
    assert done.stderr == b""
    return done.stdout.decode()


Things = dict[tuple[str, str], dict[str, str]]


def gc(server: Server, *words: str) -> Things:
    """Run `gc`; return a dict: (kind, name) -> item of its report."""
    return {
        (item["kind"], item["name"]): item for item in json.loads(run(server, "--json", *words))
    }


def gone(things: Things, action: str = "removed") -> set[tuple[str, str]]:
    return {key for key, item in things.items() if item["action"] == action}


def litter(server: Server) -> dict[tuple[str, str], Path]:
    """Make one unused thing of each kind; return a dict: (kind, name) in gc's words -> path."""
    images = server.root / "images"
    stray = {
        ("blob", "1" * 64): images / "blobs/sha256" / ("1" * 64),
        ("layer", "2" * 64): images / "layers" / ("2" * 64) / "tree/etc",
        ("download", "blob-x"): images / "ingest/blob-x",
        ("download", "layer-x"): images / "ingest/layer-x/tree/etc",
        ("trash", "3-x"): images / "trash/3-x/tree",
        ("pod's folders", ID): server.root / "sandboxes" / ID / "hosts",
        ("container's folders", ID): server.root / "containers" / ID / "upper/data",
        ("file", f"{server.root}/containers/{ID}.json.1.tmp"): server.root
        / "containers"
        / f"{ID}.json.1.tmp",
    }
    for path in stray.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 10_000)
    state = server.state / "containers" / ID
    state.mkdir()
    return stray


def test_gc_removes_leftovers_and_keeps_used_files(server: Server) -> None:
    pod = server.run_pod(server.pod_config("kept"))
    running = server.launch(pod)
    before = tree(server)
    stray = litter(server)
    littered = tree(server)

    things = gc(server, "--dry-run")
    assert gone(things, "remove") == set(stray) and not gone(things)
    assert tree(server) == littered
    assert all(int(item["size_bytes"]) >= 10_000 for key, item in things.items() if key in stray)

    things = gc(server)
    assert gone(things) == set(stray)
    assert tree(server) == before
    assert gone(gc(server)) == set()

    assert things["image", IMAGE]["why"] == f"used by {running[:12]}"
    assert things["pod", f"default/kept {pod[:12]}"]["why"] == "it is ready"
    assert things["container", f"c {running[:12]}"]["why"] == "it is running"
    assert server.output(running, "echo", "alive") == "alive\n"
    server.remove_pod(pod)


def tree(server: Server) -> set[str]:
    """Return all names of folders and files, except the content of containers' layers, and the
    timeline, which the server writes at any time."""
    return {
        os.path.join(folder, name)
        for top in (server.root, server.state)
        for folder, folders, files in os.walk(top)
        if "/upper" not in folder or ID in folder
        for name in (*folders, *files)
        if "timeline" not in (name, os.path.basename(folder))
    }


def test_gc_removes_unused_images_only_on_request(server: Server) -> None:
    server.load_image(image_archive(OTHER, {"bin/x": b"x" * 100_000}))
    pod = server.run_pod()
    server.create(pod)
    things = gc(server)
    assert "--images removes it" in things["image", OTHER]["why"] and not gone(things)
    assert gone(gc(server, "--images", "--dry-run"), "remove") == {("image", OTHER)}
    things = gc(server, "--images")
    assert gone(things) == {("image", OTHER)} and things["image", IMAGE]["action"] == "keep"
    assert gone(gc(server, "--dry-run"), "remove") == set()
    server.remove_pod(pod)


def test_unknown_files_are_reported_and_not_removed(server: Server) -> None:
    strange = [
        server.root / "somebody's",
        server.root / "images/notes",
        server.root / "sandboxes/x.damaged",
    ]
    for path in strange:
        path.write_text("precious")
    things = gc(server)
    for path in strange:
        assert things["unknown", str(path)]["action"] == "keep" and path.read_text() == "precious"
        path.unlink()
    assert "set aside" in things["unknown", str(strange[2])]["why"]
    assert not any(kind == "unknown" for kind, _ in gc(server)), "gc knows the server's own files"


def test_the_text_and_the_log_list_removed_items(server: Server) -> None:
    trash = server.root / "images/trash/x"
    trash.write_bytes(b"x" * 10_000)
    text = run(server, "--dry-run")
    assert (
        text.startswith("ACTION")
        and "it is in the trash" in text
        and "1 item would be removed: 12.3kB" in text
    )
    assert "0 items removed" not in text and trash.exists()
    assert "1 item removed" in run(server) and not trash.exists()
    *_, line = [line for line in server.tail(500).splitlines() if "CollectGarbage" in line]
    assert "removed=1" in line and "outcome=OK" in line


def test_gc_ends_an_unfinished_pod_with_its_shim() -> None:
    """If a pod's record is lost while the server runs, gc ends the pod, as a starting server
    does."""
    with Server(network=False) as server:
        pod = server.run_pod(server.pod_config("lost"), host_network=True)
        (server.root / "sandboxes" / f"{pod}.json").unlink()
        server.kill()
        hidden = server.state / "sandboxes" / pod
        record_copy = server.folder / "hidden"
        hidden.rename(record_copy)  # from the recovery of the server that starts
        server.start()
        record_copy.rename(hidden)
        shim = json.loads((hidden / "shim.json").read_text())["pid"]
        pauses = [pid for pid in below(shim) if comm(pid) == "pause"]
        assert len(pauses) == 1
        assert ("pod's folders", pod) in gone(gc(server))
        assert not hidden.exists() and alive_since(pauses[0]) is None
