"""Content digests: `sha256:` or `sha512:`, then the hash in lower-case hex. The OCI image
specification registers these two algorithms.

Files on disk are named by the hex alone; its length gives the algorithm.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash

SHA256, SHA512 = "sha256", "sha512"
ALGORITHMS = (SHA256, SHA512)
HEX_LENGTHS = {64: SHA256, 128: SHA512}
DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")


def is_digest(text: object) -> bool:
    """Return whether `text` is a sha256 or sha512 digest."""
    return isinstance(text, str) and DIGEST.fullmatch(text) is not None


def algorithm_of(digest: str | None) -> str:
    """Return the algorithm of a digest. For None, which means that no digest is expected, return
    sha256."""
    return SHA512 if digest is not None and digest.startswith("sha512:") else SHA256


def hasher(algorithm: str) -> _Hash:
    """Return a new hash object for one of ALGORITHMS."""
    return hashlib.sha512() if algorithm == SHA512 else hashlib.sha256()


def digest_of(data: bytes, algorithm: str = SHA256) -> str:
    """Return the digest of `data`."""
    content_hash = hasher(algorithm)
    content_hash.update(data)
    return f"{algorithm}:{content_hash.hexdigest()}"


def is_content(data: bytes, digest: str) -> bool:
    """Return whether `digest` is the digest of `data`."""
    return digest_of(data, algorithm_of(digest)) == digest


def hex_of(digest: str) -> str:
    """Return the hex part of a digest: the name of the file with this content in the store. Text
    without an algorithm is returned unchanged."""
    return digest.rpartition(":")[2]


def digest_from_hex(name: str) -> str:
    """Return the digest whose hex part is `name`, a file's name in the store; the reverse of
    `hex_of`."""
    return f"{HEX_LENGTHS.get(len(name), SHA256)}:{name}"
