"""Stands in for systemd-run, systemctl or sudo, whichever name it is called by: Kubernetes' node
suite starts and restarts its kubelet as a transient unit, and this machine runs no systemd.

A unit is a folder of `UNITS`: `command` (JSON: argv), `log` (a path) and `pid` (pid and start time
of its process).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

UNITS = Path(os.environ.get("KUBE_E2E_NODE_UNITS", ""))
STOP_TIMEOUT_S = 20.0


def systemd_run(arguments: list[str]) -> int:
    """Start a unit: `systemd-run -p StandardError=append:LOG --unit=NAME … COMMAND …`; or print
    `--version`."""
    if arguments == ["--version"]:
        print("systemd 252 (252)")
        return 0
    unit, log = "", "/dev/null"
    while arguments and arguments[0].startswith("-"):
        option = arguments.pop(0)
        if option == "-p":
            key, _, value = arguments.pop(0).partition("=")
            log = value.partition(":")[2] if key == "StandardError" else log
        elif option.startswith("--unit="):
            unit = option.partition("=")[2]
    folder = _unit(unit)
    folder.mkdir(parents=True)
    (folder / "log").write_text(log)
    # systemd reads % and $ in a unit's command, so the suite writes them twice.
    command = [word.replace("%%", "%").replace("$$", "$") for word in arguments]
    (folder / "command").write_text(json.dumps(command))
    _start(folder)
    return 0


def systemctl(arguments: list[str]) -> int:
    """Run `list-units [--state=running]`, `restart`, `kill`, `stop` or `reset-failed` on units that
    this stand-in has started."""
    verb, *names = [word for word in arguments if not word.startswith("-")]
    if verb == "list-units":
        running_only = "--state=running" in arguments
        for folder in sorted(UNITS.iterdir()):
            if _pid(folder) or not running_only:
                print(folder.name)
        return 0
    for name in names:
        folder = _unit(name)
        if not folder.is_dir():
            print(f"Unit {name} not loaded.", file=sys.stderr)
            return 5
        if verb in ("kill", "stop", "restart"):
            _stop(folder)
        if verb == "restart":
            _start(folder)
    return 0


def sudo(arguments: list[str]) -> int:
    """Execute the command itself, because the suite runs as root already."""
    os.execvp(arguments[0], arguments)


def _unit(name: str) -> Path:
    return UNITS / f"{name.removesuffix('.service')}.service"


def _start(folder: Path) -> None:
    with open((folder / "log").read_text(), "ab") as log:
        process = subprocess.Popen(
            json.loads((folder / "command").read_text()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (folder / "pid").write_text(f"{process.pid} {_start_time(process.pid)}")


def _stop(folder: Path) -> None:
    """Send SIGTERM, and SIGKILL after `STOP_TIMEOUT_S`; return when the process has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_TIMEOUT_S
        if pid := _pid(folder):
            os.kill(pid, number)
        while _pid(folder) and time.monotonic() < deadline:
            time.sleep(0.05)


def _pid(folder: Path) -> int:
    """Return the pid of the unit's process; 0 when it has ended."""
    try:
        pid, started = map(int, (folder / "pid").read_text().split())
    except (FileNotFoundError, ValueError):
        return 0
    return pid if _start_time(pid) == started != 0 else 0


def _start_time(pid: int) -> int:
    """Return a process' start time, field 22 of proc_pid_stat(5); 0 for one that has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state in "ZX" else int(fields[18])


PROGRAMS = {"systemd-run": systemd_run, "systemctl": systemctl, "sudo": sudo}

if __name__ == "__main__":
    sys.exit(PROGRAMS[Path(sys.argv[0]).name](sys.argv[1:]))
