"""Tests the OCI objects for the parts of a spec: capabilities, resources, cgroups, namespaces,
mounts, signals, profiles."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cri_server.api import api_pb2 as api
from cri_server.config.model import PodsConfig
from cri_server.sandboxes import sysctls
from cri_server.spec import (
    capabilities,
    groups,
    mounts,
    namespaces,
    resources,
    security,
    signals,
    sources,
)
from cri_server.spec.open_sources import OpenSources
from pyrunc.errors import DeadlineExceeded, InvalidArgument, Unsupported, WrongState

EVERYTHING = 2**41 - 1


def caps(**fields: list[str]) -> dict[str, list[str]]:
    request = api.LinuxContainerSecurityContext(capabilities=api.Capability(**fields))  # type: ignore[arg-type]
    return capabilities.to_oci(request, EVERYTHING)


@pytest.mark.requirement("8.2")
def test_containers_have_the_default_capabilities() -> None:
    sets = caps()
    assert (
        len(sets["bounding"]) == 14 and sets["bounding"] == sets["effective"] == sets["permitted"]
    )
    assert "CAP_NET_RAW" in sets["bounding"] and not sets["ambient"] and not sets["inheritable"]


@pytest.mark.requirement("8.2")
def test_capabilities_are_dropped_and_added() -> None:
    assert caps(drop_capabilities=["ALL"])["bounding"] == []
    assert caps(drop_capabilities=["ALL"], add_capabilities=["CAP_NET_ADMIN"])["bounding"] == [
        "CAP_NET_ADMIN"
    ]
    assert len(caps(add_capabilities=["ALL"])["bounding"]) == 41
    assert "CAP_KILL" not in caps(add_capabilities=["ALL"], drop_capabilities=["KILL"])["bounding"]
    ambient = caps(drop_capabilities=["ALL"], add_ambient_capabilities=["SYS_TIME"])
    assert ambient["ambient"] == ambient["permitted"] == ["CAP_SYS_TIME"]
    with pytest.raises(InvalidArgument, match="CAP_NOPE"):
        caps(add_capabilities=["NOPE"])


def test_configured_capabilities_replace_the_defaults() -> None:
    request = api.LinuxContainerSecurityContext(
        capabilities=api.Capability(drop_capabilities=["KILL"], add_capabilities=["SYS_TIME"])
    )
    sets = capabilities.to_oci(request, EVERYTHING, ["CAP_KILL", "CAP_CHOWN"])
    assert sets["bounding"] == ["CAP_CHOWN", "CAP_SYS_TIME"]


def test_settings_of_pods_apply_to_new_networks_only() -> None:
    def with_defaults(
        pods: PodsConfig, requested: dict[str, str], **options: Any
    ) -> dict[str, str]:
        return sysctls.with_defaults(requested, api.NamespaceOption(**options), pods)

    ports, ping = "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range"
    both = PodsConfig(unprivileged_ports=True, unprivileged_ping=True)
    users = api.UserNamespace(mode=api.POD)
    assert with_defaults(PodsConfig(), {"kernel.sem": "1"}) == {"kernel.sem": "1"}
    assert with_defaults(both, {}) == {ports: "0", ping: "0 2147483647"}
    assert with_defaults(both, {}, network=api.NODE) == {}
    assert with_defaults(both, {}, userns_options=users) == {ports: "0"}
    assert with_defaults(both, {ports.replace(".", "/"): "80"}) == {
        ping: "0 2147483647", ports.replace(".", "/"): "80",
    }  # fmt: skip


@pytest.mark.requirement("3.1.4")
@pytest.mark.parametrize(
    ("name", "nodes", "problem"),
    [
        ("net.ipv4.ip_forward", {"network": api.NODE}, "host's network namespace"),
        ("net/ipv4/conf/eth0.1/rp_filter", {"network": api.NODE}, "host's network namespace"),
        ("kernel.shmmax", {"ipc": api.NODE}, "host's IPC namespace"),
        ("fs.mqueue.msg_max", {"ipc": api.NODE}, "host's IPC namespace"),
        ("kernel.panic", None, "is not namespaced"),
        ("kernel.domainname", None, "is not namespaced"),
        ("user.max_user_namespaces", None, "is not namespaced"),
        ("vm.swappiness", None, "is not namespaced"),
    ],
)
def test_a_sysctl_needs_a_namespace_of_the_pod(
    name: str, nodes: dict[str, Any] | None, problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem) as refused:
        sysctls.check({name: "1"}, api.NamespaceOption(**nodes or {}))
    assert repr(name) in str(refused.value)
    if nodes:
        sysctls.check({name: "1"}, api.NamespaceOption())


def test_a_configured_profile_is_the_runtimes_default(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"defaultAction": "SCMP_ACT_LOG"}')
    default = security.ProfileChoice(security.DEFAULT)
    assert security.seccomp_object(default, [], str(path)) == {"defaultAction": "SCMP_ACT_LOG"}
    assert (
        security.seccomp_object(security.ProfileChoice(security.UNCONFINED), [], str(path)) is None
    )


def test_a_privileged_container_has_the_capabilities_of_the_server() -> None:
    privileged = api.LinuxContainerSecurityContext(privileged=True)
    assert len(capabilities.to_oci(privileged, EVERYTHING)["bounding"]) == 41
    assert capabilities.to_oci(privileged, 0b101)["bounding"] == [
        "CAP_CHOWN",
        "CAP_DAC_READ_SEARCH",
    ]


def test_resources_become_oci_limits() -> None:
    request = api.LinuxContainerResources(
        cpu_period=100000,
        cpu_quota=-1,
        cpu_shares=512,
        memory_limit_in_bytes=1 << 20,
        cpuset_cpus="0",
        unified={"memory.oom.group": "1"},
        hugepage_limits=[api.HugepageLimit(page_size="2MB", limit=0)],
    )
    assert resources.to_oci(request) == {
        "cpu": {"shares": 512, "quota": -1, "period": 100000, "cpus": "0"},
        "memory": {"limit": 1 << 20, "swap": 1 << 20},
        "hugepageLimits": [{"pageSize": "2MB", "limit": 0}],
        "unified": {"memory.oom.group": "1"},
    }
    assert resources.to_oci(api.LinuxContainerResources()) == {}
    limited = {"hugepageLimits": [{"pageSize": "2MB", "limit": 0}], "cpu": {}}
    assert resources.without_hugepages(limited, frozenset()) == {"cpu": {}}
    assert resources.without_hugepages(limited, frozenset({"hugetlb"})) == limited


@pytest.mark.parametrize(
    "fields",
    [
        {"cpu_quota": -2},
        {"memory_limit_in_bytes": -2},
        {"oom_score_adj": 1001},
        {"cpu_shares": -1},
        {"memory_limit_in_bytes": 100, "memory_swap_limit_in_bytes": 99},
        {"unified": {"../x": "1"}},
        {"unified": {"cgroup.procs": "1"}},
    ],
)
def test_invalid_resources_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        resources.to_oci(api.LinuxContainerResources(**fields))  # type: ignore[arg-type]


def test_limits_are_replaced_only_where_cri_has_them() -> None:
    others = {"pids": {"limit": 7}, "blockIO": {"weight": 10}, "devices": [{"allow": False}]}
    current = {
        **others,
        "cpu": {"shares": 2, "quota": 1000},
        "memory": {"limit": 4096, "reservation": 1},
        "unified": {"memory.high": "1"},
    }
    assert resources.replace(current, {"cpu": {"shares": 3}}) == {
        **others,
        "cpu": {"shares": 3},
        "memory": {"reservation": 1},
    }


def test_an_update_changes_only_set_fields() -> None:
    current = api.LinuxContainerResources(cpu_shares=2, cpuset_cpus="0-1", memory_limit_in_bytes=5)
    merged = resources.merge(current, api.LinuxContainerResources(cpuset_cpus="1"))
    assert (merged.cpu_shares, merged.cpuset_cpus, merged.memory_limit_in_bytes) == (2, "1", 5)
    assert current.cpuset_cpus == "0-1"


@given(st.integers(-1000, 1000), st.one_of(st.none(), st.integers(-1000, 1000)))
def test_the_oom_score_is_never_below_the_floor(value: int, floor: int | None) -> None:
    score = resources.clamp_oom_score_adj(value, floor)
    assert score >= value and (floor is None or score >= floor) and score in (value, floor)


@pytest.mark.requirement("7.1.2", "7.1.3", "13.22")
def test_cgroups_are_named_by_driver() -> None:
    assert groups.parent("", "cgroupfs", "") == "/pyrunc"
    assert groups.parent("/", "cgroupfs", "") == "/"
    assert groups.parent("/kubepods//pod1/", "cgroupfs", "") == "/kubepods/pod1"
    assert groups.path("/kubepods/pod1", "abc", "cgroupfs") == "/kubepods/pod1/abc"
    assert groups.parent("", "systemd", "") == "system.slice"
    assert groups.parent("/", "systemd", "mine.slice") == "mine.slice"
    assert (
        groups.parent("/kubepods.slice/kubepods-pod1.slice", "systemd", "") == "kubepods-pod1.slice"
    )
    assert groups.path("kubepods.slice", "abc", "systemd") == "kubepods.slice:cri-pyrunc:abc"


@pytest.mark.requirement("13.12")
@pytest.mark.parametrize(
    ("requested", "driver"),
    [
        ("test.slice", "cgroupfs"),
        ("/a.slice", "cgroupfs"),
        ("/a/../..", "cgroupfs"),
        ("relative", "cgroupfs"),
        ("/kubepods/pod", "systemd"),
        ("a:b.slice", "systemd"),
    ],
)
def test_a_parent_of_the_other_driver_is_refused(requested: str, driver: str) -> None:
    with pytest.raises(InvalidArgument):
        groups.parent(requested, driver, "")


def options(**fields: object) -> api.NamespaceOption:
    return api.NamespaceOption(**fields)  # type: ignore[arg-type]


def test_an_ordinary_container_has_these_namespaces() -> None:
    entries = namespaces.entries(options(pid=api.CONTAINER), 9, 0, privileged=False)
    assert entries == [
        {"type": "mount"},
        {"type": "cgroup"},
        {"type": "network", "path": "/proc/9/ns/net"},
        {"type": "uts", "path": "/proc/9/ns/uts"},
        {"type": "ipc", "path": "/proc/9/ns/ipc"},
        {"type": "pid"},
    ]


@pytest.mark.requirement("8.14")
@pytest.mark.parametrize("pid", [api.POD, api.CONTAINER, api.NODE, api.TARGET])
@pytest.mark.parametrize("network", [api.POD, api.NODE])
@pytest.mark.parametrize("ipc", [api.POD, api.NODE, api.CONTAINER])
@pytest.mark.parametrize("privileged", [False, True])
def test_every_mode_gives_exactly_its_namespaces(
    pid: int, network: int, ipc: int, privileged: bool
) -> None:
    entries = namespaces.entries(
        options(pid=pid, network=network, ipc=ipc), 9, 7, privileged=privileged
    )
    by_type = {entry["type"]: entry.get("path", "new") for entry in entries}
    assert len(by_type) == len(entries)
    assert by_type.get("network") == {api.POD: "/proc/9/ns/net", api.NODE: None}[network]
    assert by_type.get("uts") == {api.POD: "/proc/9/ns/uts", api.NODE: None}[network]
    assert (
        by_type.get("ipc") == {api.POD: "/proc/9/ns/ipc", api.NODE: None, api.CONTAINER: "new"}[ipc]
    )
    expected = {
        api.POD: "/proc/9/ns/pid",
        api.CONTAINER: "new",
        api.NODE: None,
        api.TARGET: "/proc/7/ns/pid",
    }
    assert by_type.get("pid") == expected[pid]
    assert ("cgroup" in by_type) is not privileged and by_type["mount"] == "new"


RANGE = api.IDMapping(host_id=100000, container_id=0, length=1000)


@pytest.mark.requirement("8.16")
@pytest.mark.parametrize(
    "users",
    [
        api.UserNamespace(mode=api.CONTAINER, uids=[RANGE], gids=[RANGE]),
        api.UserNamespace(mode=api.TARGET, uids=[RANGE], gids=[RANGE]),
        api.UserNamespace(mode=api.POD, uids=[RANGE, RANGE], gids=[RANGE]),
        api.UserNamespace(mode=api.POD, uids=[RANGE]),
        api.UserNamespace(
            mode=api.POD, uids=[api.IDMapping(host_id=1, container_id=1, length=1)], gids=[RANGE]
        ),
        api.UserNamespace(
            mode=api.POD, uids=[api.IDMapping(host_id=1, container_id=0, length=0)], gids=[RANGE]
        ),
        api.UserNamespace(mode=api.NODE, uids=[RANGE]),
    ],
)
def test_invalid_user_namespaces_are_refused(users: api.UserNamespace) -> None:
    with pytest.raises(InvalidArgument):
        namespaces.check_sandbox(options(userns_options=users))


@pytest.mark.requirement("8.16")
def test_a_container_shares_the_namespaces_of_its_sandbox() -> None:
    host = options(network=api.NODE, pid=api.CONTAINER)
    namespaces.check_container(options(pid=api.CONTAINER), host)
    assert namespaces.effective(options(pid=api.CONTAINER), host) == host
    assert namespaces.effective(host, options(pid=api.CONTAINER)).network == api.POD
    with pytest.raises(InvalidArgument):
        namespaces.check_container(options(network=api.CONTAINER), host)
    namespaces.check_container(options(pid=api.POD), options(pid=api.CONTAINER))
    assert namespaces.effective(options(), options(pid=api.NODE, ipc=api.NODE)) == options(
        pid=api.NODE, ipc=api.NODE
    )
    assert namespaces.effective(options(), options(pid=api.CONTAINER)) == options()
    with pytest.raises(InvalidArgument):
        namespaces.check_container(options(pid=api.TARGET), options(pid=api.CONTAINER))
    namespaces.check_container(options(pid=api.CONTAINER), options(pid=api.POD))


FILES = "/s"


def default(**changes: object) -> list[mounts.Mount]:
    settings = {
        "ipc": api.POD,
        "shared_shm": True,
        "privileged": False,
        "readonly_root": False,
        **changes,
    }
    return mounts.defaults(FILES, **settings)  # type: ignore[arg-type]


def merged(*requests: api.Mount) -> list[mounts.Mount]:
    mount_requests = mounts.check_requests(requests)
    for mount in mount_requests:
        mount.source = mount.request.host_path
    return mounts.merge(default(), mount_requests)


def test_every_container_has_the_default_mounts() -> None:
    by_destination = {m["destination"]: m for m in default()}
    assert (
        by_destination["/dev/shm"]["source"] == "pyrunc:shm"
        and "ro" in by_destination["/sys"]["options"]
    )
    assert "rw" in by_destination["/etc/hosts"]["options"]
    assert {m["destination"]: m for m in default(readonly_root=True)}["/etc/hosts"]["options"][
        -1
    ] == "ro"
    assert "rw" in {m["destination"]: m for m in default(privileged=True)}["/sys"]["options"]
    assert {m["destination"]: m for m in default(ipc=api.NODE)}["/dev/shm"]["source"] == "/dev/shm"
    assert {m["destination"]: m for m in default(ipc=api.CONTAINER)}["/dev/shm"]["type"] == "tmpfs"


@pytest.mark.requirement("6.15")
def test_requested_mounts_replace_defaults_and_are_ordered_by_depth() -> None:
    mount_list = merged(
        api.Mount(container_path="/etc/hosts", host_path="/k/hosts"),
        api.Mount(container_path="/a/b/c", host_path="/3"),
        api.Mount(container_path="/a", host_path="/1", readonly=True),
    )
    destinations = [m["destination"] for m in mount_list]
    assert destinations.count("/etc/hosts") == 1
    assert destinations.index("/a") < destinations.index("/a/b/c") and destinations[0] == "/proc"
    by_destination = {m["destination"]: m for m in mount_list}
    assert by_destination["/etc/hosts"]["source"] == "/k/hosts"
    assert by_destination["/a"]["options"] == ["rbind", "rprivate", "ro"]


@pytest.mark.requirement("6.15")
def test_a_mount_over_dev_removes_the_default_mounts_below_dev() -> None:
    destinations = [
        m["destination"] for m in merged(api.Mount(container_path="/dev", host_path="/dev"))
    ]
    assert destinations.count("/dev") == 1 and not [
        d for d in destinations if d.startswith("/dev/")
    ]


@pytest.mark.requirement("6.15")
@pytest.mark.parametrize(
    ("place", "hidden", "remaining"),
    [
        # containerd lists defaults first, so that a request covers what is below it; CRI-O leaves
        # out those of /dev
        ("/sys", {"/sys", "/sys/fs/cgroup"}, {"/proc", "/dev"}),
        ("/sys/fs", {"/sys/fs/cgroup"}, {"/sys"}),
        ("/sys/fs/cgroup", set(), {"/sys", "/sys/fs/cgroup"}),
        ("/dev", {"/dev/pts", "/dev/shm", "/dev/mqueue"}, {"/proc", "/sys"}),
        ("/proc", set(), {"/proc", "/sys"}),
        ("/run", set(), {"/proc", "/sys", "/sys/fs/cgroup", "/dev/shm"}),
        ("/sysfs", set(), {"/sys", "/sys/fs/cgroup"}),
        # its name service is the pod's, as under containerd
        ("/etc", set(), {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}),
    ],
)
def test_default_mounts_that_a_request_covers_are_left_out(
    place: str, hidden: set[str], remaining: set[str]
) -> None:
    mount_list = merged(api.Mount(container_path=place, host_path="/host"))
    places = [m["destination"] for m in mount_list]
    assert not (hidden - {place}) & set(places) and remaining <= set(places)
    (own,) = [m for m in mount_list if m["destination"] == place]
    assert own["source"] == "/host"
    assert all(places.index(place) < places.index(p) for p in places if p.startswith(f"{place}/"))


def test_a_volume_of_an_image_covers_no_default() -> None:
    """An image's VOLUME at /sys/fs leaves the default mount /sys/fs/cgroup in place. A host path
    mounted at /sys/fs would remove it."""
    volume = mounts.MountRequest(
        api.Mount(container_path="/sys/fs"), "/sys/fs", source="/c/volumes/0"
    )
    assert "/sys/fs/cgroup" in [m["destination"] for m in mounts.merge(default(), [volume])]


@pytest.mark.requirement("6.10", "6.14")
def test_a_mount_has_the_requested_options() -> None:
    mount_list = merged(
        api.Mount(
            container_path="/s", host_path="/s", propagation=api.PROPAGATION_HOST_TO_CONTAINER
        ),
        api.Mount(container_path="/r", host_path="/r", readonly=True, recursive_read_only=True),
        api.Mount(container_path="/o", host_path="/o", mount_options=["nosuid", "noexec"]),
    )
    by_destination = {m["destination"]: m["options"] for m in mount_list}
    assert by_destination["/s"] == ["rbind", "rslave", "rw"]
    assert by_destination["/r"] == ["rbind", "rprivate", "rro"]
    assert by_destination["/o"] == ["rbind", "rprivate", "rw", "noexec", "nosuid"]


@pytest.mark.requirement("6.10", "6.14")
@pytest.mark.parametrize(
    "request_",
    [
        api.Mount(container_path="relative", host_path="/x"),
        api.Mount(container_path="/", host_path="/x"),
        api.Mount(container_path="/../..", host_path="/x"),
        api.Mount(container_path="/x", host_path="relative"),
        api.Mount(container_path="/x", host_path=""),
        api.Mount(container_path="/x\0", host_path="/x"),
        api.Mount(container_path="/x", host_path="/x", propagation=9),  # type: ignore[arg-type]
        api.Mount(container_path="/x", host_path="/x", recursive_read_only=True),
        api.Mount(
            container_path="/x",
            host_path="/x",
            readonly=True,
            recursive_read_only=True,
            propagation=api.PROPAGATION_BIDIRECTIONAL,
        ),
        api.Mount(container_path="/x", host_path="/x", mount_options=["suid"]),
        api.Mount(container_path="/x", image=api.ImageSpec(image="i")),
        api.Mount(
            container_path="/x", host_path="/y", readonly=True, image=api.ImageSpec(image="i")
        ),
        api.Mount(
            container_path="/x",
            readonly=True,
            image=api.ImageSpec(image="i"),
            image_sub_path="../x",
        ),
    ],
)
def test_invalid_mounts_are_refused(request_: api.Mount) -> None:
    with pytest.raises(InvalidArgument, match=r"mounts\[0\]"):
        mounts.check_requests([request_])


def test_missing_sources_become_directories(tmp_path: Path) -> None:
    target = tmp_path / "real"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    requests = mounts.check_requests(
        [
            api.Mount(container_path="/a", host_path=str(tmp_path / "made" / "deep")),
            api.Mount(container_path="/b", host_path=str(tmp_path / "link")),
        ]
    )
    with OpenSources() as opened:
        sources.resolve(requests, opened)
        assert {
            path: os.readlink(f"/proc/self/fd/{number}") for path, number in opened.fds.items()
        } == {path: path for path in (str(tmp_path / "made/deep"), str(target))}
    assert not opened.fds
    assert (tmp_path / "made" / "deep").is_dir() and requests[1].source == str(target)


async def test_a_path_that_does_not_answer_is_abandoned() -> None:
    import threading

    never = threading.Event()
    with pytest.raises(DeadlineExceeded, match="/nfs"):
        await sources.run_with_deadline(0.05, "/nfs", never.wait)
    never.set()


async def test_a_late_result_is_discarded() -> None:
    import threading

    late, discarded = threading.Event(), threading.Event()
    with pytest.raises(DeadlineExceeded, match="/nfs"):
        await sources.run_with_deadline(
            0.05, lambda: "/nfs", late.wait, discard=lambda result: discarded.set()
        )
    assert not discarded.is_set()
    late.set()
    assert discarded.wait(30)


def test_sources_opened_after_their_deadline_are_closed(tmp_path: Path) -> None:
    opened = OpenSources()
    opened.open(str(tmp_path), "/v", links=False)
    (descriptor,) = opened.fds.values()
    number = os.open(tmp_path, os.O_PATH)
    opened.close()
    with pytest.raises(WrongState):
        opened.add("/late", "/v", number, "/late")
    with pytest.raises(WrongState):
        opened.open(str(tmp_path), "/v", links=False)
    for each in (descriptor, number):
        with pytest.raises(OSError):
            os.fstat(each)


def test_devices_are_resolved() -> None:
    (device,) = sources.devices(
        [api.Device(host_path="/dev/null", container_path="/dev/mine", permissions="r")]
    )
    assert (device.path, device.type, device.major, device.minor, device.access) == (
        "/dev/mine",
        "c",
        1,
        3,
        "r",
    )
    for wrong in (
        api.Device(host_path="/dev/null", permissions="x"),
        api.Device(host_path="/etc/passwd"),
        api.Device(host_path="null"),
        api.Device(host_path="/no/such"),
    ):
        with pytest.raises(InvalidArgument):
            sources.devices([wrong])


@pytest.mark.requirement("12.3")
def test_every_signal_of_the_enum_is_converted_and_back() -> None:
    for value in api.Signal.values():
        if value:
            name = signals.from_cri(value)
            assert signals.number(name) > 0
            again = signals.to_cri(name)
            assert signals.number(signals.from_cri(again)) == signals.number(name)


@pytest.mark.requirement("12.3")
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("15", "SIGTERM"),
        ("TERM", "SIGTERM"),
        ("SIGKILL", "SIGKILL"),
        ("sigrtmin+3", "SIGRTMIN+3"),
        ("37", "SIGRTMIN+3"),
    ],
)
def test_signals_of_images_are_parsed(text: str, name: str) -> None:
    assert signals.from_text(text) == name


@pytest.mark.requirement("4.3.1", "12.3")
def test_the_stop_signal_is_the_callers_then_the_images() -> None:
    assert signals.stop_signal(api.SIGNAL_SIGHUP, "SIGINT") == "SIGHUP"
    assert signals.stop_signal(0, "INT") == "SIGINT" and signals.stop_signal(0, "") == "SIGTERM"
    for wrong in ("SIGNOPE", "0", "65", "SIGTERM+1", "SIGRTMIN+\u00b2", "9" * 5000):
        with pytest.raises(InvalidArgument):
            signals.stop_signal(0, wrong)
    with pytest.raises(InvalidArgument):
        signals.stop_signal(999, "")


def security_context(**fields: object) -> api.LinuxContainerSecurityContext:
    return api.LinuxContainerSecurityContext(**fields)  # type: ignore[arg-type]


@pytest.mark.requirement("8.8", "14.3")
def test_presence_of_the_field_decides_about_seccomp() -> None:
    assert security.seccomp_profile(security_context()).kind == "unconfined"
    assert (
        security.seccomp_profile(security_context(seccomp=api.SecurityProfile())).kind == "default"
    )
    unconfined = api.SecurityProfile(profile_type=api.SecurityProfile.Unconfined)
    assert security.seccomp_profile(security_context(seccomp=unconfined)).kind == "unconfined"
    assert (
        security.seccomp_profile(security_context(seccomp_profile_path="runtime/default")).kind
        == "default"
    )
    both = security_context(seccomp=unconfined, seccomp_profile_path="runtime/default")
    assert security.seccomp_profile(both).kind == "unconfined"
    privileged = security_context(privileged=True, seccomp=api.SecurityProfile())
    assert security.seccomp_profile(privileged).kind == "unconfined"


@pytest.mark.requirement("8.8")
def test_localhost_profiles_are_read(tmp_path: Path) -> None:
    profile = tmp_path / "p.json"
    profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_ERRNO"}))
    request = api.SecurityProfile(
        profile_type=api.SecurityProfile.Localhost, localhost_ref=str(profile)
    )
    document = security.seccomp_object(
        security.seccomp_profile(security_context(seccomp=request)), []
    )
    assert document == {"defaultAction": "SCMP_ACT_ERRNO"}
    for content in ("not json", "[]", "{}"):
        profile.write_text(content)
        with pytest.raises(InvalidArgument):
            security.seccomp_object(security.ProfileChoice("localhost", str(profile)), [])
    for path in (str(tmp_path / "absent"), "relative", "/dev/zero", str(tmp_path)):
        with pytest.raises(InvalidArgument):
            security.seccomp_object(security.ProfileChoice("localhost", path), [])


@pytest.mark.requirement("8.9")
def test_apparmor_profiles_are_selected() -> None:
    localhost = api.SecurityProfile(
        profile_type=api.SecurityProfile.Localhost, localhost_ref="localhost/mine"
    )
    profile = security.apparmor_profile(security_context(apparmor=localhost))
    assert profile == security.ProfileChoice("localhost", "mine")
    with pytest.raises(Unsupported):
        security.apparmor_name(profile, enabled=False, default="", loaded=set())
    with pytest.raises(InvalidArgument):
        security.apparmor_name(profile, enabled=True, default="ours", loaded={"other"})
    assert security.apparmor_name(profile, enabled=True, default="ours", loaded={"mine"}) == "mine"
    default_ = security.apparmor_profile(security_context(apparmor_profile="runtime/default"))
    assert security.apparmor_name(default_, enabled=False, default="", loaded=set()) == ""
    assert security.apparmor_name(default_, enabled=True, default="ours", loaded=set()) == "ours"
    assert security.apparmor_profile(security_context()) == default_
    unconfined = security.apparmor_profile(security_context(apparmor_profile="unconfined"))
    assert security.apparmor_name(unconfined, enabled=True, default="ours", loaded=set()) == ""


@pytest.mark.parametrize(
    ("driver", "parent"), [("cgroupfs", "/kubepods/pod1"), ("systemd", "kubepods-pod1.slice")]
)
def test_a_group_is_found_by_its_own_driver(driver: str, parent: str) -> None:
    group = groups.place(groups.path(parent, "abc", driver), "abc")
    assert groups.driver_of(parent) == group.driver == driver
    assert group.path.startswith("/kubepods") and "abc" in group.path.rpartition("/")[2]
