"""Tests that manifests and configurations of hostile images occupy little memory, or are
refused."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import pytest

from cri_server.images.formats import manifest as manifests
from cri_server.images.formats.manifest import BadManifest, ImageConfiguration

DIGEST = "sha256:" + "0" * 64
CONFIG = {"mediaType": manifests.OCI_CONFIG, "digest": DIGEST, "size": 1}
LAYER = {"mediaType": manifests.OCI_LAYER, "digest": DIGEST, "size": 1}
MANIFEST = {"schemaVersion": 2, "config": CONFIG, "layers": [LAYER]}
NAMES = [f"{number:x}" for number in range(20_000)]
NESTED = [[{}] for _ in NAMES]
TEXTS = dict.fromkeys(NAMES, "")


def configuration(**fields: Any) -> dict[str, Any]:
    return {"rootfs": {"type": "layers", "diff_ids": [DIGEST]}, "config": fields}


@pytest.mark.parametrize(
    "document",
    [
        {**MANIFEST, "annotations": {"name": NESTED}},
        {**MANIFEST, "annotations": TEXTS},
        {**MANIFEST, "layers": [{**LAYER, "annotations": TEXTS}]},
        {**MANIFEST, "config": {**CONFIG, "annotations": TEXTS}},
        configuration(Volumes={"/a": NESTED}),
        configuration(Volumes={name: {} for name in NAMES}),
        configuration(Env=NAMES),
        configuration(Labels=TEXTS),
    ],
    ids=[
        "values of annotations",
        "annotations",
        "annotations of a layer",
        "annotations of the configuration",
        "values of volumes",
        "volumes",
        "variables",
        "labels",
    ],
)
def test_a_stored_image_keeps_little_memory(document: dict[str, Any]) -> None:
    data = json.dumps(document).encode()
    parse = manifests.parse_config if "rootfs" in document else manifests.parse
    parse(json.dumps(configuration() if "rootfs" in document else MANIFEST).encode())
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        parsed: object = None
        try:
            parsed = parse(data)
        except BadManifest as error:
            assert f"more than {manifests.ENTRIES_LIMIT}" in error.message
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 64 << 10, parsed
    finally:
        tracemalloc.stop()


def test_what_containers_use_is_kept() -> None:
    annotated = {**MANIFEST, "annotations": {"name": [1], "other": "text"}}
    manifest = manifests.parse(json.dumps(annotated).encode())
    assert isinstance(manifest, manifests.Manifest)
    assert manifest.annotations == {"name", "other"}
    parsed: ImageConfiguration = manifests.parse_config(
        json.dumps(configuration(Volumes={"/a": {}, "/b": None}, Labels={"a": "b"})).encode()
    )
    assert list(parsed.image.volumes) == ["/a", "/b"] and parsed.image.labels == {"a": "b"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"a\ud800b", "a\ufffdb"),
        (r"\uDC00\uD83D", "\ufffd\ufffd"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\ud83d\ud83d\ude00\ude00", "\ufffd\U0001f600\ufffd"),
        (r"\\ud800", r"\ud800"),
        (r"\\\ud800", "\\\ufffd"),
        (r"\"\ud800\"", '"\ufffd"'),
        (r"\u0041\\ud800\n\ud800", "A\\ud800\n\ufffd"),
    ],
)
def test_only_half_of_a_surrogate_pair_is_replaced(text: str, value: str) -> None:
    data = json.dumps(configuration(User="USER")).replace("USER", text).encode()
    assert manifests.parse_config(data).image.user == value
