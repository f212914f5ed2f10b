"""Tests the parsing of a configuration: shapes, defaults, JSON paths in errors, ignored
properties."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrunc.errors import InvalidSpec
from pyrunc.spec.check import check, check_process, sysctl_path
from pyrunc.spec.default import default
from pyrunc.spec.model import IdMap, Mount, Namespace, Process, Rlimit, User
from pyrunc.spec.parse import parse, parse_process


def put(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a copy of `document` in which the property at the dotted path is `value`. Numbers in
    the path are list indices."""
    document = copy.deepcopy(document)
    place: Any = document
    *keys, last = [int(k) if k.isdigit() else k for k in path.split(".")]
    for key in keys:
        place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
    place[last] = value
    return document


def test_the_default_is_valid() -> None:
    spec = parse(default())
    check(spec)
    assert spec.version == "1.3.0"
    assert spec.process is not None
    assert spec.process.args == ("sh",)
    assert spec.process.rlimits == (Rlimit("RLIMIT_NOFILE", 1024, 1024),)
    assert spec.mounts[0] == Mount("/proc", "proc", "proc")
    assert spec.linux.namespace("pid") == Namespace("pid")
    assert spec.linux.namespace("user") is None
    assert spec.root is not None
    assert spec.root.readonly


def test_the_smallest_specification_is_accepted() -> None:
    spec = parse({"ociVersion": "1.0.0", "root": {"path": "r"}})
    check(spec)
    assert spec.process is None
    assert spec.linux.namespaces == ()


@pytest.mark.parametrize(
    "path",
    [
        "process",
        "linux",
        "mounts",
        "hooks",
        "annotations",
        "hostname",
        "root.readonly",
        "process.user",
        "process.rlimits",
        "linux.sysctl",
        "linux.seccomp",
        "process.oomScoreAdj",
        "linux.devices",
        "linux.resources",
        "mounts.0.options",
    ],
)
def test_a_null_property_counts_as_absent(path: str) -> None:
    parse(put(default(), path, None))


def test_unknown_properties_are_ignored() -> None:
    document = put(put(default(), "process.newThing", [1]), "windows", {"x": 1})
    assert parse(document) == parse(default())


@pytest.mark.parametrize(
    "version", ["1.0.0", "1.3.0", "1.9.7", "1.2.0-rc.1", "1.0.2-dev", "1.3.0+dev"]
)
def test_any_version_1_is_accepted(version: str) -> None:
    assert parse(put(default(), "ociVersion", version)).version == version


