"""Tests SIGHUP: a running server applies changed settings, names those that need a restart, and
changes nothing when a file is wrong."""

from __future__ import annotations

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from cri_server.images.formats.digests import digest_of
from tests.cri import inner_registry
from tests.cri.server_harness import IMAGE, Server, code_of, server_fixture
from tests.support.processes import wait_until

DONE = ("the configuration is reloaded", "the configuration is not reloaded")


server = server_fixture("module")


def reload(server: Server, text: str) -> str:
    """Reload the configuration `text`; return what the server logs about the reload."""
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


def test_a_reload_names_the_keys_that_need_a_restart(server: Server) -> None:
    assert not pinned(server)
    output = reload(server, f"[images]\npinned = [{json.dumps(IMAGE)}]\n[streaming]\nport = 1\n")
    assert pinned(server)
    assert f'images.pinned is now ["{IMAGE}"], it was []' in output
    assert "streaming.port stays 0 until the server is restarted; the file says 1" in output
    assert "1 of 2 changed settings applied" in output


def test_a_reload_changes_the_limits_of_new_containers(server: Server) -> None:
    reload(server, '[containers]\nrlimits = ["nofile=77:99"]\n')
    pod = server.run_pod()
    container = server.launch(pod)
    assert server.output(container, "sh", "-c", "ulimit -Sn; ulimit -Hn").split() == ["77", "99"]
    server.remove_pod(pod)


def test_a_flag_overrides_the_reloaded_network_folder(server: Server) -> None:
    # A flag sets this folder, too.
    reload(server, '[network]\nconf_dir = "/nonexistent"\n')
    conditions = server.runtime.Status(api.StatusRequest()).status.conditions
    assert all(condition.status for condition in conditions)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "[images]\npinnd = []\npinned = []",
            "test.toml:2: images.pinnd: no such key; did you mean pinned?",
        ),
        ("[images", "test.toml: not TOML"),
        ('[containers]\nrlimits = ["nofile=unlimited"]', "test.toml:2: containers.rlimits[0]"),
    ],
)
def test_an_invalid_file_changes_nothing(server: Server, text: str, why: str) -> None:
    reload(server, f"[images]\npinned = [{json.dumps(IMAGE)}]\n")
    output = reload(server, f"{text}\n[server]\nlog_level = 'debug'\n")
    assert "is not reloaded, nothing has changed" in output and why in output
    assert pinned(server)


def test_the_log_changes_its_level_and_form(server: Server) -> None:
    output = reload(server, '[server]\nlog_format = "json"\n')
    [line] = [line for line in output.splitlines() if "changed settings applied" in line]
    assert "changed settings applied" in json.loads(line)["message"]
    output = reload(server, "")
    assert 'server.log_format is now "text", it was "json"' in output


def test_reloads_do_not_disturb_running_pulls(server: Server, tmp_path: Path) -> None:
    """A hundred SIGHUPs with valid and invalid files do not end running pulls; the last
    configuration applies to the next pull. No descriptor stays open."""
    chance = random.Random(7)
    images = [build.image([build.layer({"file": chance.randbytes(8_000)})]) for _ in range(4)]
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"default": [{"type": "reject"}]}))  # every image
    texts = ("", "[images\n", '[registry]\nconfig_path = "/nonexistent"\n')
    with (
        inner_registry.inside(server, tmp_path / "registry") as registry,
        ThreadPoolExecutor(4) as pool,
    ):
        for number, image in enumerate(images):
            registry.push(f"app{number}:v1", image, compress="")
        layers = "|".join(digest_of(image.layers[0]) for image in images)
        # The layers arrive byte by byte.
        registry.fault(layers, byte_delay_s=0.0003)
        reload(server, "")
        before = len(os.listdir(f"/proc/{server.pid}/fd"))

        def pull(number: int) -> str:
            reference = api.ImageSpec(image=f"{registry.host}/app{number}:v1")
            return str(
                server.image.PullImage(api.PullImageRequest(image=reference), timeout=100).image_ref
            )

        pulls = [pool.submit(pull, number) for number in range(4)]
        assert wait_until(lambda: len(registry.requested(layers)) == 4, 30)
        for number in range(100):
            (server.folder / "config.toml.d" / "test.toml").write_text(texts[number % 3])
            os.kill(server.pid, signal.SIGHUP)
        assert "is reloaded" in reload(
            server, f"[registry]\nsignature_policy = {json.dumps(str(policy))}\n"
        )
        assert not any(future.done() for future in pulls)
        registry.faults.clear()
        assert len({future.result() for future in pulls}) == 4
        assert code_of(lambda: pull(0)).name == "UNKNOWN"
        assert "the configuration is reloaded" in reload(server, "")
        pull(0)
        assert wait_until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) <= before + 4, 30)
