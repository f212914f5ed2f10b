"""User namespaces: maps, mapped roots and volumes, devices by bind, limits set from outside, a
pod's namespace joined."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pyrunc.compile import host as facts
from pyrunc.compile.descriptors import NamedDescriptors
from pyrunc.compile.requests import CgroupChoice, Overlay, PauseRequest
from pyrunc.compile.sources import open_overlay
from pyrunc.errors import KernelError
from pyrunc.kernel import mount as km
from pyrunc.spec.model import IdMap, Linux, Namespace
from tests.kernel.box import Box, mounts, release
from tests.kernel.pause_process import hold
from tests.support import session

MAPS = [{"containerID": 0, "hostID": 100000, "size": 65536}]


@pytest.fixture
def mapped(box: Box) -> Box:
    """Return a box whose containers live in a new user namespace."""
    box.linux["namespaces"].append({"type": "user"})
    box.linux["uidMappings"] = box.linux["gidMappings"] = MAPS
    return box


def test_a_mapped_container_has_its_maps_and_ids(mapped: Box) -> None:
    text = mapped.run(
        "cat /proc/self/uid_map /proc/self/gid_map /proc/self/setgroups; id -u; stat -c %u / "
        "/bin/sh"
    )
    assert text.split() == ["0", "100000", "65536"] * 2 + ["allow", "0", "0", "0"]
    with mapped.running() as (created, request):
        assert os.stat(f"/proc/{created.pid}").st_uid == 100000
        assert os.readlink(f"/proc/{created.pid}/ns/user") != os.readlink("/proc/self/ns/user")
        assert mapped.execute(created, request, "id -u; cat /proc/self/uid_map").split()[:2] == [
            "0",
            "0",
        ]


def test_written_files_belong_to_the_mapped_root(mapped: Box) -> None:
    mapped.run("echo x > /made; chown 5:6 /made; stat -c %u:%g /made")
    status = (mapped.upper / "made").stat()
    assert (status.st_uid, status.st_gid) == (100005, 100006)


def test_a_mapped_container_has_devices_mounts_and_masks(mapped: Box) -> None:
    mapped.linux["maskedPaths"] = ["/proc/keys", "/proc/acpi"]
    text = mapped.run("echo x > /dev/null; head -c 3 /dev/zero | wc -c; cat /proc/keys")
    mounted = mounts(mapped.run("cat /proc/self/mountinfo"))
    assert mounted["/dev/null"][0].startswith("rw,nosuid,noexec")
    assert mounted["/proc"][1] == "proc"
    assert mounted["/sys"][1] == "sysfs"
    assert mounted["/sys/fs/cgroup"][1] == "cgroup2"
    assert text == "3\n"


def test_a_mapped_process_has_its_user_groups_and_limits(mapped: Box) -> None:
    mapped.process["user"] = {"uid": 1000, "gid": 1000, "additionalGids": [7]}
    mapped.process["rlimits"] = [{"type": "RLIMIT_NOFILE", "soft": 20, "hard": 30}]
    assert mapped.run("id -u; id -G; ulimit -n").split() == ["1000", "1000", "7", "20"]


def test_all_capabilities_can_be_given_away(mapped: Box) -> None:
    names = ["CAP_SYS_RESOURCE", "CAP_SYS_ADMIN"]
    mapped.process["capabilities"] = dict.fromkeys(("bounding", "effective", "permitted"), names)
    with mapped.running() as (created, _):
        assert created.warnings == () or "CAP" not in created.warnings[0]
    assert "CapEff:\t0000000001200000" in mapped.outcome("cat", "/proc/self/status")[1]


def test_an_unmapped_user_is_refused(mapped: Box) -> None:
    mapped.process["user"] = {"uid": 70000, "gid": 1}
    with pytest.raises(KernelError, match="setuid 70000"):
        mapped.run("true")


def own_cgroup(box: Box, *options: str) -> None:
    """Mount the container's cgroup tree without `ro` and with further `options`."""
    place = next(m for m in box.config["mounts"] if m["destination"] == "/sys/fs/cgroup")
    place["options"] = [option for option in place["options"] if option not in ("ro", "rw")] + list(
        options
    )


