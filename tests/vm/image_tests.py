"""Runs the tests of tests/cri/images in a guest."""

from __future__ import annotations

import pytest

from tests.support.guest import Guest
from tests.vm import remote


def files(*names: str) -> str:
    """Return the paths of tests/cri/images/test_NAME.py for `names`, separated by spaces."""
    return " ".join(f"tests/cri/images/test_{name}.py" for name in names)


def run(guest: Guest, arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run pytest with `arguments` on the guest's disk, while the guest has no resolver."""
    # Queries would get no reply, and tests of failing pulls would wait too long.
    guest.ssh("mount --bind /dev/null /etc/resolv.conf")
    try:
        # On the disk, as on a node: the guest's /tmp is a tmpfs, whose pages cannot be dropped.
        remote.run(
            guest, f"-m 'not slow' --basetemp /var/tmp/pytest {arguments}", capsys, timeout_s=3600
        )
    finally:
        guest.ssh("umount /etc/resolv.conf; rm -rf /var/tmp/pytest")
