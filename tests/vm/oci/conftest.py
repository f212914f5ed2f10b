"""Provides the tests of this folder with the installed runtime and an ordinary user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.oci import commands
from tests.vm.oci.commands import Container, User


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    commands.install()


@pytest.fixture(scope="session")
def alice() -> User:
    """Return an ordinary user with a systemd of her own."""
    commands.ordinary_user("alice", 1000)
    return User("alice", 1000)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    """Provide a container of root, which is deleted at the end."""
    root_container = Container(tmp_path, User())
    yield root_container
    root_container.remove()
    assert not Path(f"/run/pyrunc/{root_container.id}").exists()
