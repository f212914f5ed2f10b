"""Tests digests: the supported algorithms, their file names, and the verification of content."""

from __future__ import annotations

import hashlib

import pytest

from cri_server.images.formats import digests
from cri_server.images.store.catalog import id_matches


@pytest.mark.parametrize("algorithm", digests.ALGORITHMS)
def test_a_digest_names_a_file_and_content(algorithm: str) -> None:
    digest = digests.digest_of(b"content", algorithm)
    assert digest == f"{algorithm}:{hashlib.new(algorithm, b'content').hexdigest()}"
    assert digests.is_digest(digest) and digests.algorithm_of(digest) == algorithm
    assert digests.digest_from_hex(digests.hex_of(digest)) == digest
    assert digests.is_content(b"content", digest) and not digests.is_content(b"contents", digest)
    for text in (digest, digest[:12], digests.hex_of(digest), digests.hex_of(digest)[:7], ""):
        assert id_matches(digest, text), text
    assert not id_matches(digest, "sha")


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "0" * 64,
        "sha256:" + "0" * 63,
        "sha256:" + "0" * 128,
        "sha256:" + "A" * 64,
        "sha512:" + "0" * 64,
        "sha512:" + "0" * 127,
        "sha384:" + "0" * 96,
        "md5:" + "0" * 32,
        "sha256:../../../etc/passwd",
        "sha512:" + "0" * 128 + "\n",
    ],
)
def test_digests_that_cannot_be_verified_are_refused(text: str | None) -> None:
    assert not digests.is_digest(text)