@pytest.mark.parametrize(("user", "owner"), [(0, 100000), (7, 100007)])
def test_the_cgroup_belongs_to_the_containers_user(mapped: Box, user: int, owner: int) -> None:
    own_cgroup(mapped)
    mapped.process["user"] = {"uid": user, "gid": 3}
    with mapped.running() as (created, request):
        assert created.cgroup is not None
        folder = Path(created.cgroup.directory)
        delegated = Path("/sys/kernel/cgroup/delegate").read_text().split()
        owners = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in folder.iterdir()}
        assert {name for name, ids in owners.items() if ids == (owner, 0)} == set(delegated) & set(
            owners
        )
        assert set(owners.values()) == {(owner, 0), (0, 0)} and folder.stat().st_uid == owner
        script = (
            "cd /sys/fs/cgroup && mkdir below && echo $$ > below/cgroup.procs && cat "
            "/proc/self/cgroup"
        )
        process = {"user": {"uid": user, "gid": 3}, "args": ["sh", "-c", script]}
        output = mapped.execute(created, request, script, process)
        assert output.splitlines()[-1] == "0::/below"
        assert "Permission denied" in mapped.execute(created, request,
            "echo 5 > /sys/fs/cgroup/cgroup.max.depth 2>&1; true",
            {"user": process["user"]})  # fmt: skip


@pytest.mark.parametrize("why", ["read-only", "host's tree", "no tree"])
def test_a_cgroup_that_the_container_cannot_write_to_stays_roots(mapped: Box, why: str) -> None:
    own_cgroup(mapped, "rw", "ro" if why == "read-only" else "rw")
    if why == "host's tree":
        mapped.linux["namespaces"] = [
            e for e in mapped.linux["namespaces"] if e["type"] != "cgroup"
        ]
    elif why == "no tree":
        mapped.config["mounts"] = [
            m for m in mapped.config["mounts"] if m["destination"] != "/sys/fs/cgroup"
        ]
    with mapped.running() as (created, _):
        assert created.cgroup is not None
        folder = Path(created.cgroup.directory)
        assert {path.stat().st_uid for path in (folder, *folder.iterdir())} == {0}


def test_a_mapped_container_can_have_a_terminal(mapped: Box) -> None:
    from pyrunc.container.create import create
    from tests.kernel.box import finish
    from tests.kernel.container.test_terminal import read_all

    mapped.process["terminal"] = True
    created = create(mapped.request("sh", "-c", "tty; stat -c %u /dev/pts/0"))
    assert created.console_fd is not None
    assert read_all(created.console_fd).split() == ["/dev/pts/0", "0"]
    os.close(created.console_fd)
    finish(created)


def test_a_mapped_volume_shows_mapped_owners(mapped: Box, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "file").write_text("x")
    mapped.bind(volume, "/v", "rbind", "rprivate")
    mapped.config["mounts"][-1].update(uidMappings=MAPS, gidMappings=MAPS)
    assert mapped.run("stat -c %u:%g /v/file; touch /v/new; chown 9:9 /v/new").split() == ["0:0"]
    assert (volume / "new").stat().st_uid == 9


