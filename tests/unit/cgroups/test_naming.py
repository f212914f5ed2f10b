"""Tests the cgroup path that a container's configuration gives with each driver."""

from __future__ import annotations

import pytest

from pyrunc.cgroups.naming import expand_slice, place
from pyrunc.errors import InvalidArgument, InvalidSpec


@pytest.mark.parametrize(
    ("cgroups_path", "path"),
    [("/a/b", "/a/b"), ("/a/../../etc", "/etc"), ("//a//b/", "/a/b"), ("/a/./b", "/a/b")],
)
def test_absolute_paths_are_cleaned_and_cannot_leave_the_tree(cgroups_path: str, path: str) -> None:
    assert place(cgroups_path, "id", "cgroupfs").path == path


def test_without_a_path_the_id_names_the_group() -> None:
    assert place("", "box", "cgroupfs").path.endswith("/box")


def test_a_relative_path_cannot_climb() -> None:
    assert place("../../x", "id", "cgroupfs").path.endswith("/x")
    assert ".." not in place("../../x", "id", "cgroupfs").path


@pytest.mark.parametrize("cgroups_path", ["/", "/..", "a\0b"])
def test_the_root_and_nul_are_refused(cgroups_path: str) -> None:
    with pytest.raises(InvalidSpec):
        place(cgroups_path, "id", "cgroupfs")


@pytest.mark.requirement("7.1.2")
@pytest.mark.parametrize(
    ("cgroups_path", "unit", "path"),
    [
        (
            "system.slice:cri-pyrunc:abc",
            "cri-pyrunc-abc.scope",
            "/system.slice/cri-pyrunc-abc.scope",
        ),
        ("a-b-c.slice:p:n", "p-n.scope", "/a.slice/a-b.slice/a-b-c.slice/p-n.scope"),
        ("-.slice:p:n", "p-n.scope", "/p-n.scope"),
        ("", "pyrunc-id.scope", "/system.slice/pyrunc-id.scope"),
        ("system.slice::n", "n.scope", "/system.slice/n.scope"),
        ("system.slice:p:x-y.slice", "x-y.slice", "/x.slice/x-y.slice"),
    ],
)
def test_systemd_paths_name_a_slice_and_a_unit(cgroups_path: str, unit: str, path: str) -> None:
    group = place(cgroups_path, "id", "systemd")
    assert (group.unit, group.path) == (unit, path)


@pytest.mark.parametrize(
    "cgroups_path",
    ["/a/b", "a:b", "a.slice:b:c:d", "a.slice:b/c:d", "a:b:c", "a--b.slice:p:n", "a.slice:p:"],
)
def test_paths_of_another_form_are_refused_for_systemd(cgroups_path: str) -> None:
    with pytest.raises(InvalidSpec):
        place(cgroups_path, "id", "systemd")


def test_an_unknown_driver_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="cgroupfs, systemd"):
        place("/a", "id", "openrc")


@pytest.mark.requirement("7.1.2")
def test_slices_expand() -> None:
    assert expand_slice("kubepods-burstable-pod1.slice") == (
        "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice"
    )


def test_a_record_brings_the_group_back() -> None:
    group = place("a.slice:p:n", "id", "systemd")
    again = type(group).from_record(group.record())
    assert (again.path, again.driver, again.slice, again.unit) == (
        group.path,
        "systemd",
        "a.slice",
        "p-n.scope",
    )
