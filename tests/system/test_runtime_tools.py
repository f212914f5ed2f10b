"""runtime-tools' validation, each program as a test; needs Go and the module proxy once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import bundle
from tests.system import runtime_tools
from tests.system.conftest import reap

PROGRAMS = (
    "config_updates_without_affect", "create", "default", "delete", "hooks_stdin", "hostname", "kill", "kill_no_effect",
    "killsig", "linux_devices", "linux_masked_paths", "linux_ns_itype", "linux_ns_nopath", "linux_ns_path",
    "linux_ns_path_type", "linux_readonly_paths", "linux_rootfs_propagation", "linux_seccomp", "linux_sysctl",
    "linux_uid_mappings", "misc_props", "mounts", "poststart", "poststop", "poststop_fail", "prestart_fail", "process",
    "process_oom_score_adj", "process_rlimits", "process_rlimits_fail", "process_user", "root_readonly_true", "start",
    "state",
)  # fmt: skip


@pytest.fixture(scope="session")
def programs() -> Path:
    return runtime_tools.build()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_program_is_forgotten(programs: Path) -> None:
    assert tuple(runtime_tools.names(programs)) == PROGRAMS


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", PROGRAMS)
def test_validation(programs: Path, tmp_path: Path, name: str) -> None:
    if "PYRUNC_RUNTIME" in os.environ:
        pytest.skip("the list of known failures is ours")
    start = tmp_path / "runtime"
    start.write_text(f'#!/bin/sh\nexec {" ".join(bundle.runtime())} --root {tmp_path}/state "$@"\n')
    start.chmod(0o755)
    done = subprocess.run(
        [f"validation/{name}/{name}.t"],
        cwd=programs, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"RUNTIME": str(start), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    reap()
    _clean(tmp_path)
    output = done.stdout + done.stderr
    assert not (wrong := runtime_tools.verdict(name, done.returncode, output)), f"{wrong}\n{output[-6000:]}"


def _clean(folder: Path) -> None:
    """Programs that run without a mount namespace leave their mounts, some their containers."""
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        place = line.split()[4]
        if place.startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", place], check=False)
    state = folder / "state"
    for box in sorted(state.iterdir()) if state.is_dir() else []:
        if not box.name.startswith("."):
            subprocess.run(
                [*bundle.runtime(), "--root", str(state), "delete", "--force", box.name], check=False
            )
    reap(wait_s=3)
