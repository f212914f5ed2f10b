"""Images on Linux 6.12, the first kernel that mounts EROFS from files, and each container its own mount: the tests of tests/cri/images
in the guest, of containers over such images, and of files that are sealed with fs-verity.
"""

from __future__ import annotations

import pytest

from tests.support.guest import Guest
from tests.vm import remote

pytestmark = [pytest.mark.guest, pytest.mark.slow]

STORE = ("erofs", "erofs_store", "two_stores", "hostile", "store", "pull", "piped", "faults", "crash")
WHAT = {
    "sealed": "tests/vm/images",
    "containers": "tests/cri/test_mounted_images.py",
    "store": " ".join(f"tests/cri/images/test_{name}.py" for name in STORE) + " -k 'not unpacked'",
}


@pytest.mark.timeout(4000)
@pytest.mark.parametrize("what", WHAT)
def test_images(guest: Guest, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    remote.run(guest, f"-m 'not slow' {WHAT[what]}", capsys, timeout_s=3600)
