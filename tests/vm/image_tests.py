"""The tests of tests/cri/images in a guest."""

from __future__ import annotations

import pytest

from tests.support.guest import Guest
from tests.vm import remote


def files(*names: str) -> str:
    """The modules with these names."""
    return " ".join(f"tests/cri/images/test_{name}.py" for name in names)


def run(guest: Guest, arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On its disk, as a node has images: in its /tmp, a tmpfs, a file's pages are the file. And
    without a resolver: the network's answers nobody, which takes longer than these tests let a pull
    wait."""
    guest.ssh("mount --bind /dev/null /etc/resolv.conf")
    try:
        remote.run(
            guest, f"-m 'not slow' --basetemp /var/tmp/pytest {arguments}", capsys, timeout_s=3600
        )
    finally:
        guest.ssh("umount /etc/resolv.conf; rm -rf /var/tmp/pytest")
