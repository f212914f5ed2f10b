"""Tests labels of pods and containers, their levels, and the policy's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.security.selinux import context, labels, policy
from cri_server.security.selinux.context import SelinuxContext
from cri_server.security.selinux.labels import SelinuxLabels
from cri_server.security.selinux.levels import SelinuxLevels, pair
from cri_server.security.selinux.policy import SelinuxPolicy
from pyrunc.errors import InvalidArgument, ResourceExhausted

PROCESS = SelinuxContext("system_u", "system_r", "container_t")
FILE = SelinuxContext("system_u", "object_r", "container_file_t")
POLICY = SelinuxPolicy(PROCESS, FILE, SelinuxContext("system_u", "system_r", "spc_t"))
POD = SelinuxLabels(
    "system_u:system_r:container_t:s0:c1,c2", "system_u:object_r:container_file_t:s0:c1,c2"
)


def security(privileged: bool = False, **options: str) -> api.LinuxContainerSecurityContext:
    return api.LinuxContainerSecurityContext(
        privileged=privileged, selinux_options=api.SELinuxOption(**options)
    )


def test_a_pod_without_options_gets_the_policys_labels_at_its_own_level() -> None:
    assert labels.of_sandbox(POLICY, api.SELinuxOption(), "s0:c1,c2") == POD


@pytest.mark.parametrize(
    ("options", "process", "mount"),
    [
        (
            {"level": "s0:c5,c6"},
            "system_u:system_r:container_t:s0:c5,c6",
            "system_u:object_r:container_file_t:s0:c5,c6",
        ),
        (
            {"type": "svirt_t"},
            "system_u:system_r:svirt_t:s0:c1,c2",
            "system_u:object_r:container_file_t:s0:c1,c2",
        ),
        (
            {"role": "r_r"},
            "system_u:r_r:container_t:s0:c1,c2",
            "system_u:object_r:container_file_t:s0:c1,c2",
        ),
        (
            {"user": "u_u"},
            "u_u:system_r:container_t:s0:c1,c2",
            "u_u:object_r:container_file_t:s0:c1,c2",
        ),
        (
            {"user": "a", "role": "b", "type": "c", "level": "s0"},
            "a:b:c:s0",
            "a:object_r:container_file_t:s0",
        ),
    ],
)
def test_a_requested_label_is_merged_with_the_default(
    options: dict[str, str], process: str, mount: str
) -> None:
    """A pod's default label has the pod's level; a container's default is its pod's label."""
    assert labels.of_sandbox(POLICY, api.SELinuxOption(**options), "s0:c1,c2") == SelinuxLabels(
        process, mount
    )
    assert labels.of_container(POLICY, security(**options), POD) == SelinuxLabels(process, mount)


def test_a_containers_options_take_the_place_of_its_pods() -> None:
    pod = labels.of_sandbox(POLICY, api.SELinuxOption(type="pod_t", level="s0:c7,c8"), "s0:c1,c2")
    assert labels.of_container(POLICY, security(), pod) == pod
    own = labels.of_container(POLICY, security(role="own_r"), pod)
    assert own.process == "system_u:own_r:container_t:s0:c7,c8"


def test_a_privileged_container_is_not_confined_and_shares_its_pods_files() -> None:
    assert labels.of_container(POLICY, security(privileged=True, type="x_t"), POD) == SelinuxLabels(
        "system_u:system_r:spc_t:s0", POD.mount
    )
    without = SelinuxPolicy(PROCESS, FILE, None)
    assert labels.of_container(without, security(privileged=True), POD) == SelinuxLabels(
        "", POD.mount
    )


def test_a_policy_without_levels_gives_labels_without_levels() -> None:
    plain = SelinuxPolicy(PROCESS.with_level(""), FILE.with_level(""), None, has_levels=False)
    label = labels.of_sandbox(plain, api.SELinuxOption(level="s0:c3,c4"), "s0:c1,c2")
    assert label == SelinuxLabels(
        "system_u:system_r:container_t", "system_u:object_r:container_file_t"
    )
    assert (
        label.level == ""
        and labels.of_container(plain, security(type="x_t"), label).process
        == "system_u:system_r:x_t"
    )


@pytest.mark.parametrize(
    "level", ["s0", "s0:c1", "s0:c1,c2", "s0:c0.c1023", "s0-s0:c1.c5,c7", "s0-s15:c0.c1023"]
)
def test_a_level_is_parsed(level: str) -> None:
    context.check(api.SELinuxOption(level=level))


@pytest.mark.requirement("8.10")
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"level": "s0:c1,c2,c3"}, "level"),
        ({"level": "gibberish"}, "level"),
        ({"level": "s0:"}, "level"),
        ({"level": "s0:c12345"}, "level"),
        ({"level": "s0:c1,c2\n"}, "level"),
        ({"type": "a:b"}, "type"),
        ({"user": "a,b"}, "user"),
        ({"role": "a b"}, "role"),
    ],
)
def test_an_invalid_part_of_a_context_is_named(options: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"selinux_options\.{field}: "):
        labels.of_container(POLICY, security(**options), POD)


def test_a_level_belongs_to_a_single_pod_until_its_removal() -> None:
    levels = SelinuxLevels(4)
    taken = set()
    for _ in range(6):
        with levels.reserved(taken) as level:
            taken.add(level)
    assert taken == {pair(a, b) for a in range(4) for b in range(a)}
    with pytest.raises(ResourceExhausted, match="4 SELinux categories"), levels.reserved(taken):
        pass
    taken.remove("s0:c1,c3")
    with levels.reserved(taken) as level:
        assert level == "s0:c1,c3"
        with pytest.raises(ResourceExhausted), levels.reserved(taken):
            pass  # it is in no list yet, and no other pod gets it
    with levels.reserved(taken) as level:
        assert level == "s0:c1,c3"


def fake_kernel(root: Path, mls: str = "1") -> Path:
    """Make a selinuxfs of ordinary files, whose `context` accepts any text; return its folder."""
    kernel = root / "sys/fs/selinux"
    kernel.mkdir(parents=True)
    (kernel / "enforce").write_text("0")
    (kernel / "mls").write_text(mls)
    (kernel / "context").write_text("")
    return kernel


def test_the_policy_of_a_machine_is_read(tmp_path: Path) -> None:
    assert policy.probe(tmp_path) is None
    kernel = fake_kernel(tmp_path)
    assert policy.probe(tmp_path) == POLICY
    assert (kernel / "context").read_bytes() == b"system_u:system_r:spc_t:s0\0"
    folder = tmp_path / "etc/selinux/mine/contexts"
    folder.mkdir(parents=True)
    (tmp_path / "etc/selinux/config").write_text(
        "# SELINUXTYPE=other\nSELINUX=permissive\nSELINUXTYPE=mine\n"
    )
    (folder / "lxc_contexts").write_text(
        'process = "u:r:p_t:s0"\nfile = "u:object_r:f_t:s0:c1"\ncontent = "x"\n'
    )
    machine_policy = policy.probe(tmp_path)
    assert machine_policy is not None
    assert (str(machine_policy.process), str(machine_policy.file)) == (
        "u:r:p_t:s0",
        "u:object_r:f_t:s0",
    )
    os.unlink(kernel / "context")
    (kernel / "mls").write_text("0")
    (folder / "lxc_contexts").write_text("process = broken\n")
    assert policy.probe(tmp_path) == SelinuxPolicy(
        PROCESS.with_level(""), FILE.with_level(""), None, has_levels=False
    )
