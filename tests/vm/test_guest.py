"""Boots the guest once and runs the tests in it that need pure cgroup v2, systemd and AppArmor."""

from __future__ import annotations

import pytest

from tests.support.capabilities import in_the_guest
from tests.support.guest import Guest
from tests.vm import remote

# Folders and files that run in the guest; each is one pytest run there, so that a report names the
# failed part. The tests of containers run there because the guest's kernel is older than 6.15: no
# layers by descriptor, no clones of detached mounts.
CONTAINERS = " ".join(
    f"tests/kernel/{name}.py"
    for name in (
        *(
            "container/test_container",
            "container/test_pause_process",
            "container/test_exec",
            "container/test_no_pivot",
        ),
        *(
            "compile/test_user_namespace",
            "plan/test_old_kernels",
            "plan/test_mounts",
            "plan/test_identity",
        ),
    )
)
INSIDE = ("-m 'not slow' tests/vm/inside", CONTAINERS, in_the_guest(CONTAINERS))


@pytest.mark.guest
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("what", INSIDE, ids=("limits", "plan", "capabilities"))
def test_tests_of_the_guest_pass(
    guest: Guest, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    remote.run(guest, what, capsys, ledger="machine")


@pytest.mark.guest
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_slow_tests_of_checkpoints_pass(guest: Guest, capsys: pytest.CaptureFixture[str]) -> None:
    remote.run(guest, "-m slow tests/vm/inside", capsys)
