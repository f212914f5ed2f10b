"""Attacks with code of a container that must never run in the runtime.

The image and the runtime's working directory are full of modules, libraries and configuration that
an interpreter or libc would load; each would leave a mark.
"""

from __future__ import annotations

import ast
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import pyrunc
from tests.security.attack import refused
from tests.support.sources import python_files
from tests.system.console import receive_terminal
from tests.system.harness import Runtime

MULTIARCH = f"{platform.machine()}-linux-gnu"

Config = dict[str, Any]
PACKAGE = Path(pyrunc.__file__).parent
TRAP = "open({mark!r}, 'a').write(__name__ + '\\n')\nraise SystemExit('trapped')\n"
MODULES = ["json", "os", "sitecustomize", "usercustomize", "encodings/__init__", "encodings/idna",
    "traceback", "linecache", "pyrunc/__init__",
           "msgspec", "click", "socket", "struct", "errno", "prctl", "tokenize"]  # fmt: skip
LIBRARY = (
    '__attribute__((constructor)) static void f(void) { FILE *m = fopen("%s", "a"); if (m) {'
    ' fputs("lib", m); fclose(m); } }'
)


def trap(folder: Path, mark: Path) -> None:
    """Fill a folder with modules that leave a mark when they are imported."""
    for name in MODULES:
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(TRAP.format(mark=str(mark)))


@pytest.fixture
def mark(tmp_path: Path, rootfs: Path) -> Path:
    """Put modules and libraries into the image and a folder that make a file as soon as a program
    loads them. Return the path of this file."""
    path = tmp_path / "mark"
    for place in (
        "usr/lib/python3.11",
        "usr/lib/python3/dist-packages",
        "root/.local/lib/python3.11/site-packages",
        "usr/local/lib/python3.11/dist-packages",
    ):
        trap(rootfs / place, path)
    trap(tmp_path / "here", path)
    source = tmp_path / "trap.c"
    source.write_text(f"#include <stdio.h>\n{LIBRARY % path}\n")
    library = tmp_path / "trap.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    libraries = rootfs / f"usr/lib/{MULTIARCH}"
    libraries.mkdir(parents=True)
    for name in (
        "libnss_files.so.2",
        "libnss_compat.so.2",
        "libc.so.6",
        "libgcc_s.so.1",
        "libseccomp.so.2",
        "ISO8859-1.so",
    ):
        shutil.copy(library, libraries / name)
    (rootfs / "etc/ld.so.preload").write_text(f"/usr/lib/{MULTIARCH}/libnss_files.so.2\n")
    (rootfs / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    return path


def test_no_module_of_the_image_is_loaded(runtime: Runtime, tmp_path: Path, mark: Path) -> None:
    """The image, the working directory and the environment offer hostile modules and libraries to
    run, create, start and exec, also with a terminal, a filter, hooks, unknown users and errors.
    None is loaded: their mark exists neither on the host nor in the image."""
    seccomp = {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["reboot"], "action": "SCMP_ACT_ERRNO"}],
    }

    def change(config: Config) -> None:
        python = [
            "PYTHONPATH=/usr/lib/python3.11",
            "PYTHONSTARTUP=/usr/lib/python3.11/os.py",
            f"LD_PRELOAD=/usr/lib/{MULTIARCH}/libc.so.6",
            "PYTHONHOME=/usr",
        ]
        config["process"]["env"] += python
        config["process"]["user"] = {"uid": 4242, "gid": 4242}
        config["linux"]["seccomp"] = seccomp
        config["hooks"] = {
            "startContainer": [{"path": "/bin/true"}],
            "createContainer": [{"path": "/bin/true"}],
            "poststop": [{"path": "/bin/true"}],
        }

    here = {
        "cwd": tmp_path / "here",
        "env": {
            "PYTHONPATH": str(tmp_path / "here"),
            "PYTHONSTARTUP": str(tmp_path / "here/os.py"),
            "PYTHONUSERBASE": str(tmp_path / "here"),
        },
    }
    box = runtime.box("sleep", "60", change=change)
    box.create(**here).ok()
    runtime("start", box.id, **here).ok()
    box.exec("true", **here).ok()
    box.exec("nosuchprogram", **here).fails("", code=255)
    box.exec("true", options=["--cwd", "/no/such", "--user", "77:88"], **here)
    runtime("state", box.id, **here).ok()
    # Errors load traceback and linecache.
    for broken in (
        {"args": ["/etc"]},
        {"cwd": "/etc/passwd"},
        {"rlimits": [{"type": "RLIMIT_CORE", "soft": 2, "hard": 1}]},
    ):
        bad = runtime.box(
            "true", change=lambda c, broken=broken: (change(c), c["process"].update(broken))
        )
        refused(runtime("run", "--bundle", str(bad.folder), bad.id, **here))
    tty = runtime.box("true", change=lambda c: (change(c), c["process"].update(terminal=True)))
    with receive_terminal(tmp_path / "c") as console:
        tty.create("--console-socket", str(console.path), **here).ok()
        tty.start().ok()
        assert console.master >= 0
    assert not mark.exists(), mark.read_text()
    assert not (runtime.rootfs / str(mark).lstrip("/")).exists()


