"""Tests a server whose start fails: it reports the reason and ends no pod."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.operations.steps import FAILPOINT
from tests.cri.server_harness import Server
from tests.cri.test_recovery import nothing_but_networks, nothing_left
from tests.support.processes import wait_until

SOON_S = 30.0
LATE_S = 300.0
PASS_ON = """[ $CNI_COMMAND = ADD ] || exit 0
exec python3 -IS -c 'import json, sys; print(json.dumps(json.load(sys.stdin)["prevResult"]))'
"""


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    folder = tmp_path / "plugins"
    folder.mkdir()
    return folder


@pytest.fixture
def server(plugins: Path) -> Iterator[Server]:
    nri = {
        "enabled": True,
        "socket": str(plugins.parent / "nri.sock"),
        "plugin_dir": str(plugins),
        "registration_timeout_s": LATE_S,
    }
    with Server(settings={"nri": nri}) as started:
        started.load_image()
        yield started


def fails_to_start(server: Server) -> None:
    with pytest.raises(AssertionError):
        server.start()


def test_stopping_a_starting_server_does_not_wait(server: Server, plugins: Path) -> None:
    """SIGTERM ends a server at once while it waits for an NRI plugin that never registers."""
    container = server.launch(server.run_pod())
    server.stop()
    program, begun = plugins / "10-silent", plugins.parent / "begun"
    # The plugin stands for slow imports on a busy machine.
    program.write_text(f"#!/bin/sh\ntouch {begun}\nexec sleep {LATE_S}\n")
    program.chmod(0o700)
    before = server.log.stat().st_size
    starting = threading.Thread(target=fails_to_start, args=(server,))
    starting.start()
    assert wait_until(begun.exists, SOON_S), server.tail()
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < SOON_S
    starting.join()
    log = server.log.read_text()[before:]
    assert "the server stops, its pods continue" in log and "Traceback" not in log
    program.unlink()
    server.start()
    assert server.status(container).state == api.CONTAINER_RUNNING
    server.remove_all()
    nothing_left(server)


def test_unreadable_images_end_the_start_but_no_pod(server: Server) -> None:
    container = server.launch(server.run_pod())
    server.stop()
    blobs = server.root / "images" / "blobs"
    blobs.rename(blobs.with_suffix(".away"))
    blobs.write_text("")
    with pytest.raises(AssertionError, match=r"pyrunc-cri: .*/images/blobs"):
        server.start()
    assert server.wait() == 1 and "Traceback" not in server.tail()
    blobs.unlink()
    blobs.with_suffix(".away").rename(blobs)
    server.start()
    assert server.output(container, "echo", "here") == "here\n"
    server.remove_all()
    nothing_left(server)


@pytest.mark.parametrize("fault", ["exit 1", f"exec sleep {LATE_S}"])
def test_a_failing_plugin_does_not_block_the_start(server: Server, fault: str) -> None:
    """If a CNI plugin fails or hangs at DEL, a starting server still ends an unfinished pod, and
    calls the plugin again later."""
    conflist = server.folder / "net.d" / "10-pods.conflist"
    network = json.loads(conflist.read_text())
    network["plugins"].append({"type": "moody"})
    conflist.write_text(json.dumps(network))
    mended, plugin = server.folder / "mended", server.folder / "bin" / "moody"
    plugin.parent.mkdir(exist_ok=True)
    plugin.write_text(
        f"#!/bin/sh\n[ $CNI_COMMAND = DEL ] && [ ! -e {mended} ] && {fault}\n{PASS_ON}"
    )
    plugin.chmod(0o700)
    server.stop()
    server.start(**{FAILPOINT: "run_sandbox.network=kill"})
    with pytest.raises(grpc.RpcError):
        server.run_pod()
    assert server.wait() == -signal.SIGKILL
    began = time.monotonic()
    server.start()
    assert time.monotonic() - began < SOON_S
    assert "partly created sandbox" in server.tail()
    nothing_but_networks(server)
    mended.touch()
    assert wait_until(lambda: not list((server.root / "network").glob("*.json")), 2 * SOON_S), (
        server.tail()
    )
    nothing_left(server)