@pytest.mark.parametrize(
    ("version", "limit"),
    [("1.0.2-dev", -1), ("1.2.1", -1), ("1.3.0", 0), ("1.3.0+dev", 0), ("1.10.0", 0)],
)
def test_a_pids_limit_of_zero_meant_no_limit_before_1_3(version: str, limit: int) -> None:
    # podman before 5.4.1 writes 0 for `--pids-limit -1`.
    document = put(put(default(), "ociVersion", version), "linux.resources.pids", {"limit": 0})
    resources = parse(document).linux.resources
    assert resources is not None and resources["pids"] == {"limit": limit}


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("ociVersion", "2.0.0", "ociVersion"),
        ("ociVersion", "1.0", "ociVersion"),
        ("ociVersion", "", "ociVersion"),
        ("ociVersion", "1.٣.0", "ociVersion"),
        ("ociVersion", 1, "ociVersion"),
        ("process.args", "sh", "process.args"),
        ("process.args", ["a", 1], "process.args[1]"),
        ("process.args", ["a\0b"], "process.args[0]"),
        ("process.cwd", 1, "process.cwd"),
        ("process.terminal", 1, "process.terminal"),
        ("process.user.uid", -1, "process.user.uid"),
        ("process.user.uid", True, "process.user.uid"),
        ("process.user.uid", 1.0, "process.user.uid"),
        ("process.user.uid", "0", "process.user.uid"),
        ("process.user.uid", 4294967295, "process.user.uid"),
        ("process.user.additionalGids", [1, -2], "process.user.additionalGids[1]"),
        ("process.oomScoreAdj", 1001, "process.oomScoreAdj"),
        ("process.rlimits", [{"type": "RLIMIT_CORE", "soft": 0}], "process.rlimits[0].hard"),
        ("process.rlimits.0.soft", 1 << 64, "process.rlimits[0].soft"),
        ("mounts.3.destination", None, "mounts[3].destination"),
        ("mounts.3.options", {"a": 1}, "mounts[3].options"),
        ("mounts.3.source", "a\0", "mounts[3].source"),
        ("mounts", {}, "mounts"),
        ("mounts.1", "x", "mounts[1]"),
        ("linux.namespaces.0.type", None, "linux.namespaces[0].type"),
        ("linux.uidMappings", [{"containerID": 0, "hostID": 0}], "linux.uidMappings[0].size"),
        (
            "linux.uidMappings",
            [{"containerID": 5, "hostID": 0, "size": 4294967295}],
            "linux.uidMappings[0]",
        ),
        ("linux.sysctl", {"a": 1}, "linux.sysctl.a"),
        ("linux.devices", [{"path": "/dev/x"}], "linux.devices[0].type"),
        ("linux.timeOffsets", {"boottime": 3}, "linux.timeOffsets.boottime"),
        ("annotations", {"a": None}, "annotations.a"),
        ("hooks", {"prestart": [{"args": ["x"]}]}, "hooks.prestart[0].path"),
        ("root", [], "root"),
    ],
)
def test_errors_name_the_json_path(path: str, value: object, where: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse(put(default(), path, value))
    assert caught.value.path == where


@pytest.mark.parametrize("document", [None, [], "x", 1])
def test_a_document_that_is_no_object_is_refused(document: object) -> None:
    with pytest.raises(InvalidSpec):
        parse(document)


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("root", None, "root"),
        ("root.path", "", "root.path"),
        ("process.args", [], "process.args"),
        ("process.cwd", "tmp", "process.cwd"),
        ("process.cwd", "", "process.cwd"),
        ("process.env", ["A=b", "=c"], "process.env[1]"),
        ("process.env", ["novalue"], "process.env[0]"),
        ("process.scheduler", {"policy": "SCHED_X"}, "process.scheduler.policy"),
        ("process.scheduler", {"policy": "SCHED_OTHER", "nice": 20}, "process.scheduler.nice"),
        (
            "process.scheduler",
            {"policy": "SCHED_OTHER", "priority": 3},
            "process.scheduler.priority",
        ),
        ("process.scheduler", {"policy": "SCHED_FIFO", "runtime": 3}, "process.scheduler"),
        (
            "process.scheduler",
            {"policy": "SCHED_FIFO", "flags": ["X"]},
            "process.scheduler.flags[0]",
        ),
        ("process.execCPUAffinity", {"initial": "0-"}, "process.execCPUAffinity.initial"),
        ("process.execCPUAffinity", {"final": "a"}, "process.execCPUAffinity.final"),
        ("process.ioPriority", {"class": "IOPRIO_CLASS_NO"}, "process.ioPriority.class"),
        (
            "process.ioPriority",
            {"class": "IOPRIO_CLASS_RT", "priority": 8},
            "process.ioPriority.priority",
        ),
        ("linux.namespaces", [{"type": "pid"}, {"type": "pid"}], "linux.namespaces[1].type"),
        ("linux.namespaces", [{"type": "thing"}], "linux.namespaces[0].type"),
        ("linux.namespaces", [{"type": "pid", "path": "ns/pid"}], "linux.namespaces[0].path"),
        ("linux.namespaces", [{"type": "mount"}], "hostname"),
        ("linux.namespaces", [{"type": "uts"}], "linux.maskedPaths"),
        ("linux.uidMappings", [{"containerID": 0, "hostID": 1, "size": 1}], "linux.uidMappings"),
        ("linux.maskedPaths", ["proc"], "linux.maskedPaths[0]"),
        ("linux.rootfsPropagation", "private,slave", "linux.rootfsPropagation"),
        ("linux.devices", [{"path": "/d", "type": "x"}], "linux.devices[0].type"),
        ("linux.devices", [{"path": "d", "type": "c"}], "linux.devices[0].path"),
        ("linux.devices", [{"path": "/./..", "type": "c"}], "linux.devices[0].path"),
        (
            "linux.devices",
            [{"path": "/d", "type": "c", "major": 1 << 12}],
            "linux.devices[0].major",
        ),
        (
            "linux.devices",
            [{"path": "/d", "type": "c", "minor": 1 << 20}],
            "linux.devices[0].minor",
        ),
        ("linux.timeOffsets", {"boottime": {"secs": 1}}, "linux.timeOffsets"),
        ("linux.netDevices", {"eth/0": {}}, "linux.netDevices.eth/0"),
        ("linux.netDevices", {"eth0": {"name": "a" * 16}}, "linux.netDevices.eth0"),
        ("linux.personality", {"domain": "BSD"}, "linux.personality.domain"),
        ("linux.memoryPolicy", {"mode": "MPOL_X"}, "linux.memoryPolicy.mode"),
        ("hooks", {"poststop": [{"path": "x"}]}, "hooks.poststop[0].path"),
        ("hooks", {"poststop": [{"path": "/x", "timeout": 0}]}, "hooks.poststop[0].timeout"),
        ("hooks", {"prestart": [{"path": "/x", "args": [""]}]}, "hooks.prestart[0].args[0]"),
        ("hooks", {"poststart": [{"path": "/x", "env": [""]}]}, "hooks.poststart[0].env[0]"),
        (
            "hooks",
            {"poststart": [{"path": "/x", "env": ["A=1", "=2"]}]},
            "hooks.poststart[0].env[1]",
        ),
        ("mounts.0.type", "", "mounts[0].type"),
        ("mounts.0.destination", "", "mounts[0].destination"),
        ("mounts.0.options", ["idmap"], "mounts[0].options"),
        ("mounts.0", {"destination": "/x", "options": ["bind"]}, "mounts[0].source"),
        ("hostname", "x" * 65, "hostname"),
    ],
)
def test_contradicting_fields_are_refused(path: str, value: object, where: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        check(parse(put(default(), path, value)))
    assert caught.value.path == where


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("process.env", ["A=b", "=secret"]),
        ("process.env", ["secret"]),
        ("process.env", ["A=secret\0"]),
        ("process.env", ["A=secret\ud800"]),
        ("process.env", [{"secret": 1}]),
        ("hooks", {"poststart": [{"path": "/x", "env": ["=secret"]}]}),
    ],
)
def test_a_malformed_variable_is_not_in_the_message(path: str, value: object) -> None:
    with pytest.raises(InvalidSpec) as caught:
        check(parse(put(default(), path, value)))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("net.ipv4.ip_forward", "net/ipv4/ip_forward"),
        ("net/ipv4/conf/eth0.100/forwarding", "net/ipv4/conf/eth0.100/forwarding"),
        ("net.ipv4.conf.eth0/100.forwarding", "net/ipv4/conf/eth0.100/forwarding"),
        ("kernel.sem", "kernel/sem"),
    ],
)
def test_sysctl_separators_are_accepted(key: str, path: str) -> None:
    assert sysctl_path(key) == path


