"""The validation programs of opencontainers/runtime-tools: built once, and how their answers are judged.

Exit codes alone say little there: many programs exit 0 with `not ok`. What is known to fail, and why, is data here; a line that
begins to pass is as much of a surprise as one that begins to fail.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from tests.support import toolchain

MODULE = "github.com/opencontainers/runtime-tools"
VERSION = "v0.9.1-0.20251205004911-5e639034dcdc"

# program -> numbers of `not ok` lines, with the reason
KNOWN: dict[str, tuple[set[int], str]] = {
    "delete": ({2, 3}, "a created container can be deleted: podman and containerd rely on it"),
    "hooks_stdin": ({1}, "expects prestart to be told created; the specification says creating"),
    "misc_props": ({1}, "its bundle lacks the program that it names"),
    "process_rlimits": ({13}, "the checker, built by a newer Go, raises its own RLIMIT_NOFILE"),
    "start": ({7}, "create without a process is refused at once, as runc does"),
}
# Programs that only say whether they went through (`1..0`): pass is no "error" in the output.
SILENT = ("poststart", "poststop", "poststop_fail")
REFUSED = ("process_rlimits_fail", "prestart_fail")  # pass: the create failed, exit code 0
LEFT_OUT = {
    "linux_cgroups_": "cgroup v1 files",
    "delete_only_create_resources": "cgroup v1 files",
    "delete_resources": "a limit whose controller is on v1 here",
    "linux_mount_label": "needs SELinux",
    "linux_process_apparmor_profile": "needs AppArmor and its profile",
    "hooks": "expects prestart at start, as specification 1.0 had it",
    "prestart": "expects prestart at start, as specification 1.0 had it",
    "poststart_fail": "expects a warning where the specification since 1.3 wants an error",
    "process_capabilities_fail": "expects an error for an unknown capability where the specification wants a warning",
    "process_capabilities": "wants capabilities that this machine may not hold",
    "pidfile": "kills a program that has ended already: a race in the test",
}


def build() -> Path:
    """The folder with the programs, their root filesystem and the checker."""
    folder = toolchain.cache() / "runtime-tools" / VERSION
    if (folder / "built").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    answer = toolchain.run_go(folder.parent, "mod", "download", "-json", f"{MODULE}@{VERSION}")
    shutil.copytree(json.loads(answer)["Dir"], folder)
    subprocess.run(["chmod", "-R", "u+w", str(folder)], check=True)
    toolchain.run_go(folder, "build", "-o", "runtimetest", "./cmd/runtimetest", CGO_ENABLED="0")
    for program in names(folder):
        out = f"validation/{program}/{program}.t"
        toolchain.run_go(folder, "build", "-o", out, f"./validation/{program}", CGO_ENABLED="0")
    (folder / "built").touch()
    return folder


def names(folder: Path) -> list[str]:
    """The programs that say something here."""
    found = sorted(
        path.name for path in (folder / "validation").iterdir() if path.is_dir() and path.name != "util"
    )
    return [
        name
        for name in found
        if not any(name == out or (out.endswith("_") and name.startswith(out)) for out in LEFT_OUT)
    ]


def verdict(name: str, code: int, output: str) -> str:
    """Empty when the answer is the expected one, else what is wrong."""
    failed = {int(number) for number in re.findall(r"^not ok (\d+)", output, re.M)}
    expected, _ = KNOWN.get(name, (set(), ""))
    if name in REFUSED:
        return "" if code == 0 and "failed to create" in output else "the create was not refused"
    if name in SILENT:
        return "" if code == 0 and '"error"' not in output else "it reports an error"
    if failed != expected:
        return f"not ok: {sorted(failed)}, expected {sorted(expected)}"
    passed = len(re.findall(r"^ok \d+", output, re.M))
    return "" if code == 0 and passed else f"exit code {code}, {passed} lines ok"
