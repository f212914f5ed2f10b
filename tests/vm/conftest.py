"""One boot for all tests of this folder. What runs inside is collected in the guest alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support import guest_disk
from tests.support.guest import Guest

collect_ignore = [] if os.environ.get("PYRUNC_GUEST") else ["inside", "kubelet", "oci"]


@pytest.fixture(scope="session")
def guest() -> Iterator[Guest]:
    """A running guest with the checkout in /root/project and Kubernetes' programs on a disk of their own."""
    with Guest(disks=[guest_disk.kubernetes()]) as booted:
        booted.push_project()
        yield booted
