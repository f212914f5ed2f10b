"""Version: the first thing that a client asks."""

from __future__ import annotations

import re

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server


@pytest.mark.requirement("1.b.1", "10.5.5")
@pytest.mark.parametrize("asked", ["", "0.1.0", "v9"])
def test_the_versions_that_kubelet_expects(server: Server, asked: str) -> None:
    version = server.runtime.Version(api.VersionRequest(version=asked))
    assert (version.version, version.runtime_api_version) == ("0.1.0", "v1")
    assert version.runtime_name == "pyrunc" and re.match(r"\d+\.\d+", version.runtime_version)
