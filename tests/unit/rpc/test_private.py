"""Tests requests and replies of private calls between servers and clients of different versions."""

from __future__ import annotations

import json

import pytest

from cri_server.rpc import private
from pyrunc.errors import InvalidArgument
from pyrunc.records import Request


def test_a_sent_request_is_read_unchanged() -> None:
    for request in (
        private.LoadImage("/a/b.tar"),
        private.PullImage("busybox", {"username": "me"}),
        private.Timeline("pod", 3),
        private.CollectGarbage(True, False),
    ):
        kind = type(request)
        assert private.decoder(kind)(private.encode(request)) == request


def test_replies_have_the_form_that_older_clients_read() -> None:
    assert json.loads(
        private.encode(private.TransferUpdate(private.TransferProgress("fetching", 1, 2)))
    ) == {"progress": {"stage": "fetching", "fetched_bytes": 1, "total_bytes": 2}}
    assert json.loads(private.encode(private.TransferUpdate(id="sha256:x"))) == {"id": "sha256:x"}
    images = private.LoadedImages([private.LoadedImage("sha256:x", ["a:b"])])
    assert json.loads(private.encode(images)) == {
        "images": [{"id": "sha256:x", "repo_tags": ["a:b"]}]
    }
    assert json.loads(private.encode(private.Empty())) == {}


def test_a_null_name_of_an_older_client_means_no_name() -> None:
    assert private.decoder(private.LoadImage)(b'{"path": "/a", "name": null}') == private.LoadImage(
        "/a"
    )


@pytest.mark.parametrize(
    ("kind", "message", "problem"),
    [
        (private.LoadImage, {"path": "a.tar"}, "LoadImage: path is 'a.tar', not an absolute path"),
        (private.TagImage, {"source": "x"}, "TagImage: target is missing"),
        (
            private.CollectGarbage,
            {"dry_run": 1, "images": True},
            "CollectGarbage: dry_run is 1, not true or false",
        ),
        (private.PauseContainer, {}, "PauseContainer: id is missing"),
    ],
)
def test_a_wrong_field_is_refused_with_its_call_and_name(
    kind: type[Request], message: dict[str, object], problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        private.decoder(kind)(private.encode(message))
