"""Attacks with image configurations that have unexpected values: texts with NUL and line ends,
invalid digits, lone surrogates, hundreds of thousands of entries."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server
from tests.security.test_server import image, outcome

CONFIGS: dict[str, dict[str, Any]] = {
    "NUL in the user": {"User": "root\0x"},
    "a lone surrogate in the user": {"User": "\ud800"},
    "lone surrogates": {"Env": ["A=\udfff"], "Labels": {"\udc00": "\ud800x"}, "Cmd": ["\ud8ff"]},
    "digits of another script": {"User": "\u0661"},
    "a superscript": {"User": "\u00b2:\u00b2"},
    "a signal of no digits": {"StopSignal": "SIGRTMIN+\u00b2"},
    "a long signal": {"StopSignal": "9" * 5000},
    "NUL in the working directory": {"WorkingDir": "/a\0b"},
    "a long working directory": {"WorkingDir": "/" + "a/" * 5000},
    "a working directory that climbs": {"WorkingDir": "../../.."},
    "variables without a name": {"Env": ["", "=", "=x", "PATH"]},
    "NUL in a variable": {"Env": ["PATH=/bin", "A=b\0C=d"]},
    "many variables": {"Env": ["PATH=/bin", *(f"V{n}=x" for n in range(200_000))]},
    "a long variable": {"Env": ["PATH=/bin", "A=" + "x" * 3_000_000]},
    "volumes that climb": {"Volumes": {"/../../../etc/x": {}, "..": {}, "": {}, "/": {}}},
    "NUL in a volume": {"Volumes": {"/a\0b": {}}},
    "many volumes": {"Volumes": {f"/v/{n}": {} for n in range(3000)}},
    "volumes over the kernel's": {"Volumes": {"/proc": {}, "/sys/fs/cgroup": {}, "/dev": {}}},
    "labels with NUL": {"Labels": {"a\0": "b\0", "\x1b[2J": "\n"}},
    "wrong kinds": {"Env": "PATH=/bin", "User": 0, "Volumes": [], "Labels": [1]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_unexpected_configurations_do_no_harm(server: Server, host_pod: str, name: str) -> None:
    """The server refuses the image, CreateContainer or StartContainer with an error that shows no
    Python exception, or the container runs. The server continues, and its log has no traceback."""
    before = len(server.log.read_text())
    words = ""
    try:
        spec = image(server, **CONFIGS[name])
        code, lines = outcome(server, host_pod, "true", image=spec)
        words = " ".join(lines) if code == -1 else ""
        assert code in (-1, 0, 127, 126), (code, lines[:3])
    except grpc.RpcError as error:
        words = str(error.details())  # type: ignore[attr-defined]
    finally:
        for container in server.containers():
            server.remove_container(container.id)
    assert server.image.ListImages(api.ListImagesRequest()).images
    assert not re.search(r"[a-z]Error\b|Traceback|INTERNAL", words), words[:500]
    assert "Traceback" not in server.log.read_text()[before:]
    assert outcome(server, host_pod, "true")[0] == 0
