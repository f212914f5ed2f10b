"""Tests images on Linux 6.12, which can mount EROFS from files, with a separate mount for each
container. The guest runs tests/cri/images, and tests of containers over such images, of files that
are sealed with fs-verity, and of mounts that systemd keeps."""

from __future__ import annotations

import pytest

from tests.support.guest import Guest
from tests.vm import image_tests

pytestmark = [pytest.mark.guest, pytest.mark.slow]

STORE = (
    "erofs",
    "erofs_store",
    "two_stores",
    "stored_mounts",
    "hostile",
    "store",
    "pull",
    "streamed",
    "faults",
    "crash",
)
WHAT = {
    "systemd": "tests/vm/images",
    "containers": "tests/cri/test_mounted_images.py",
    "store": f"{image_tests.files(*STORE)} -k 'not unpacked'",
}


@pytest.mark.timeout(4000)
@pytest.mark.parametrize("what", WHAT)
def test_tests_of_images_pass(guest: Guest, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    image_tests.run(guest, WHAT[what], capsys)
