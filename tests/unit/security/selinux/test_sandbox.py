"""Tests that a sandbox gets its labels, stores them in its record, and frees its level."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cri_server.api import api_pb2 as api
from cri_server.sandboxes.run import labelled
from cri_server.security.selinux.labels import NONE
from cri_server.security.selinux.levels import SelinuxLevels
from cri_server.services import Services
from cri_server.store.model import Sandbox
from cri_server.store.records import SandboxRecord
from pyrunc.errors import InvalidArgument, ResourceExhausted
from tests.unit.security.selinux.test_labels import POLICY


def sandbox(**options: str) -> Sandbox:
    config = api.PodSandboxConfig(metadata=api.PodSandboxMetadata(name="p", namespace="n", uid="u"))
    config.linux.security_context.selinux_options.CopyFrom(api.SELinuxOption(**options))
    return Sandbox("0" * 64, config, "", 1, "boot", "/", "/group")


def services(policy: Any = POLICY, categories: int = 2) -> Services:
    parts = SimpleNamespace(
        node=SimpleNamespace(selinux=policy),
        index=SimpleNamespace(sandboxes=[]),
        selinux_levels=SelinuxLevels(categories),
    )
    return cast(Services, parts)


def test_a_level_is_free_again_when_no_sandbox_has_it() -> None:
    """A second sandbox is refused until the first is gone: the policy has two categories, so there
    is only one level."""
    server, first, second = services(), sandbox(), sandbox()
    with labelled(server, first):
        assert first.selinux.level == "s0:c0,c1"
        with pytest.raises(ResourceExhausted), labelled(server, second):
            pass  # while it is being made
    sandboxes = cast(list[Sandbox], server.index.sandboxes)
    sandboxes.append(first)
    with pytest.raises(ResourceExhausted), labelled(server, second):
        pass  # while it exists
    sandboxes.remove(first)
    with labelled(server, second):
        assert second.selinux.level == "s0:c0,c1"


def test_the_level_of_a_failed_pod_is_free_again() -> None:
    server = services()
    with pytest.raises(ZeroDivisionError), labelled(server, sandbox()):
        raise ZeroDivisionError
    with pytest.raises(InvalidArgument), labelled(server, sandbox(level="no level")):
        pass
    with labelled(server, sandbox()):
        pass


def test_the_record_has_the_labels() -> None:
    made = sandbox()
    with labelled(services(), made):
        fields = made.to_record().to_fields()
    assert (
        made.selinux != NONE
        and Sandbox.from_record(SandboxRecord.of(fields)).selinux == made.selinux
    )
    del fields["selinux"]  # of the version before
    assert Sandbox.from_record(SandboxRecord.of(fields)).selinux == NONE


def test_without_selinux_no_pod_is_labelled_and_none_refused() -> None:
    made = sandbox(level="no level")
    with labelled(services(policy=None), made):
        assert made.selinux == NONE
