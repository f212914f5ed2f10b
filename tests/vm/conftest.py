"""Runs one guest at a time for all tests of this folder, booted at first use. On the host, tests
that run inside the guest are not collected."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import guest_disk, package
from tests.support.chroot import build_package
from tests.support.debian import suite
from tests.support.guest import PLAIN, Guest, Variant, free_port

RELEASE, LATER = "trixie", "99.0-1"
collect_ignore = (
    []
    if os.environ.get("PYRUNC_GUEST")
    else [
        "inside",
        "kubelet",
        "oci",
        "linux_6_1",
        "images",
        "selinux",
        "suites",
        "peers",
        "standalone",
    ]
)


class Boots:
    """Boots guests, one at a time, because the machine has processor time for one emulated guest.

    `api_port` is a port of 127.0.0.1 on the host, which guests see as SERVICES:6443.
    """

    def __init__(self) -> None:
        self.api_port = free_port()
        self._kind = "", PLAIN
        self._running: Guest | None = None

    def guest(self, suite: str, disks: Sequence[Path] = (), variant: Variant = PLAIN) -> Guest:
        """Return a running guest of that suite and variant. It has the checkout in /root/project,
        and `disks`, by default the disk of Kubernetes' programs."""
        if self._running is None or self._kind != (suite, variant):
            self.stop()
            attached = disks or [guest_disk.kubernetes()]
            booted = Guest(suite, disks=attached, services={6443: self.api_port}, variant=variant)
            booted.start()
            self._kind, self._running = (suite, variant), booted
            booted.push_project()
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None


@pytest.fixture(scope="package")
def boots() -> Iterator[Boots]:
    """Provide what boots the guests; the last guest is powered off after the last test of the
    folder."""
    all_boots = Boots()
    yield all_boots
    # An idle guest takes processor time, too.
    all_boots.stop()


@pytest.fixture(scope="module")
def guest(boots: Boots) -> Guest:
    """Provide a guest with Debian 13, which the test modules share."""
    return boots.guest("trixie")


@pytest.fixture(scope="package")
def debs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the Debian package of this tree for the guest, and the same package with the version
    LATER."""
    folder = tmp_path_factory.mktemp("packages")
    own = package.build() if suite() == RELEASE else build_package(RELEASE, folder)
    return own, package.as_version(own, LATER, folder)
