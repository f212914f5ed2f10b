"""Tests SELinux with Debian's policy, enforced: the kernel's labels, and its refusals."""

from __future__ import annotations

import pytest

from tests.support.guest import SELINUX
from tests.vm import remote
from tests.vm.conftest import RELEASE, Boots

pytestmark = [pytest.mark.guest, pytest.mark.slow, pytest.mark.timeout(2400)]


def test_tests_with_enforcing_selinux_pass(
    boots: Boots, capsys: pytest.CaptureFixture[str]
) -> None:
    remote.run(boots.guest(RELEASE, variant=SELINUX), "tests/vm/selinux", capsys)
