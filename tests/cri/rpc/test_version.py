"""Version, the first call of a client: the reply, and unknown fields in the request."""

from __future__ import annotations

import re

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.api import api_pb2_grpc
from tests.cri.server_harness import Server


@pytest.mark.requirement("1.b.1", "10.5.5")
@pytest.mark.parametrize("requested", ["", "0.1.0", "v9"])
def test_version_returns_what_kubelet_expects(server: Server, requested: str) -> None:
    version = server.runtime.Version(api.VersionRequest(version=requested))
    assert (version.version, version.runtime_api_version) == ("0.1.0", "v1")
    assert version.runtime_name == "pyrunc" and re.match(r"\d+\.\d+", version.runtime_version)


@pytest.mark.requirement("1.10")
def test_unknown_fields_are_ignored(server: Server) -> None:
    call = server.channel.unary_unary(
        "/runtime.v1.RuntimeService/Version", response_deserializer=api.VersionResponse.FromString
    )
    # Another version of the interface may have more fields.
    field_200_of_text = b"\xc2\x0c\x03abc"
    assert (
        call(api.VersionRequest(version="0.1.0").SerializeToString() + field_200_of_text).version
        == "0.1.0"
    )


@pytest.mark.requirement("1.1")
@pytest.mark.parametrize("authority", ["localhost", "another.test:1"])
def test_both_services_are_on_the_same_socket(server: Server, authority: str) -> None:
    options = [("grpc.default_authority", authority)]
    with grpc.insecure_channel(f"unix://{server.socket}", options=options) as channel:
        runtime = api_pb2_grpc.RuntimeServiceStub(channel)  # type: ignore[no-untyped-call]
        image = api_pb2_grpc.ImageServiceStub(channel)  # type: ignore[no-untyped-call]
        assert runtime.Version(api.VersionRequest(), timeout=30).runtime_api_version == "v1"
        assert image.ImageFsInfo(api.ImageFsInfoRequest(), timeout=30).image_filesystems
