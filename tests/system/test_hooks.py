"""Tests all six kinds of hooks of one container: their order, the state that they get, where they
run, time limits, and the effect of a failure of each."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import Box, Result, Runtime, eventually

KINDS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")


def hook(text: str, **more: Any) -> dict[str, Any]:
    return {"path": "/bin/busybox", "args": ["sh", "-c", text], "env": ["PATH=/bin"], **more}


def with_hooks(runtime: Runtime, shared: Path, *args: str, **kinds: list[dict[str, Any]]) -> Box:
    """Make a container with these hooks, and the folder `shared` at the same path inside."""

    def change(config: dict[str, Any]) -> None:
        config["hooks"] = kinds
        config["mounts"].append({"destination": str(shared), "type": "bind", "source": str(shared),
            "options": ["rbind"]})  # fmt: skip
        config["annotations"] = {"org.example/x": "y"}
        config["root"]["readonly"] = False

    return runtime.box(*(args or ("sleep", "1000")), change=change)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def noting(shared: Path, kind: str, number: int = 0) -> dict[str, Any]:
    return hook(
        f"echo {kind}{number} >> {shared}/order; cat > {shared}/{kind}{number}; readlink "
        f"/proc/self/ns/mnt > {shared}/ns-{kind}{number}"
    )


def test_hooks_run_in_their_order_namespaces_and_state(runtime: Runtime, shared: Path) -> None:
    box = with_hooks(
        runtime, shared, "sh", "-c", f"echo program >> {shared}/order; exec sleep 1000",
        **{kind: [noting(shared, kind, 0), noting(shared, kind, 1)] for kind in KINDS},
    )  # fmt: skip
    box.create().ok()
    # runc runs them at create
    early = ["poststart0", "poststart1"] if not runtime.is_pyrunc else []
    order = (shared / "order").read_text().split()
    assert order == [f"{kind}{number}" for kind in KINDS[:3] for number in (0, 1)] + early
    box.start().ok()
    pid, inside = box.pid, os.readlink(f"/proc/{box.pid}/ns/mnt")
    eventually(lambda: "program" in (shared / "order").read_text())
    order = (shared / "order").read_text().split()[6 + len(early) :]
    assert order[:2] == ["startContainer0", "startContainer1"]
    assert sorted(early + order[2:]) == ["poststart0", "poststart1", "program"]
    box.kill("KILL")
    box.gone()
    box.delete().ok()
    assert (shared / "order").read_text().split()[-2:] == ["poststop0", "poststop1"]
    after_start = "running" if runtime.is_pyrunc else "created"
    statuses = ("creating", "creating", "creating", "created", after_start, "stopped")
    for kind, status in zip(KINDS, statuses, strict=True):
        for number in (0, 1):
            hook_state = json.loads((shared / f"{kind}{number}").read_text())
            assert hook_state["id"] == box.id and hook_state["bundle"] == str(box.folder)
            assert hook_state["annotations"] == {"org.example/x": "y"}
            assert hook_state["ociVersion"]
            assert hook_state["status"] == status, kind
            expected = 1 if kind in ("createContainer", "startContainer") else pid
            assert (hook_state.get("pid") or None) == (None if kind == "poststop" else expected), (
                kind
            )
            place = (shared / f"ns-{kind}{number}").read_text().strip()
            in_container = kind in ("createContainer", "startContainer")
            assert (place == inside) == in_container, kind
            assert in_container or place == os.readlink("/proc/self/ns/mnt")


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("how", ["exit", "time"])
def test_a_failing_hook_undoes_create(runtime: Runtime, shared: Path, kind: str, how: str) -> None:
    bad = hook("echo why >&2; exit 7") if how == "exit" else hook("exec sleep 1000", timeout=1)
    later = hook(f"touch {shared}/later")
    box = with_hooks(
        runtime, shared, **{kind: [bad, later], "poststop": [noting(shared, "poststop")]}
    )
    began = time.monotonic()
    failed = box.create().fails()
    assert time.monotonic() - began < 80
    _words(failed, kind, how)
    assert not (shared / "later").exists()
    assert "does not exist" in runtime("state", box.id).err
    if runtime.is_pyrunc:  # runtime.md, "Lifecycle", step 13
        assert json.loads((shared / "poststop0").read_text())["status"] == "stopped"


def _words(failed: Result, kind: str, how: str) -> None:
    assert f"error running {kind} hook #0" in failed.err
    assert ("exit status 7" if how == "exit" else "") in failed.err
    if how == "exit":
        assert "stderr: why" in failed.err


@pytest.mark.parametrize("how", ["exit", "time"])
def test_a_failing_hook_keeps_the_program_from_starting(
    runtime: Runtime, shared: Path, how: str
) -> None:
    bad = hook("exit 7") if how == "exit" else hook("exec sleep 1000", timeout=1)
    box = with_hooks(runtime, shared, "sh", "-c", f"touch {shared}/ran", startContainer=[bad,
        hook(f"touch {shared}/later")])  # fmt: skip
    box.create().ok()
    began = time.monotonic()
    failed = box.start()
    assert time.monotonic() - began < 80
    if runtime.is_pyrunc:
        failed.fails("error running startContainer hook #0")
    box.gone()
    assert not (shared / "ran").exists() and not (shared / "later").exists()


def test_a_failing_poststart_hook_ends_the_container(runtime: Runtime, shared: Path) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("since runtime-spec 1.3; runc keeps the container")
    box = with_hooks(
        runtime, shared, poststart=[hook("exit 3"), hook(f"touch {shared}/later")],
        poststop=[noting(shared, "poststop")]
    )  # fmt: skip
    box.create().ok()
    pid = box.pid
    box.start().fails("error running poststart hook #0: exit status 3")
    assert not (shared / "later").exists()
    assert (shared / "poststop0").exists()
    assert not Path(f"/proc/{pid}/root/bin").exists()
    assert "does not exist" in runtime("state", box.id).err


def test_a_failing_poststop_hook_is_a_warning(runtime: Runtime, shared: Path) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("runc's delete fails, and runs no further hook")
    box = with_hooks(
        runtime, shared, "true", poststop=[hook("exit 3"), noting(shared, "poststop")]
    ).up()
    box.gone()
    box.delete().ok()
    assert (shared / "poststop0").exists()


@pytest.mark.parametrize("timeout", [None, 1])
def test_the_output_of_a_failing_start_hook_is_reported(
    runtime: Runtime, shared: Path, timeout: int | None
) -> None:
    """The error has the output of the failing hook alone, limited in size."""
    if not runtime.is_pyrunc:
        pytest.skip("runc's start does not wait for this hook")
    early = hook("echo fine >&2")
    end = "exit 7" if timeout is None else "exec sleep 60"
    bad = hook(f"printf 'why\\n\\033[31mred' >&2; head -c 100000 /dev/zero | tr '\\0' x >&2; {end}")
    bad.update({"timeout": timeout} if timeout else {})
    box = with_hooks(runtime, shared, "true", startContainer=[early, bad])
    box.create().ok()
    failures = [box.start(), runtime("run", "--bundle", str(box.folder), f"{box.id}-run")]
    for failed in failures:
        how = "exit status 7" if timeout is None else "it did not end in time and was killed"
        failed.fails(f"error running startContainer hook #1: {how}, stderr: why; ")
        assert "fine" not in failed.err and "\x1b" not in failed.err and len(failed.err) < 5000
    box.gone()
    assert runtime("list", "-q").ok().out.split() == [box.id]


def test_output_of_a_hook_has_no_control_characters(runtime: Runtime, shared: Path) -> None:
    text = "printf 'why\\n\\033[31mred' >&2; exit 7"
    box = with_hooks(runtime, shared, "true", poststop=[hook(text)]).up()
    box.gone()
    output = box.delete().err
    assert "error running poststop hook #0: exit status 7, stdout: , stderr: why" in output
    assert "\x1b" not in output and len(output.splitlines()) == 1


def test_a_hook_gets_its_environment_and_arguments(runtime: Runtime, shared: Path) -> None:
    """A hook gets exactly its configured environment, or an empty one. A startContainer hook
    without an environment gets that of the container's program."""
    plain = {"path": "/bin/busybox", "args": ["env"]}
    to_file = {
        "path": "/bin/busybox",
        "args": ["sh", "-c", f"/bin/busybox env > {shared}/env"],
        "env": ["A=b c", "E="],
    }
    inherits = {
        "path": "/bin/busybox",
        "args": ["sh", "-c", f"/bin/busybox env > {shared}/inherited"],
    }
    box = with_hooks(runtime, shared, createRuntime=[plain, to_file], startContainer=[inherits])
    box.up()
    lines = set((shared / "env").read_text().split("\n"))
    assert {"A=b c", "E="} <= lines
    assert not any(line.startswith(("PATH=/usr/local/sbin", "HOME=", "PYTEST")) for line in lines)
    inherited = shared / "inherited"  # runc's start does not wait for this hook
    eventually(lambda: inherited.exists() and "TERM=xterm" in inherited.read_text().split("\n"))


def test_a_daemon_of_a_hook_delays_no_command(runtime: Runtime, shared: Path) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("runc waits for the end of the hook's output")
    box = with_hooks(
        runtime, shared, "true", createRuntime=[hook(f"sleep 1000 & echo $! > {shared}/pid")]
    )
    began = time.monotonic()
    box.up()
    assert time.monotonic() - began < 60
    os.kill(int((shared / "pid").read_text()), 9)