def test_a_volume_can_have_a_map_without_a_user_namespace(box: Box, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    os.chown(volume, 5, 6)
    box.bind(volume, "/v", "bind", "idmap")
    box.config["mounts"][-1].update(
        uidMappings=[{"containerID": 5, "hostID": 77, "size": 1}],
        gidMappings=[{"containerID": 6, "hostID": 88, "size": 1}],
    )
    assert box.run("stat -c %u:%g /v").strip() == "77:88"


def test_containers_join_the_user_namespace_of_their_pod(box: Box) -> None:
    ids = MAPS
    kinds = ("user", "network", "ipc", "uts", "pid")
    shm = km.open_mount("tmpfs", [("mode", "1777")], attributes=2 | 4 | 8)
    pod = hold(
        session.name("upod"),
        PauseRequest(
            namespaces=dict.fromkeys(kinds, "new"),
            hostname="upod",
            sysctls={"net.ipv4.ip_forward": "1", "kernel.shmmax": "99999"},
            cgroup=CgroupChoice(missing_controllers="warn"),
            uid_mappings=ids,
            gid_mappings=ids,
        ),
        mounts={"/dev/shm": shm},
    )
    box.mount_fds["shm"] = shm
    box.config["mounts"] = [m for m in box.config["mounts"] if m["destination"] != "/dev/shm"]
    box.add_mount("/dev/shm", "pyrunc:shm", "rbind", "rw")
    more = {"mount_namespace": f"/proc/{pod.pid}/ns/mnt"}
    try:
        assert os.stat(f"/proc/{pod.pid}").st_uid == 100000 + 65535
        names = {"network": "net"}
        others = [e for e in box.linux["namespaces"] if e["type"] not in kinds]
        box.linux["namespaces"] = [
            *others,
            *(
                {"type": kind, "path": f"/proc/{pod.pid}/ns/{names.get(kind, kind)}"}
                for kind in kinds
            ),
        ]
        box.linux["uidMappings"] = box.linux["gidMappings"] = MAPS
        box.config["hostname"] = ""
        script = (
            "hostname; cat /proc/1/cmdline | tr '\\0' ' '; cat /proc/self/uid_map; stat -c "
            "%u /bin; cat /proc/sys/kernel/shmmax"
        )
        assert box.run(f"{script}; touch /dev/shm/x", **more).split() == [
            "upod",
            "pause",
            "0",
            "100000",
            "65536",
            "0",
            "99999",
        ]
        with box.running(**more) as (created, request):
            assert box.execute(
                created, request, "touch /x; stat -c %u /x; ls /dev/shm"
            ).split() == ["0", "x"]
            assert os.stat(f"/proc/{created.pid}").st_uid == 100000
    finally:
        os.close(shm)
        release(pod)


@pytest.mark.parametrize("layers", [1, 2, 40])
@pytest.mark.parametrize("writable", [True, False])
def test_layers_are_mapped_on_every_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, writable: bool
) -> None:
    lower = []
    for number in range(layers):
        folder = tmp_path / f"layers/{number:02}-{'x' * 40}/fs"
        folder.mkdir(parents=True)
        (folder / f"f{number}").touch()
        os.chown(folder / f"f{number}", number, 65535)
        lower.append(str(folder))
    (tmp_path / "upper").mkdir()
    (tmp_path / "work").mkdir()
    ids = (IdMap(0, 100000, 65536),)
    linux = Linux(namespaces=(Namespace("user"),), uid_mappings=ids, gid_mappings=ids)
    rootfs = Overlay(
        tuple(lower), *([str(tmp_path / "upper"), str(tmp_path / "work"), True] if writable else [])
    )
    # The overlay gets its layers as descriptors where the kernel accepts them, and otherwise from
    # temporary mount points.
    for kernel in (facts.host(), facts.host().replace(clones_detached=False)):
        monkeypatch.setattr(facts, "_host", kernel)
        with NamedDescriptors() as descriptors:
            mount = open_overlay(rootfs, linux, descriptors)
        try:
            for number in range(layers):
                status = os.stat(f"f{number}", dir_fd=mount)
                assert (status.st_uid, status.st_gid) == (100000 + number, 100000 + 65535)
            if writable:
                os.close(os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=mount))
                os.unlink("new", dir_fd=mount)
            else:
                with pytest.raises(OSError, match="Read-only"):
                    os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=mount)
        finally:
            os.close(mount)
        shutil.rmtree(tmp_path / "work")
        (tmp_path / "work").mkdir()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_mounts_that_a_user_namespace_may_not_make_are_bound(mapped: Box) -> None:
    """A container with the host's network and cgroup namespaces gets the host's sysfs and cgroup
    tree, read-only."""
    kinds = ("network", "cgroup")
    mapped.linux["namespaces"] = [e for e in mapped.linux["namespaces"] if e["type"] not in kinds]
    text = mapped.run(
        "cat /proc/self/mountinfo; ls /sys/class/net | tr '\\n' ' '; echo; touch /sys/x 2>&1 || "
        "true"
    )
    mounted = mounts("\n".join(line for line in text.splitlines() if " - " in line))
    assert mounted["/sys"][:2] == ("ro,nosuid,nodev,noexec,relatime", "sysfs")
    assert (
        mounted["/sys/fs/cgroup"][0].startswith("ro,") and mounted["/sys/fs/cgroup"][1] == "cgroup2"
    )
    assert set(os.listdir("/sys/class/net")) <= set(text.splitlines()[-2].split())
    assert "Read-only" in text.splitlines()[-1]


def test_root_of_the_host_may_mount_sysfs(box: Box) -> None:
    box.linux["namespaces"] = [
        e for e in box.linux["namespaces"] if e["type"] not in ("network", "cgroup")
    ]
    assert mounts(box.run("cat /proc/self/mountinfo"))["/sys"][1] == "sysfs"


@pytest.mark.parametrize("kind", ["c", "u", "b"])
def test_a_device_that_cannot_be_made_is_bound(mapped: Box, kind: str) -> None:
    """In a user namespace mknod(2) fails, so the host's device node is bind-mounted, if the host
    has one."""
    block = next((p for p in sorted(Path("/dev").iterdir()) if p.is_block_device()), None)
    path = str(block) if kind == "b" else "/dev/zero"
    assert path != "None", "this machine has no block device"
    number = os.stat(path).st_rdev
    major, minor = os.major(number), os.minor(number)
    mapped.linux["devices"] = [{"path": path, "type": kind, "major": major, "minor": minor}]
    text = mapped.run(f"stat -c '%t:%T' {path}; grep -c ' {path} ' /proc/self/mountinfo")
    assert text.split() == [f"{major:x}:{minor:x}", "1"]
