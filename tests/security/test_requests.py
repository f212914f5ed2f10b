"""Attacks with requests that must be carried out exactly or refused: huge, malformed and ambiguous
configurations, names with path tricks, hostile files.

Classes: CVE-2021-43784 (a length that overflows), Python's leniency with numbers, sizes, files that
are pipes and devices, container ids, annotations (CVE-2024-3154 is in test_server).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.security.attack import bind, refused
from tests.system.harness import Runtime

Config = dict[str, Any]


def clean(result: Any) -> None:
    """Assert that the command fails with one line of error, without a traceback or an internal
    error."""
    refused(result)
    assert "Traceback" not in result.err and "internal error" not in result.err, result
    assert len(result.err.strip().splitlines()) == 1, result


def test_seventy_thousand_mappings_are_refused(runtime: Runtime) -> None:
    """CVE-2021-43784: config.json has so many id mappings that a 16-bit length overflows, and the
    rest would be read as other attributes (no namespaces). The command fails with a clean error,
    and no process runs."""
    # The kernel accepts 340 lines.
    lines = [{"containerID": n, "hostID": 100000 + n, "size": 1} for n in range(70000)]

    def change(config: Config) -> None:
        config["linux"]["namespaces"].append({"type": "user"})
        config["linux"].update(uidMappings=lines, gidMappings=lines)

    clean(runtime.run("touch", "/dev/shm/ran", change=change))


def test_large_strings_arrive_whole_or_are_refused(runtime: Runtime) -> None:
    """CVE-2021-43784 in other fields: environment, arguments, annotations, working directory and
    sources. Strings below the kernel's limits arrive unchanged, longer ones end in a clean error,
    and the container has its own namespaces."""
    fits, many = "x" * 131000, [f"V{n}={'y' * 1000}" for n in range(1000)]
    result = runtime.run(
        "sh",
        "-c",
        "echo ${#BIG} $V999 | cut -c1-20; readlink /proc/self/ns/net",
        change=lambda c: c["process"]["env"].extend([f"BIG={fits}", *many]),
    )
    size, text, namespace = result.ok().out.split()
    assert (int(size), text[:5]) == (len(fits), "yyyyy") and namespace != os.readlink(
        "/proc/self/ns/net"
    )
    for changes in (
        {"args": ["true", "z" * 200000]},
        {"env": ["A=" + "z" * (4 << 20)]},
        {"cwd": "/" + "c" * 5000},
    ):
        clean(runtime.run("true", change=lambda c, changes=changes: c["process"].update(changes)))
    clean(
        runtime.run("true", change=lambda c: c["mounts"].append(bind("/" + "s" * (1 << 20), "/x")))
    )
    runtime.run("true", change=lambda c: c.update(annotations={"a": "n" * (1 << 20)})).ok()


@pytest.mark.parametrize(
    "path", ["process/args/0", "process/cwd", "process/env/0", "hostname", "mounts/0/destination",
    "mounts/0/source", "root/path",
             "linux/cgroupsPath", "mounts/1/options/0", "mounts/0/type", "linux/namespaces/0/path"]
)  # fmt: skip
def test_a_nul_in_any_text_is_refused(runtime: Runtime, path: str) -> None:
    """A NUL ends a string for the kernel but not for a check in Python, so the runtime refuses it
    in each text."""

    def change(config: Config) -> None:
        target: Any = config
        *parents, last = (int(p) if p.isdigit() else p for p in path.split("/"))
        for name in parents:
            target = target[name]
        value = target[last] if isinstance(last, int) else target.get(last, "/x")
        target[last] = f"{value}\0/../../etc"

    clean(runtime.run("true", change=change))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": NaN}', '{"a": Infinity}', "[" * 100000, '{"a":' * 100000, "{}x", "", "\0",
        '{"a": 1e999}', "\ufeff{}",
        '{"a": ' + "9" * 5000 + "}", '"\\ud800"', "[]", "null", '"text"', "{" + '"a":1,' * 10 + "}",
    ],
)  # fmt: skip
def test_a_configuration_that_is_no_object_is_refused(runtime: Runtime, text: str) -> None:
    """Python's JSON parser would accept or recurse into these texts, such as NaN or deep nesting.
    As config.json they are refused with a clean error."""
    box = runtime.box("true")
    (box.folder / "config.json").write_text(text)
    clean(box.create())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("process/noNewPrivileges", "true"), ("process/noNewPrivileges", 1),
        ("process/terminal", "false"), ("root/readonly", 1),
        ("process/args", "sh"), ("mounts", {}),
        ("process/rlimits", [{"type": "RLIMIT_NOFILE", "soft": -1, "hard": 2**65}]),
        ("process/rlimits", [{"type": "RLIMIT_NOFILE", "soft": True, "hard": True}]),
        ("linux/maskedPaths", "/proc"),
        ("linux/namespaces", "mount"), ("process/capabilities", []),
        ("process/capabilities/inheritable", "CAP_SYS_ADMIN"),
        ("process/oomScoreAdj", 10**30), ("process/oomScoreAdj", 1.5), ("linux/seccomp", []),
        ("linux/resources/devices", "a"),
        ("linux/devices", [{"path": "/dev/x", "type": "c", "major": 2**40, "minor": 0}]),
        ("linux/readonlyPaths", [1]),
        ("linux/devices", [{"path": "/dev/x", "type": "c", "major": -1, "minor": 0}]),
        ("hostname", 1), ("process/user", []),
        ("linux/maskedPaths", [["/proc"]]), ("linux/resources/pids", {"limit": "1"}),
        ("process/env", {"A": "b"}),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_are_refused(runtime: Runtime, path: str, value: Any) -> None:
    """config.json has a text for a boolean, 1 for `true`, or a number over 32 bits. The command
    fails, so that a protection with an invalid value is never silently off."""

    def change(config: Config) -> None:
        target: Any = config
        *parents, last = path.split("/")
        for name in parents:
            target = target.setdefault(name, {})
        target[last] = value

    clean(runtime.run("true", change=change))


def test_the_last_of_two_equal_keys_counts(runtime: Runtime) -> None:
    """Ambiguous JSON: config.json has one key twice. The last value counts, as for readers in Go
    and C, so that a checker before the runtime sees no other value."""
    box = runtime.box("true")
    text = (box.folder / "config.json").read_text()
    (box.folder / "config.json").write_text(
        text.replace('"args": ["true"]', '"args": ["echo", "first"], "args": ["echo", "last"]')
    )
    assert runtime("run", "--bundle", str(box.folder), box.id).ok().out == "last\n"


IDS = [
    "../x",
    "..",
    ".",
    "",
    "a/b",
    "/abs",
    "a\nb",
    "-x",
    "--root",
    "a b",
    "\x1b[2J",
    "\u00e9",
    "a" * 256,
    "x;reboot",
    "$(x)",
    "*",
    "a\\b",
    "%2e%2e",
    "..\u2215x",
]


def test_ids_with_path_tricks_are_refused(runtime: Runtime, tmp_path: Path) -> None:
    """Each command refuses container ids such as `../x`: no file is made in or beside the state
    folder, and there is no traceback."""
    box = runtime.box("true")
    runtime.root.mkdir()
    before = sorted(os.listdir(tmp_path))
    for bad in IDS:
        result = runtime("create", "--bundle", str(box.folder), bad)
        assert result.code != 0 and "Traceback" not in result.err, (bad, result)
    for verb in ("state", "start", "delete", "kill", "ps", "pause", "resume"):
        for bad in ("../x", "..", "a/../../b"):
            result = runtime(verb, bad)
            assert result.code != 0 and "Traceback" not in result.err, (verb, bad, result)
    assert os.listdir(runtime.root) == []
    assert [n for n in sorted(os.listdir(tmp_path)) if not n.endswith((".out", ".err"))] == [
        n for n in before if not n.endswith((".out", ".err"))
    ]


@pytest.mark.parametrize("kind", ["device", "folder", "loop"])
def test_files_that_are_no_regular_files_are_refused(
    runtime: Runtime, tmp_path: Path, kind: str
) -> None:
    """config.json, or the file of `exec --process`, is an endless device, a folder, or a circle of
    links. The command fails in time, with bounded memory (300 MB of address space)."""
    place = tmp_path / "what"
    if kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("/dev/zero" if kind == "device" else place)
    box, other = runtime.box("sleep", "60").up(), runtime.box("true")
    (other.folder / "config.json").unlink()
    (other.folder / "config.json").symlink_to(place)
    for words in (
        ["create", "--bundle", str(other.folder), other.id],
        ["exec", "--process", str(place), box.id],
    ):
        command = [
            "bash",
            "-c",
            'ulimit -v 300000; exec "$@"',
            "-",
            *runtime.command(*words),
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode != 0 and "Traceback" not in result.stderr, result


def test_a_tampered_state_does_not_signal_another_process(runtime: Runtime) -> None:
    """state.json names the pid of another process, as after a reuse of the pid. `kill` does not
    signal this process, because its start time differs."""
    victim = subprocess.Popen(["sleep", "60"])
    # The unit of start times. A container starts within one unit; a pid is not used again within
    # one unit.
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))
    try:
        box = runtime.box("sleep", "60").up()
        path = runtime.root / box.id / "state.json"
        state = json.loads(path.read_text())
        real = box.pid
        key = next(k for k, v in state.items() if v == real)
        state[key] = victim.pid
        path.write_text(json.dumps(state))
        runtime("kill", box.id, "KILL")
        assert runtime("state", box.id).ok().json["status"] == "stopped"
        runtime("exec", box.id, "true").fails("", code=255)
        assert victim.poll() is None
        state[key] = real
        path.write_text(json.dumps(state))
    finally:
        victim.kill()
        victim.wait()


def test_the_state_is_only_accessible_to_its_owner(runtime: Runtime) -> None:
    """CVE-2021-41103's class for the command line, under umask 0: the state folders belong to the
    owner alone, and another user can neither list them nor connect to the start socket."""
    box = runtime.box("true")
    before = os.umask(0)
    try:
        box.create().ok()
    finally:
        os.umask(before)
    wrong = [
        str(p)
        for p in [runtime.root, *runtime.root.rglob("*")]
        if p.is_dir() and p.stat().st_mode & 0o077
    ]
    assert wrong == []
    result = subprocess.run(
        ["setpriv", "--reuid", "65534", "--clear-groups", "ls", runtime.root / box.id],
        capture_output=True,
        check=False,
    )
    assert result.returncode != 0
    box.start().ok()
