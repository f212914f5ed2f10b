"""Builds the validation programs of opencontainers/runtime-tools once, and judges their output.

Exit codes alone tell little: many programs exit 0 with `not ok`. Known failures, with reasons, are
data here; a line that begins to pass fails the test like a line that begins to fail.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.support import groups, toolchain

MODULE = "github.com/opencontainers/runtime-tools"
VERSION = "v0.9.1-0.20251205004911-5e639034dcdc"

# program -> numbers of `not ok` lines, with the reason. The list is exact: a line that passes
# unexpectedly fails the test.
KNOWN_FAILURES: dict[str, tuple[set[int], str]] = {
    "delete": ({2, 3}, "a created container can be deleted: podman and containerd rely on it"),
    "hooks_stdin": ({1}, "expects prestart to be told created; the specification says creating"),
    "misc_props": ({1}, "its bundle lacks the program that it names"),
    "process_rlimits": ({13}, "the checker, built by a newer Go, raises its own RLIMIT_NOFILE"),
    "start": (
        {7, 8},
        "its last case is the wrong way round: start without a process has to succeed, and to end",
    ),
}
# Programs without test lines (`1..0`): they pass when their output has no "error".
SILENT = ("poststart", "poststop", "poststop_fail")
# The same, with the failures that they report for a runtime that follows the current specification.
OUTDATED = {
    "hooks": "expects prestart at start, as specification 1.0 had it",
    "prestart": "expects prestart at start, as specification 1.0 had it",
    "poststart_fail": "expects a warning where the specification since 1.3 wants an error",
}
REFUSED = ("process_rlimits_fail", "prestart_fail")  # pass: the create failed, exit code 0
ACCEPTED = {  # expects a refusal, and says that there was none
    "process_capabilities_fail": "expects an error for an unknown capability where the "
    "specification wants a warning",
}
LEFT_OUT = {
    "linux_cgroups_": "cgroup v1 files",
    "delete_only_create_resources": "cgroup v1 files",
    "delete_resources": "a limit whose controller is on v1 here",
    "linux_mount_label": "needs SELinux",
    "linux_process_apparmor_profile": "needs AppArmor and its profile",
    "process_capabilities": "wants capabilities that this machine may not hold",
    "pidfile": "kills a program that has ended already: a race in the test",
}
TIMEOUT_S = 120


def build() -> Path:
    """Build the folder with the programs, their root filesystem and the checker."""
    folder = toolchain.cache() / "runtime-tools" / VERSION
    if not (folder / "go.mod").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        answer = toolchain.run_go(folder.parent, "mod", "download", "-json", f"{MODULE}@{VERSION}")
        fresh = folder.with_name(f"{VERSION}.{os.getpid()}")
        shutil.copytree(json.loads(answer)["Dir"], fresh)
        subprocess.run(["chmod", "-R", "u+w", str(fresh)], check=True)
        fresh.rename(folder)
    packages = {"runtimetest": "./cmd/runtimetest"}
    packages |= {f"validation/{name}/{name}.t": f"./validation/{name}" for name in names(folder)}
    for program, source in packages.items():
        if not (folder / program).exists():
            toolchain.run_go(folder, "build", "-o", program, source, CGO_ENABLED="0")
    return folder


def names(folder: Path) -> list[str]:
    """Return the programs that can judge a runtime here."""
    programs = sorted(
        path.name
        for path in (folder / "validation").iterdir()
        if path.is_dir() and path.name != "util"
    )
    return [
        name
        for name in programs
        if not any(name == out or (out.endswith("_") and name.startswith(out)) for out in LEFT_OUT)
    ]


def run(folder: Path, name: str, runtime: Path, scratch: Path, group: Path) -> tuple[int, str]:
    """Return exit code and output of one validation program.

    The program runs in `group` and in its own pid and mount namespaces, which end with it. The
    containers that it leaves have cgroups beside `group`.
    """
    command = ["sh", "-c", groups.ENTER, str(group)]
    command += ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
    command += [
        "bash",
        "-c",
        'mount -t tmpfs tmpfs "$TMPDIR"; "$0"; exit $?',
        f"validation/{name}/{name}.t",
    ]
    scratch.mkdir()
    done = subprocess.run(
        command,
        cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"RUNTIME": str(runtime), "TMPDIR": str(scratch)},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def verdict(name: str, code: int, output: str) -> str:
    """Return an empty text for the expected result, else a description of the difference."""
    failed = {int(number) for number in re.findall(r"^not ok (\d+)", output, re.M)}
    expected, _ = KNOWN_FAILURES.get(name, (set(), ""))
    if name in REFUSED:
        return "" if code == 0 and "failed to create" in output else "the create was not refused"
    if name in ACCEPTED:
        return "" if code == 1 and "failed to create" not in output else "the create was refused"
    if name in SILENT:
        return "" if code == 0 and '"error"' not in output else "it reports an error"
    if name in OUTDATED:
        return "" if '"error"' in output else "it passes, though it is outdated"
    if failed != expected:
        return f"not ok: {sorted(failed)}, expected {sorted(expected)}"
    passed = len(re.findall(r"^ok \d+", output, re.M))
    return "" if code == 0 and passed else f"exit code {code}, {passed} lines ok"