def test_a_process_is_parsed_alone() -> None:
    process = parse_process(
        {"args": ["true"], "cwd": "/", "user": {"uid": 1, "additionalGids": [2]}}
    )
    check_process(process)
    assert process == Process(args=("true",), cwd="/", user=User(1, 0, None, (2,)))


def test_values_compare_and_hash_by_fields() -> None:
    one = IdMap(0, 1000, 5)
    assert one == IdMap(container_id=0, host_id=1000, size=5)
    assert one != IdMap(0, 1000, 6)
    assert hash(one) == hash(IdMap(0, 1000, 5))
    assert one.replace(size=7) == IdMap(0, 1000, 7)
    assert repr(one) == "IdMap(container_id=0, host_id=1000, size=5)"
    for wrong in (lambda: IdMap(1, 2), lambda: IdMap(1, 2, 3, 4), lambda: IdMap(1, 2, 3, other=1)):  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            wrong()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
PLACES = [
    *(
        "process",
        "root",
        "mounts",
        "hooks",
        "linux",
        "annotations",
        "hostname",
        "process.user",
        "process.args",
    ),
    *(
        "process.rlimits",
        "process.rlimits.0",
        "mounts.0",
        "mounts.0.options",
        "linux.namespaces",
        "linux.namespaces.0",
    ),
    *(
        "linux.devices",
        "linux.sysctl",
        "linux.uidMappings",
        "linux.timeOffsets",
        "linux.netDevices",
        "linux.seccomp",
    ),
    *(
        "linux.memoryPolicy",
        "linux.personality",
        "process.scheduler",
        "process.capabilities",
        "process.consoleSize",
    ),
]


@settings(deadline=None)  # the machine may be busy
@given(st.sampled_from(PLACES), JSON)
def test_random_documents_are_parsed_or_refused(path: str, value: object) -> None:
    try:
        check(parse(put(default(), path, value)))
    except InvalidSpec as error:
        assert error.message
