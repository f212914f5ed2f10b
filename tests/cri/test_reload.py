"""SIGHUP: a running server takes what can change, names what cannot, and stays as it is when a file is wrong."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import IMAGE, Server
from tests.support.processes import wait_until

DONE = ("the configuration is reloaded", "the configuration is not reloaded")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as made:
        made.load_image()
        yield made


def reload(server: Server, text: str) -> str:
    """What the server logs about it."""
    folder = server.folder / "config.toml.d"
    folder.mkdir(exist_ok=True)
    (folder / "test.toml").write_text(text)
    before = len(server.log.read_text())
    os.kill(server.pid, signal.SIGHUP)

    def said() -> str:
        return server.log.read_text()[before:]

    assert wait_until(lambda: any(word in said() for word in DONE), 30), server.tail()
    return said()


def pinned(server: Server) -> bool:
    [image] = server.image.ListImages(api.ListImagesRequest()).images
    return bool(image.pinned)


def test_what_can_change_changes_and_the_rest_is_named(server: Server) -> None:
    assert not pinned(server)
    said = reload(server, f"[images]\npinned = [{json.dumps(IMAGE)}]\n[streaming]\nport = 1\n")
    assert pinned(server)
    assert f'images.pinned is now ["{IMAGE}"], it was []' in said
    assert "streaming.port stays 0 until the server is restarted: 1 was read" in said
    assert "1 of 2 differences taken" in said


def test_limits_of_containers_to_come(server: Server) -> None:
    reload(server, '[containers]\nrlimits = ["nofile=77:99"]\n')
    pod = server.run_pod()
    container = server.launch(pod)
    assert server.output(container, "sh", "-c", "ulimit -Sn; ulimit -Hn").split() == ["77", "99"]
    server.remove_pod(pod)


def test_another_folder_of_network_configurations(server: Server) -> None:
    """The one of the command line stays: flags win."""
    reload(server, '[network]\nconf_dir = "/nonexistent"\n')
    conditions = server.runtime.Status(api.StatusRequest()).status.conditions
    assert all(condition.status for condition in conditions)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[images]\npinnd = []\npinned = []", "test.toml:2: images.pinnd: no such key; did you mean pinned?"),
        ("[images", "test.toml: not TOML"),
        ('[containers]\nrlimits = ["nofile=unlimited"]', "test.toml:2: containers.rlimits[0]"),
    ],
)
def test_a_file_that_is_wrong_changes_nothing(server: Server, text: str, why: str) -> None:
    reload(server, f"[images]\npinned = [{json.dumps(IMAGE)}]\n")
    said = reload(server, f"{text}\n[server]\nlog_level = 'debug'\n")
    assert "is not reloaded, all stays as it is" in said and why in said
    assert pinned(server)


def test_the_log_changes_its_level_and_form(server: Server) -> None:
    said = reload(server, '[server]\nlog_format = "json"\n')
    [line] = [line for line in said.splitlines() if "differences taken" in line]
    assert "differences taken" in json.loads(line)["message"]
    said = reload(server, "")
    assert 'server.log_format is now "text", it was "json"' in said