def test_the_interpreter_runs_in_isolated_mode(runtime: Runtime) -> None:
    """The installed `pyrunc` starts the interpreter with `-I` and `-S`, and only root can write to
    the script and its package."""
    program = Path(runtime.program[0])
    first = program.read_bytes()[:64].split(b"\n")[0]
    # Otherwise a program starts the interpreter.
    if first.startswith(b"#!"):
        flags = first.split()[1]
        assert flags.startswith(b"-") and b"I" in flags and b"S" in flags
    for path in (program, *python_files(PACKAGE), *(PACKAGE / "native").iterdir()):
        status = path.stat()
        assert status.st_uid == 0 and not status.st_mode & 0o022, path


NEAR_ROOTS = [
    "container/create.py",
    "launch/run.py",
    "container/exec.py",
    "compile/rootfs_probe.py",
    "compile/copyup.py",
    "kernel/path.py",
    "plan",
    "program",
]
BANNED = {"shutil", "tempfile", "glob", "pathlib"}


def test_modules_for_a_containers_files_join_no_paths() -> None:
    """Modules that touch a container's files import no path functions and never join a path to that
    of the container's root."""
    files = [
        f
        for name in NEAR_ROOTS
        for f in (
            [PACKAGE / name] if name.endswith(".py") else sorted((PACKAGE / name).glob("*.py"))
        )
    ]
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not BANNED & {name.partition(".")[0] for name in names}, (file, names)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "os.path.join",
                "os.makedirs",
                "os.path.realpath",
                "os.walk",
            ):
                words = ast.unparse(node)
                # os.path.join is only for the bundle and for the runtime's own files.
                assert ast.unparse(node.func) == "os.path.join", (file, words)
                assert (
                    "bundle" in words
                    or "LAUNCHER" in words
                    or "__file__" in words
                    or "tree.root" in words
                ), (file, words)


def test_a_container_inherits_no_settings_of_the_caller(runtime: Runtime) -> None:
    """The caller of `run` has hostile environment variables. The container has environment and
    umask of the configuration."""
    env = {"LD_PRELOAD": "/evil.so", "CALLER": "secret", "PYTHONINSPECT": "1"}
    box = runtime.box(
        "sh", "-c", "cat /proc/self/environ; umask; grep -E 'Sig(Ign|Blk)' /proc/self/status"
    )
    result = runtime("run", "--bundle", str(box.folder), box.id, env=env)
    assert "secret" not in result.out and "evil" not in result.out and "0022" in result.out
    assert os.environ.get("CALLER") is None
