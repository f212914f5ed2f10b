"""Tests the life of a container from create to delete: states, exit codes, and the texts that
callers match."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.system.console import receive_terminal
from tests.system.harness import Runtime, eventually


def test_a_container_is_created_started_killed_and_deleted(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    result = box.create().ok()
    assert result.out == "" and result.err == ""
    assert box.status == "created"
    box.start().ok()
    assert box.status == "running"
    box.kill("KILL").ok()
    box.gone()
    box.delete().ok()
    runtime("state", box.id).fails("does not exist")


def test_the_program_does_not_run_before_start(runtime: Runtime, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    mount = {"destination": "/tmp", "source": str(marks), "type": "bind", "options": ["bind"]}
    box = runtime.box("touch", "/tmp/ran", change=lambda c: c["mounts"].append(mount))
    box.create().ok()
    assert not (marks / "ran").exists()
    box.start().ok()
    eventually((marks / "ran").exists)


def test_state_has_all_required_fields(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60", change=lambda c: c.update(annotations={"a.b": "c"}))
    box.up()
    state = box.state
    assert state["id"] == box.id and state["ociVersion"].startswith("1.")
    assert state["bundle"] == str(box.folder) and state["rootfs"] == str(runtime.rootfs)
    assert state["annotations"]["a.b"] == "c"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", state["created"])
    assert Path(f"/proc/{state['pid']}/cmdline").read_bytes().split(b"\0")[0] == b"sleep"


def test_a_stopped_container_has_no_pid(runtime: Runtime) -> None:
    box = runtime.box("true")
    box.up().gone()
    assert box.state["pid"] == 0


def test_an_id_cannot_be_used_twice(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    box.up()
    pid = box.pid
    box.create().fails("already exist" if runtime.is_pyrunc else "exist")
    assert box.status == "running" and box.pid == pid


@pytest.mark.parametrize("bad", ["", "a/b", "..", "a b", "é"])
def test_an_invalid_id_creates_nothing(runtime: Runtime, bad: str) -> None:
    box = runtime.box("true")
    runtime("create", "--bundle", str(box.folder), bad).fails()
    assert not runtime.root.exists() or not any(runtime.root.iterdir())


def test_start_needs_a_created_container(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    box.up()
    box.start().fails("cannot start an already running container")
    box.kill("KILL").ok()
    box.gone()
    box.start().fails("cannot start a container that has stopped")


def test_a_running_container_is_deleted_by_force_only(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    box.up()
    box.delete().fails("not stopped")
    assert box.status == "running"
    box.delete("--force").ok()
    runtime("state", box.id).fails("does not exist")


def test_a_created_container_can_be_deleted(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    box.create().ok()
    pid = box.pid
    box.delete("--force").ok()
    eventually(lambda: not Path(f"/proc/{pid}/exe").exists() or _is_zombie(pid))


def _is_zombie(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_deleting_a_missing_container_is_an_error(runtime: Runtime) -> None:
    runtime("delete", "nobody").fails("does not exist")
    runtime("delete", "--force", "nobody").ok()


def test_kill_of_a_missing_or_stopped_container_fails(runtime: Runtime) -> None:
    runtime("kill", "nobody", "KILL").fails("does not exist")
    box = runtime.box("true")
    box.up().gone()
    box.kill("TERM").fails("not running")


@pytest.mark.parametrize("signal", ["KILL", "SIGKILL", "9", "kill"])
def test_signals_are_accepted_by_name_and_number(runtime: Runtime, signal: str) -> None:
    box = runtime.box("sleep", "60")
    box.up()
    box.kill(signal).ok()
    box.gone()


def test_kill_sends_sigterm_by_default(runtime: Runtime, tmp_path: Path) -> None:
    script = "trap 'exit 0' TERM; while true; do sleep 0.05; done"
    box = runtime.box("sh", "-c", script)
    box.up()

    def ended() -> bool:  # pid 1 does not get the signal before the trap is set
        box.kill()
        return box.status == "stopped"

    eventually(ended)


def test_unknown_signals_are_refused(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    box.up()
    box.kill("FOO").fails()
    assert box.status == "running"


def test_a_created_container_takes_signals(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    box.create().ok()
    box.kill("KILL").ok()
    box.gone()


def test_run_gives_the_programs_exit_code(runtime: Runtime) -> None:
    assert runtime.run("sh", "-c", "exit 7").code == 7


def test_run_reports_a_signal_as_128_and_its_number(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    command = runtime.command("run", "--bundle", str(box.folder), box.id)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as running:
        eventually(lambda: runtime("state", box.id).code == 0 and box.status == "running")
        box.kill("KILL").ok()
        assert running.wait(60) == 137


def test_run_forwards_signals(runtime: Runtime) -> None:
    box = runtime.box("sh", "-c", "trap 'exit 5' TERM; echo set; while true; do sleep 0.05; done")
    command = runtime.command("run", "--bundle", str(box.folder), box.id)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stdout.readline() == b"set\n"
        eventually(lambda: runtime("state", box.id).code == 0 and box.status == "running")
        running.terminate()
        assert running.wait(60) == 5


def test_run_forwards_a_signal_that_comes_before_the_poststart_hooks_end(
    runtime: Runtime, tmp_path: Path
) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("runc runs the hooks before the program")
    go = tmp_path / "go"
    wait = ["sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done"]
    hooks = {"poststart": [{"path": "/bin/busybox", "args": wait}]}
    script = "trap 'exit 5' TERM; echo set; while true; do sleep 0.05; done"
    box = runtime.box("sh", "-c", script, change=lambda c: c.update(hooks=hooks))
    command = runtime.command("run", "--bundle", str(box.folder), box.id)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stdout.readline() == b"set\n"
        running.terminate()
        go.touch()
        assert running.wait(60) == 5


def test_run_reaps_the_orphans_of_a_container_without_a_pid_namespace(
    runtime: Runtime, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    mount = {"destination": "/tmp", "source": str(marks), "type": "bind", "options": ["bind"]}
    kinds = [{"type": kind} for kind in ("mount", "network", "ipc", "uts")]
    # Each subshell ends before its child.
    orphan = "(until [ -e /tmp/go ]; do sleep 0.05; done &)"
    script = f"for i in $(seq 10); do {orphan}; done; exec sleep 60"
    box = runtime.box(
        "sh", "-c", script, change=lambda c: c["mounts"].append(mount), namespaces=kinds
    )
    command = runtime.command("run", "--bundle", str(box.folder), box.id)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as running:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        eventually(lambda: len(children.read_text().split()) == 11)
        (marks / "go").touch()
        eventually(lambda: len(children.read_text().split()) == 1)
        box.kill("KILL").ok()
        assert running.wait(60) == 137


def test_run_keeps_the_exit_code_while_orphans_end_at_once(runtime: Runtime) -> None:
    kinds = [{"type": kind} for kind in ("mount", "network", "ipc", "uts")]
    # Each SIGCHLD interrupts the handler of the one before.
    script = "for i in $(seq 400); do (true & true & true &); done; exit 3"
    box = runtime.box("sh", "-c", script, namespaces=kinds)
    assert runtime("run", "--bundle", str(box.folder), box.id).fails(code=3).err == ""


def test_run_passes_output_and_input_through(runtime: Runtime) -> None:
    box = runtime.box("cat")
    result = runtime("run", "--bundle", str(box.folder), box.id, stdin="to and fro\n").ok()
    assert result.out == "to and fro\n" and result.err == ""


def test_run_deletes_its_container(runtime: Runtime) -> None:
    box = runtime.box("true")
    runtime("run", "--bundle", str(box.folder), box.id).ok()
    runtime("state", box.id).fails("does not exist")


def test_run_detached_returns_at_once(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    runtime("run", "--detach", "--bundle", str(box.folder), box.id).ok()
    assert box.status == "running"


def test_the_pid_file_holds_the_pid_and_nothing_else(runtime: Runtime, tmp_path: Path) -> None:
    box = runtime.box("sleep", "60")
    file = tmp_path / "pid"
    box.create("--pid-file", str(file)).ok()
    assert file.read_text() == str(box.pid)


def test_later_edits_of_the_bundle_have_no_effect(runtime: Runtime) -> None:
    box = runtime.box("sh", "-c", "sleep 60")
    box.create().ok()
    config = json.loads((box.folder / "config.json").read_text())
    config["process"]["args"] = ["false"]
    (box.folder / "config.json").write_text(json.dumps(config))
    box.start().ok()
    assert box.status == "running"


def test_options_stand_before_or_after_the_id(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    runtime("create", box.id, "--bundle", str(box.folder)).ok()
    assert box.status == "created"


def test_the_init_becomes_a_child_of_the_caller(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    box.create().ok()
    stat = Path(f"/proc/{box.pid}/stat").read_text()
    assert int(stat[stat.rindex(")") + 4 :].split()[0]) == os.getpid()


def test_nothing_is_mounted_on_the_host(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    box.up()
    assert str(runtime.folder) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])
def test_a_signal_ends_a_container_that_waits_for_start(runtime: Runtime, name: str) -> None:
    box = runtime.box("sleep", "1000")
    box.create().ok()
    # The waiting process handles the signal, because the kernel drops unhandled signals to process
    # 1 of a pid namespace.
    box.kill(name).ok()
    box.gone()
    box.start().fails("cannot start a container that has stopped")
    box.delete().ok()


def test_a_signal_through_the_pidfd_ends_a_created_container(
    runtime: Runtime, tmp_path: Path
) -> None:
    box = runtime.box("sleep", "1000")
    with receive_terminal(tmp_path / "socket") as receiver:
        box.create("--pidfd-socket", str(tmp_path / "socket")).ok()
        assert box.status == "created"
        signal.pidfd_send_signal(receiver.master, signal.SIGTERM)
        box.gone()


def test_the_program_starts_with_default_signal_handlers(runtime: Runtime) -> None:
    box = runtime.box("sh", "-c", "grep ^Sig /proc/self/status; exec sleep 1000").up()
    masks = dict(
        re.findall(r"^(Sig\w+):\s*(\w+)$", Path(f"/proc/{box.pid}/status").read_text(), re.M)
    )
    assert {masks[name] for name in ("SigBlk", "SigIgn", "SigCgt")} == {"0" * 16}
