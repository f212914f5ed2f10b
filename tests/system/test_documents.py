"""Tests what a runtime prints about itself: features, version, and the configuration that `spec`
writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.system.harness import Runtime


def test_features_and_version_are_printed(runtime: Runtime) -> None:
    document = runtime("features").ok().json
    assert {"rro", "bind", "nosuid"} <= set(document["mountOptions"])
    assert document["ociVersionMin"] == "1.0.0" and "mount" in document["linux"]["namespaces"]
    assert "spec: 1." in runtime("--version").ok().out


def test_spec_writes_a_configuration_that_runs(runtime: Runtime, tmp_path: Path) -> None:
    box = runtime.box("true")
    (box.folder / "config.json").unlink()
    runtime("spec", "--bundle", str(box.folder)).ok()
    runtime("spec", "--bundle", str(box.folder)).fails("exists")
    config = json.loads((box.folder / "config.json").read_text())
    config["root"]["path"] = str(runtime.rootfs)
    config["process"] |= {"terminal": False, "args": ["sh", "-c", "exit 5"]}
    (box.folder / "config.json").write_text(json.dumps(config))
    assert runtime("run", "--bundle", str(box.folder), box.id).code == 5


def test_a_bundle_can_have_a_long_path_of_any_bytes(runtime: Runtime, tmp_path: Path) -> None:
    box = runtime.box("sh", "-c", "exit 3")
    folder = os.fsencode(tmp_path)
    for part in (b"x" * 250, b"y" * 250, b"n\xffn utf8 \n newline"):
        folder = os.path.join(folder, part)
        os.mkdir(folder)
    (Path(os.fsdecode(folder)) / "config.json").write_bytes(
        (box.folder / "config.json").read_bytes()
    )
    assert runtime("run", "--bundle", os.fsdecode(folder), box.id).code == 3
