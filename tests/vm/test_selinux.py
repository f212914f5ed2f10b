"""SELinux, permissive, with Debian's policy: labels as the kernel has them."""

from __future__ import annotations

import pytest

from tests.support.guest import SELINUX
from tests.vm import remote
from tests.vm.conftest import RELEASE, Boots

pytestmark = [pytest.mark.guest, pytest.mark.slow, pytest.mark.timeout(2400)]


def test_labels(boots: Boots, capsys: pytest.CaptureFixture[str]) -> None:
    remote.run(boots.guest(RELEASE, variant=SELINUX), "tests/vm/selinux", capsys)
