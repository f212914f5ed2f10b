"""Tests that checkpointctl shows a container of the server's archives; CRIU's images are only
placeholders."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cri_server.checkpoints import describe, dump, layer, names
from tests.support import toolchain
from tests.unit.checkpoints.test_read import container


@pytest.mark.slow
def test_checkpointctl_shows_the_container(tmp_path: Path) -> None:
    work, upper, archive = tmp_path / "work", tmp_path / "upper", tmp_path / "a.tar"
    (work / names.IMAGES).mkdir(parents=True)
    (work / names.IMAGES / "inventory.img").write_bytes(b"x" * 2048)
    upper.mkdir()
    (upper / "file").write_bytes(b"y" * 4096)
    annotations = {
        "io.kubernetes.cri.container-name": "web",
        "io.kubernetes.cri.sandbox-name": "pod",
        "io.kubernetes.cri.sandbox-namespace": "ns",
    }
    documents = {
        **describe.files(container(), 1_700_000_001_500_000_000, ""),
        names.SPEC: {"ociVersion": "1.2.0", "annotations": annotations},
        names.DELETED: [],
    }
    for name, content in documents.items():
        (work / name).write_text(json.dumps(content))
    layer.write(str(upper), str(work / names.LAYER), lambda: -1)
    dump.pack({"work": str(work), "target": str(archive)}, [])
    output = subprocess.run(
        [toolchain.checkpointctl(), "show", archive], capture_output=True, text=True, check=True
    ).stdout
    for word in (
        "web",
        "registry.test/app:1",
        "cccccccccccc",
        "pyrunc",
        "2023-11-14T22:13:20Z",
        "2.0 KiB",
    ):
        assert word in output, output
