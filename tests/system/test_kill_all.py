"""Tests that every process of a container gets a signal, also where it shares its pid namespace."""

from __future__ import annotations

from pathlib import Path

from tests.system.harness import Runtime, eventually


def test_kill_reaches_every_process_without_a_pid_namespace(runtime: Runtime) -> None:
    kinds = [{"type": kind} for kind in ("mount", "network", "ipc", "uts")]
    box = runtime.box("sh", "-c", "sleep 71 & sleep 72 & wait", namespaces=kinds).up()
    eventually(lambda: len(runtime("ps", "-f", "json", box.id).ok().json) == 3)
    pids = runtime("ps", "-f", "json", box.id).ok().json
    runtime("kill", "--all", box.id, "KILL").ok()
    eventually(lambda: all(_dead(pid) for pid in pids))


def _dead(pid: int) -> bool:
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_delete_ends_leftovers_of_a_shared_pid_namespace(runtime: Runtime) -> None:
    kinds = [{"type": kind} for kind in ("mount", "network", "ipc", "uts")]
    box = runtime.box("sh", "-c", "sleep 73 & wait", namespaces=kinds).up()
    eventually(lambda: len(runtime("ps", "-f", "json", box.id).ok().json) == 2)
    pids = runtime("ps", "-f", "json", box.id).ok().json
    runtime("kill", box.id, "TERM").ok()
    box.gone()
    box.delete("--force").ok()
    eventually(lambda: all(_dead(pid) for pid in pids))
