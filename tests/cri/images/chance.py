"""Hypothesis strategies: random members of a layer, and changes to the bytes of a valid layer."""

from __future__ import annotations

import io
import os
import tarfile

from hypothesis import HealthCheck, settings
from hypothesis import strategies as some

from cri_server.images.archives import build
from cri_server.images.archives.build import LayerFile, directory, symlink
from tests.cri.images.test_hostile import OPAQUE, device, fifo, hardlink

EXAMPLES = int(os.environ.get("PYRUNC_HOSTILE_EXAMPLES", "400"))
NAMES = some.sampled_from(
    [
        "a",
        "b",
        "a/b",
        "a/b/c",
        ".",
        "..",
        "a/..",
        "/a",
        "../canary/file",
        "l",
        "l/x",
        ".wh.a",
        "a/.wh.b",
        OPAQUE,
        f"a/{OPAQUE}",
        "ä",
        "a" * 200,
    ]
)
NODES = some.one_of(
    some.binary(max_size=20).map(LayerFile),
    some.sampled_from([directory(), directory(0), fifo(), device(0, 0), device(1, 3)]),
    some.sampled_from(["a", "..", "/", "../../canary", "/proc/self/cwd", "a/b"]).map(symlink),
    NAMES.map(hardlink),
)


def every_kind() -> bytes:
    """Return a layer's tar with a member of every kind."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        members = [
            ("d", directory(0o1777)),
            ("d/f", LayerFile(b"content" * 50, pax={"SCHILY.xattr.user.a": "b", "mtime": "1.5"})),
            ("l", symlink("../../canary")),
            ("l/x", LayerFile(b"1")),
            ("h", hardlink("d/f")),
            ("d/.wh.gone", LayerFile()),
            (f"d/{OPAQUE}", LayerFile()),
            ("fifo", fifo()),
            ("null", device(1, 3)),
            ("d", LayerFile(b"replaced")),
            ("n" * 150, LayerFile(b"long")),
            ("sparse", LayerFile(b"xx", pax={"GNU.sparse.map": "0,1,5,1", "GNU.sparse.size": "9"})),
        ]
        for name, node in members:
            build._add(tar, name, node)
    return buffer.getvalue()


WHOLE = every_kind()
MEMBERS = some.lists(some.tuples(NAMES, NODES), max_size=12)
CHANGES = some.lists(
    some.tuples(some.integers(0, len(WHOLE) - 1), some.integers(0, 255)), min_size=1, max_size=12
)
"""Lists of (offset, new value) for bytes of WHOLE."""
RANDOM = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


def changed(changes: list[tuple[int, int]]) -> bytes:
    """Return WHOLE with these bytes changed and the checksums of its headers corrected."""
    blob = bytearray(WHOLE)
    for at, value in changes:
        blob[at] = value
    # with a wrong checksum, no other change to a header would be read
    for at in range(0, len(blob) - 511, 512):
        if blob[at + 257 : at + 262] == b"ustar":
            block = bytes(blob[at : at + 148]) + b" " * 8 + bytes(blob[at + 156 : at + 512])
            blob[at + 148 : at + 156] = b"%06o\0 " % sum(block)
    return bytes(blob)
