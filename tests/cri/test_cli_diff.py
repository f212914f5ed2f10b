"""Tests `pyrunc-cri diff`, which compares the writable layer with the image, for unpacked and for
mounted images."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cri_server.images.archives import build
from tests.cri.client_verbs import ok
from tests.cri.server_harness import Server

CHANGES = """
echo more >> /etc/passwd
rm /etc/group
mkdir -p /made/deep && echo new > /made/deep/file
ln -s /etc /made/link
touch /tmp/come && rm /tmp/come
rm -r /opt/whole && mkdir /opt/whole && touch /opt/whole/b
rm -r /opt/folder && ln -s /etc /opt/folder
"""
PREPARED = {
    "opt/whole/a": b"",
    "opt/whole/b": b"",
    "opt/whole/sub/c": b"",
    "opt/folder/passwd": b"",
    "opt/untouched": b"",
}


REFERENCE = "docker.io/library/changes:1"


@pytest.fixture(params=["unpacked", "erofs"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(settings={"images": {"store": request.param}}) as server:
        layers = [*build.busybox().layers, build.layer(PREPARED), build.layer({"opt/upper": b""})]
        image = build.image(layers, {"Env": ["PATH=/bin"], "Cmd": ["sh"]})
        server.load_image(build.docker_archive({REFERENCE: image}))
        yield server
        server.remove_all()


def launch(server: Server, *command: str) -> str:
    config = server.container_config(command or ("sleep", "3600"))
    config.image.image = REFERENCE
    return server.launch(server.run_pod(server.pod_config(), host_network=True), config)


def test_diff_lists_the_changes_of_a_container(server: Server) -> None:
    container = launch(server)
    server.output(container, "sh", "-ec", CHANGES)
    running = ok(server, "diff", container).lines
    assert running == [
        "C /etc",
        "D /etc/group",
        *("A /etc/hostname", "A /etc/hosts"),  # mount points that the image lacks
        "C /etc/passwd",
        "A /etc/resolv.conf",
        *("A /made", "A /made/deep", "A /made/deep/file", "A /made/link"),
        "C /opt",
        "C /opt/folder",
        *("C /opt/whole", "D /opt/whole/a", "C /opt/whole/b", "D /opt/whole/sub"),
        "C /tmp",
    ]
    server.stop_container(container)
    assert ok(server, "diff", container).lines == running, "diff works for an ended container, too"
