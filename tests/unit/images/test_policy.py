"""Tests the policy file: which scope decides, which references a signature may name, and malformed
files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cri_server.images.formats.reference import Reference
from cri_server.images.signatures.policy import (
    Identity,
    Requirement,
    identity_matches,
    read,
    scopes_of,
)
from pyrunc.errors import WrongState

ACCEPT, REJECT = [{"type": "insecureAcceptAnything"}], [{"type": "reject"}]
DIGEST = "sha256:" + "0" * 64


def write(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "policy.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_scopes_are_ordered_from_the_image_to_the_default() -> None:
    assert list(scopes_of(Reference.parse("r.a.example:5000/b/c:v1"))) == [
        "r.a.example:5000/b/c:v1", "r.a.example:5000/b/c", "r.a.example:5000/b", "r.a.example:5000",
        "*.a.example:5000", "*.example:5000", "",
    ]  # fmt: skip
    assert (
        next(scopes_of(Reference.parse(f"busybox@{DIGEST}")))
        == f"docker.io/library/busybox@{DIGEST}"
    )


@pytest.mark.parametrize(
    ("image", "scope"),
    [
        ("r.example/team/app:v1", "r.example/team/app:v1"),
        ("r.example/team/app:v2", "r.example/team"),
        ("r.example/teammate/app:v1", "r.example"),
        ("sub.r.example/x", "*.r.example"),
        ("a.b.r.example/x", "*.r.example"),
        ("xr.example/x", "all of docker"),
    ],
)
def test_the_most_specific_scope_decides(tmp_path: Path, image: str, scope: str) -> None:
    scopes = dict.fromkeys(
        ("", "r.example", "r.example/team", "r.example/team/app:v1", "*.r.example"), REJECT
    )
    policy = read(write(tmp_path, {"default": ACCEPT, "transports": {"docker": scopes}}))
    decided_by, requirements = policy.requirements(Reference.parse(image))
    assert decided_by == scope and [each.type for each in requirements] == ["reject"]


@pytest.mark.parametrize(
    ("scope", "images"),
    [
        (
            "r.example/team",
            ["R.EXAMPLE/team/a", "r.example:443/team/a:v1", f"R.example:0443/team/a@{DIGEST}"],
        ),
        ("R.example:443/team", ["r.example/team/a"]),
        (
            "docker.io/team",
            [
                "index.docker.io/team/a",
                "REGISTRY-1.docker.io/team/a",
                "docker.io:443/team/a",
                "team/a",
            ],
        ),
        ("registry-1.docker.io/library", ["busybox", "Docker.io/busybox"]),
        ("docker.io/busybox:1", ["busybox:1", "index.docker.io/library/busybox:1"]),
        ("127.0.0.1:5000", ["127.1:5000/a", "0x7f000001:5000/a", "[::ffff:7f00:1]:5000/a"]),
        ("[::1]:5000/a", ["[0::1]:5000/a"]),
        ("*.Example:443", ["R.example/a", "a.r.EXAMPLE:443/a"]),
        ("localhost", ["LOCALHOST/a", "localhost:80/a"]),
    ],
)
def test_no_spelling_of_a_registry_escapes_its_scope(
    tmp_path: Path, scope: str, images: list[str]
) -> None:
    policy = read(write(tmp_path, {"default": ACCEPT, "transports": {"docker": {scope: REJECT}}}))
    for image in images:
        _, [requirement] = policy.requirements(Reference.parse(image))
        assert requirement.type == "reject", image


def test_an_image_without_a_scope_has_the_default_policy(tmp_path: Path) -> None:
    content = {
        "default": REJECT,
        "transports": {"docker": {"r.example": ACCEPT}, "dir": {"": [{"type": "x"}]}},
    }
    policy = read(write(tmp_path, content))
    assert policy.requirements(Reference.parse("busybox"))[0] == "default"


@pytest.mark.parametrize(
    ("identity", "image", "claimed", "meant"),
    [
        ({}, "r.example/a:v1", "r.example/a:v1", True),
        ({}, "r.example/a:v1", "r.example/a:v2", False),
        ({}, "r.example/a:v1", "r.example/a", False),
        ({}, "r.example/a", "r.example/a:latest", True),
        ({}, f"r.example/a@{DIGEST}", "r.example/a", True),
        ({}, f"r.example/a@{DIGEST}", "r.example/b", False),
        ({"type": "matchRepository"}, "r.example/a:v1", "r.example/a", True),
        ({"type": "matchRepository"}, "r.example/a:v1", "r.example/a:v9", True),
        ({"type": "matchRepository"}, "busybox", "index.docker.io/library/busybox", True),
        ({"type": "matchRepository"}, "r.example/a:v1", "r.example/ab", False),
        ({"type": "matchRepository"}, "r.example/a:v1", "R.example:443/a", True),
        ({"type": "matchRepository"}, "r.example/a:v1", "r.example:5000/a", False),
        ({"type": "matchExact"}, "R.example:443/a:v1", "r.example/a:v1", True),
        (
            {"type": "exactRepository", "dockerRepository": "O.example:443/a"},
            "r.example/z",
            "o.example/a",
            True,
        ),
        (
            {"type": "remapIdentity", "prefix": "M.example:443/x", "signedPrefix": "V.example"},
            "m.example/x/a/b:v1",
            "v.example/a/b:v1",
            True,
        ),
        ({"type": "matchRepository"}, "r.example/a:v1", "NO reference", False),
        ({"type": "matchExact"}, f"r.example/a@{DIGEST}", "r.example/a:v1", False),
        ({"type": "matchExact"}, "r.example:5000/a:v1", "r.example:5000/a:v1", True),
        (
            {"type": "exactReference", "dockerReference": "o.example/a:v1"},
            "r.example/a:v2",
            "o.example/a:v1",
            True,
        ),
        (
            {"type": "exactReference", "dockerReference": "o.example/a:v1"},
            "r.example/a:v1",
            "o.example/a:v2",
            False,
        ),
        (
            {"type": "exactRepository", "dockerRepository": "o.example/a"},
            "r.example/z",
            "o.example/a:v2",
            True,
        ),
        (
            {"type": "exactRepository", "dockerRepository": "o.example/a"},
            "o.example/b",
            "o.example/b",
            False,
        ),
        (
            {"type": "remapIdentity", "prefix": "m.example/x", "signedPrefix": "v.example"},
            "m.example/x/a/b:v1",
            "v.example/a/b:v1",
            True,
        ),
        (
            {"type": "remapIdentity", "prefix": "m.example/x", "signedPrefix": "v.example"},
            "m.example/xy/b:v1",
            "v.exampley/b:v1",
            False,
        ),
    ],
)
def test_the_reference_of_a_signature_must_match_the_policy(
    identity: dict[str, str], image: str, claimed: str, meant: bool, tmp_path: Path
) -> None:
    signed = [
        {
            "type": "sigstoreSigned",
            "keyData": "eA==",
            **({"signedIdentity": identity} if identity else {}),
        }
    ]
    [requirement] = read(write(tmp_path, {"default": signed})).file.default
    assert identity_matches(requirement.signed_identity, Reference.parse(image), claimed) == meant


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Expecting property name"),
        ({}, "missing required field `default`"),
        ({"default": []}, "default: the list of requirements is empty"),
        ({"default": ACCEPT, "transport": {}}, "unknown field `transport`"),
        (
            '{"default": [{"type": "reject"}], "default": [{"type": "reject"}]}',
            "key 'default' occurs twice",
        ),
        ({"default": [{"type": "signedBy", "keyPath": "/x"}]}, "'signedBy' is not one of"),
        (
            {"default": [{"type": "sigstoreSigned"}]},
            "needs one of keyPath, keyPaths, keyData and keyDatas",
        ),
        (
            {"default": [{"type": "sigstoreSigned", "keyPath": "/x", "keyData": "eA=="}]},
            "needs one of",
        ),
        (
            {"default": [{"type": "sigstoreSigned", "keyPath": "/x", "rekorPublicKeyPath": "/y"}]},
            "unknown field",
        ),
        ({"default": [{"type": "reject", "keyPath": "/x"}]}, "reject has no keys"),
        (
            {
                "default": ACCEPT,
                "transports": {"docker": {"r.example": REJECT, "R.example:443": ACCEPT}},
            },
            "'r.example' and 'R.example:443' are the same scope",
        ),
        ({"default": ACCEPT, "transports": {"docker": {"r.example/A:1": ACCEPT}}}, "r.example/A:1"),
        (
            {"default": ACCEPT, "transports": {"docker": {"r": []}}},
            "transports.docker.r: the list of requirements is empty",
        ),
        (
            {
                "default": [
                    {
                        "type": "sigstoreSigned",
                        "keyPath": "/x",
                        "signedIdentity": {"type": "exactReference"},
                    }
                ]
            },
            "exactReference takes dockerReference",
        ),
    ],
)
def test_an_invalid_file_is_refused_as_a_whole(tmp_path: Path, content: Any, why: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(WrongState) as caught:
        read(path)
    assert path in caught.value.message and why in caught.value.message


def test_keys_come_from_files_and_from_the_policy(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k")
    assert Requirement("sigstoreSigned", key_paths=[str(tmp_path / "key")] * 2).public_keys() == [
        b"k",
        b"k",
    ]
    assert Requirement("sigstoreSigned", key_datas=["eA==", "eQ=="]).public_keys() == [b"x", b"y"]
    with pytest.raises(ValueError, match="not base64"):
        Requirement("sigstoreSigned", key_data="?").public_keys()
    assert Identity().type == "matchRepoDigestOrExact"
