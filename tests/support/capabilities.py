"""Lists the tests that prove less if the machine lacks a capability; the guest runs them with all
capabilities.

CI's build machines give root no CAP_SYS_RESOURCE: no process there has an oom_score_adj below its
parent's or a hard limit above its own. tests/architecture/test_capabilities.py compares WEAKENED
with the tests that call `holds`.
"""

from __future__ import annotations

from pathlib import Path

from pyrunc.abi.capability import CAPABILITIES

WEAKENED = {
    "tests/kernel/plan/test_identity.py": ("test_lowering_the_oom_score_needs_the_right",),
    "tests/kernel/container/test_pause_process.py": (
        "test_a_pause_process_has_the_oom_score_that_is_permitted",
    ),
    "tests/kernel/shim/test_shim.py": ("test_the_shim_lowers_its_oom_score_where_permitted",),
    "tests/kernel/shim/test_containers.py": (
        "test_a_container_does_not_inherit_the_shims_oom_score",
    ),
    "tests/cri/test_surroundings.py": ("test_processes_inherit_no_settings_of_the_server",),
    "tests/cri/rpc/test_run_pod_sandbox.py": (
        "test_the_pause_process_has_the_pods_filter_and_its_score",
    ),
}
"""Files with calls of `holds`, and the tests there that prove more with the capability."""


def in_the_guest(whole_files: str) -> str:
    """Return the tests of WEAKENED as pytest's arguments, without those in `whole_files`, the files
    that the guest runs as a whole."""
    return " ".join(
        f"{file}::{test}"
        for file, tests in WEAKENED.items()
        for test in tests
        if file not in whole_files.split()
    )


def holds(name: str) -> bool:
    """Return whether this process has the capability, such as "CAP_SYS_RESOURCE", in its effective
    set."""
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> CAPABILITIES[name] & 1)
