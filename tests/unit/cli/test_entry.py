"""Tests the program `pyrunc` in its two forms: a script, and an executable that contains the
interpreter and begins at a snapshot."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pyrunc
from pyrunc.cli.entry import script
from tests.support.bundle import runtime

PACKAGE = Path(pyrunc.__file__).parent
# In place of the command line: what a command sees of its process, as JSON.
PROBE = """
import _signal, _thread, os, posix, sys


def main():
    if sys.argv[1] == "--version":
        return 0
    if sys.argv[1] == "memory":
        for _ in range(4000):
            bytes(65536)
        with open("/proc/self/status") as file:
            print([line.split()[1] for line in file if line.startswith("VmHWM")][0])
        sys.stdout.flush()
        return 0
    lock = _thread.allocate_lock()
    lock.acquire()
    seen = []
    _thread.start_new_thread(lambda: (seen.append(_thread.get_ident()), lock.release()), ())
    lock.acquire()
    import json, random, threading

    facts = {
        "arguments": sys.argv[1:],
        "environ": dict(os.environ),
        "bytes": [name.decode() for name in os.environb]
        == list(os.environ)
        == [n.decode() for n in posix.environ],
        "input": sys.stdin.read() if sys.stdin else None,
        "errors": [stream and stream.errors for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "interrupt": [_signal.SIG_IGN, _signal.default_int_handler].index(_signal.getsignal(2)),
        "pid": os.getpid(),
        "native": threading.main_thread().native_id,
        "threads": len({*seen, _thread.get_ident(), threading.main_thread().ident}),
        "random": random.random(),
    }
    posix.write(3, json.dumps(facts).encode())
    return 7
"""


def test_the_script_is_isolated_with_a_fixed_path() -> None:
    text = script("/usr/bin/python3", ["/a", "/b"])
    assert text.startswith("#!/usr/bin/python3 -IS\n") and "sys.path += ['/a', '/b']" in text
    compile(text, "pyrunc", "exec")


Installer = Callable[..., Path]


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Installer:
    """Return a function: it copies the package and the interpreter into a new folder, builds
    `bin/pyrunc` from them, and returns the folder."""

    def make(main: str | None = None) -> Path:
        folder = tmp_path_factory.mktemp("installed")
        shutil.copytree(
            PACKAGE, folder / "pyrunc", ignore=shutil.ignore_patterns("__pycache__", "pyrunc-*")
        )
        if main is not None:
            (folder / "pyrunc/cli/main.py").write_text(main)
        shutil.copy(os.path.realpath(sys.executable), folder / "python3")
        (folder / "bin").mkdir()
        command = [folder / "python3", "-m", "pyrunc.cli.entry", "install", "bin"]
        subprocess.run(command, check=True, cwd=folder, env={"PATH": os.environ["PATH"]})
        assert (folder / "bin/pyrunc").read_bytes().startswith(b"\x7fELF"), (
            "Python's static library should be here (libpython3-dev)"
        )
        return folder

    return make


def executed(folder: Path) -> list[str]:
    """Return the names of the programs that `pyrunc --version` executes."""
    command = ["strace", "-f", "-e", "execve", "-qq", str(folder / "bin/pyrunc"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={})
    assert done.stdout.startswith("pyrunc version ")
    lines = [
        line.partition('"')[2].partition('"')[0]
        for line in done.stderr.splitlines()
        if "execve(" in line
    ]
    return [Path(line).name for line in lines]


ITSELF, AS_SCRIPT = ["pyrunc"], ["pyrunc", "python3"]


def test_the_program_gives_way_to_the_script_when_its_snapshot_does_not_fit(
    install: Installer,
) -> None:
    folder = install()
    assert executed(folder) == ITSELF

    def with_change(path: Path, change: Callable[[], object]) -> list[str]:
        content, status = path.read_bytes(), path.stat()
        change()
        try:
            return executed(folder)
        finally:
            path.write_bytes(content)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    source = folder / "pyrunc/errors.py"
    python = folder / "python3"
    snapshot = folder / "pyrunc/native/pyrunc-snapshot"
    assert (
        with_change(source, lambda: source.write_text(source.read_text() + "# changed\n"))
        == AS_SCRIPT
    )
    assert with_change(source, lambda: os.utime(source, ns=(1, 1))) == AS_SCRIPT
    assert with_change(python, lambda: os.utime(python, ns=(1, 1))) == AS_SCRIPT
    assert with_change(snapshot, snapshot.unlink) == AS_SCRIPT
    assert with_change(snapshot, lambda: snapshot.write_bytes(b"")) == AS_SCRIPT
    other = install()
    assert (
        with_change(
            snapshot, lambda: shutil.copy(other / "pyrunc/native/pyrunc-snapshot", snapshot)
        )
        == AS_SCRIPT
    )
    assert executed(folder) == ITSELF, "nothing else was wrong"


def test_the_program_runs_changed_source(install: Installer) -> None:
    folder = install()
    source = folder / "pyrunc/__init__.py"
    source.write_text(source.read_text().replace(pyrunc.__version__, "77.7"))
    done = subprocess.run(
        [folder / "bin/pyrunc", "--version"], capture_output=True, text=True, check=True, env={}
    )
    assert done.stdout.startswith("pyrunc version 77.7\n")


@pytest.fixture(scope="module")
def probe(install: Installer) -> Path:
    return install(PROBE) / "bin/pyrunc"


def look(probe: Path, shell: str, **environment: str) -> dict[str, Any]:
    """Run a shell script that starts the probe as "$@"; return what the probe reports about its
    process."""
    command = ["sh", "-c", f"{shell} 3>&1 >/dev/null", "sh", str(probe), "a", "\udcff é"]
    done = subprocess.run(
        command, input="words", capture_output=True, text=True, env=environment, check=False,
        # whatever we were started with
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert done.returncode == 7 and not done.stderr, done
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_a_command_sees_its_own_process(probe: Path) -> None:
    facts = look(probe, 'exec "$@"', A="1", B="=é")
    assert facts["arguments"] == ["a", "\udcff é"] and facts["input"] == "words" and facts["bytes"]
    assert {name: facts["environ"][name] for name in "AB"} == {"A": "1", "B": "=é"}
    assert facts["errors"] == ["surrogateescape", "surrogateescape", "backslashreplace"]
    assert facts["interrupt"] == 1
    assert facts["pid"] == facts["native"] and facts["threads"] == 2
    again = look(probe, 'exec "$@"')
    assert (
        again["random"] != facts["random"]
        and "A" not in again["environ"]
        and again["pid"] != facts["pid"]
    )


def test_closed_streams_and_an_ignored_interrupt_stay_so(probe: Path) -> None:
    facts = look(probe, 'trap "" INT; exec "$@" <&- 2>&-')
    assert facts["interrupt"] == 0
    assert facts["errors"] == [None, "surrogateescape", None] and facts["input"] is None


def test_a_command_frees_memory(probe: Path) -> None:
    done = subprocess.run([probe, "memory"], capture_output=True, text=True, check=True, env={})
    # A command may live as long as its container.
    assert int(done.stdout) < 40_000, "KiB"


def test_the_tested_program_is_the_built_one() -> None:
    program = runtime()[0]
    # `pip install` after `make build` would replace the program by a script, which loads `site` and
    # takes four times as long.
    if "PYRUNC_RUNTIME" not in os.environ:
        assert Path(program).read_bytes().startswith(b"\x7fELF"), f"{program}: make build"
