"""Tests containers whose root is mounted over the host's root, without pivot_root, as on a ramdisk;
and a container without a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import Runtime


def test_no_pivot_moves_the_root_instead(runtime: Runtime) -> None:
    box = runtime.box("sh", "-c", "pwd; ls /; touch /x 2>&1; cat /proc/keys; exec sleep 1000")
    result = box.create("--no-pivot").ok()
    box.start().ok()
    inside = box.exec("sh", "-c", "ls / | tr '\\n' ' '; mount | grep -c ' type proc '").ok()
    assert "bin dev" in inside.out and inside.out.split()[-1] == "1"
    assert result.out.splitlines()[:1] in ([], ["/"])
    assert Path(f"/proc/{box.pid}/root/bin/busybox").exists()


def test_a_private_root_needs_pivot(runtime: Runtime) -> None:
    box = runtime.box("true", rootfsPropagation="private")
    box.create("--no-pivot").fails("")


def _no_process(config: dict[str, Any]) -> None:
    del config["process"]


def test_create_needs_no_process_and_start_does(runtime: Runtime) -> None:
    # runtime-spec allows this at create, and demands an error at start.
    box = runtime.box(change=_no_process)
    if not runtime.is_pyrunc:
        box.create().fails("process property must not be empty")
        return
    box.create().ok()
    assert box.status == "created" and box.pid > 0
    box.start().fails("process property must not be empty")
    assert box.status == "created"
    box.delete().ok()
    box.create().ok()
    box.kill("KILL").ok()
    box.gone()
    box.delete().ok()


def test_run_needs_a_process(runtime: Runtime) -> None:
    box = runtime.box(change=_no_process)
    runtime("run", "--bundle", str(box.folder), box.id).fails("process property must not be empty")
    assert "does not exist" in runtime("state", box.id).err


@pytest.mark.parametrize("keep", [False, True])
def test_an_annotation_keeps_the_callers_groups(runtime: Runtime, keep: bool) -> None:
    """A container keeps the caller's groups if it has crun's annotation, which podman's
    `--group-add keep-groups` sets."""
    if keep and not runtime.is_pyrunc:
        pytest.skip("runc does not know the annotation")

    def change(config: dict[str, Any]) -> None:
        config["annotations"] = {"run.oci.keep_original_groups": "1"} if keep else {}
        config["process"]["capabilities"] = None

    box = runtime.box("sleep", "1000", change=change)
    box.create(extra_groups=[7, 4321]).ok()
    box.start().ok()
    for text in (Path(f"/proc/{box.pid}/status").read_text(), box.exec("cat", "/proc/self/status",
        extra_groups=[7, 4321]).out):  # fmt: skip
        (line,) = [row for row in text.splitlines() if row.startswith("Groups:")]
        assert line.split()[1:] == (["7", "4321"] if keep else [])
