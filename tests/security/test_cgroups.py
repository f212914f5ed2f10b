"""Attacks on the separation by cgroups and the kernel's namespaces.

Classes: CVE-2023-25809 (a writable cgroup tree), CVE-2022-0492 (release_agent), traversal by
`unified`, huge page sizes, exec --cgroup and cgroupsPath (runc #4103, crun 1.28), device rules,
/dev/shm and mqueue, System V objects.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pyrunc.cgroups.group import Cgroup
from pyrunc.errors import InvalidSpec
from pyrunc.kernel import cgroup as tree
from tests.security.attack import mount, refused
from tests.support.processes import wait_until
from tests.system.harness import Runtime

Config = dict[str, Any]
MAPS = {"uidMappings": [{"containerID": 0, "hostID": 100000, "size": 65536}],
    "gidMappings": [{"containerID": 0, "hostID": 100000, "size": 65536}]}  # fmt: skip


def groups() -> set[str]:
    return {folder for folder, _, _ in os.walk(tree.root())}


@pytest.mark.parametrize(
    "resources",
    [
        {"unified": {"../cgroup.procs": "0"}},
        {"unified": {"../../cgroup.procs": "0"}},
        {"unified": {"/proc/sys/kernel/core_pattern": "|/evil"}},
        {"unified": {"cgroup.procs/../../cgroup.procs": "0"}},
        {"unified": {"memory.max\0": "0"}},
        {"unified": {"..": "0"}},
        {"unified": {"": "0"}},
        {"hugepageLimits": [{"pageSize": "../../foo", "limit": 1}]},
        {"hugepageLimits": [{"pageSize": "2MB/../../../x", "limit": 1}]},
        {"hugepageLimits": [{"pageSize": "", "limit": 1}]},
        {"rdma": {"../x": {"hcaHandles": 1}}},
    ],
)  # fmt: skip
def test_names_of_limits_cannot_be_other_files(runtime: Runtime, resources: dict[str, Any]) -> None:
    """runc #4103: names of limits in config.json become names of cgroup files. Names that lead to
    other files are refused, and the caller's process stays in its cgroup."""
    before = Path("/proc/self/cgroup").read_text()

    def change(config: Config) -> None:
        config["linux"]["resources"].update(resources)

    refused(runtime.run("true", change=change))
    # A 0 in the root's cgroup.procs would have moved this process.
    assert Path("/proc/self/cgroup").read_text() == before


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../../../tmp/pyrunc-escape",
        "/../..",
        "/",
        "..",
        "//",
        "/.",
        "a\0b",
        "/x/../../../../../../../tmp/pyrunc-escape",
    ],
)
def test_the_cgroups_path_cannot_leave_the_tree(runtime: Runtime, path: str) -> None:
    """As in crun 1.28, cgroupsPath climbs by `..`, or is the root. Nothing is made outside of the
    cgroup tree, and the root cgroup never becomes a container's cgroup."""

    def change(config: Config) -> None:
        config["linux"]["cgroupsPath"] = path

    box = runtime.box("cat", "/proc/self/cgroup", change=change)
    result = runtime("run", "--bundle", str(box.folder), box.id)
    assert not os.path.exists("/tmp/pyrunc-escape")
    assert not {g for g in groups() if g.endswith(("/pyrunc-escape", "/tmp", "/proc", "/x"))}
    if path in ("/../..", "/", "//", "/.", "a\0b"):
        refused(result)


@pytest.mark.parametrize("path", ["/", "", "/.", "/..", "/a/../..", "//", "/a//b"])
def test_commands_refuse_the_root_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A container's cgroup is the root of the tree (cgroupsPath `x:y:-.slice` with systemd, or a
    tampered state.json), so that ending the container would end every process of the machine. Each
    command refuses."""
    # In a plain folder a missing check does no harm.
    monkeypatch.setattr(tree, "_root", str(tmp_path))
    (tmp_path / "cgroup.procs").write_text("")
    for verb in (Cgroup.create, Cgroup.kill, Cgroup.freeze, Cgroup.remove):
        with pytest.raises(InvalidSpec, match="cannot be a container's cgroup"):
            verb(Cgroup(path))
    assert sorted(os.listdir(tmp_path)) == ["cgroup.procs"]


@pytest.mark.parametrize(
    "where",
    ["../../", "..", "/..", "../..", "x/../../..", "/../../../proc", "memory:../../x", "a\0b"],
)
def test_the_group_of_an_exec_stays_below_the_containers(runtime: Runtime, where: str) -> None:
    """As in crun 1.28 and 1.29, the path of `exec --cgroup` climbs out of the container's cgroup.
    The command fails."""
    if "\0" in where:
        return
    box = runtime.box("sleep", "60").up()
    result = box.exec("cat", "/proc/self/cgroup", options=["--cgroup", where])
    assert result.code != 0, result


def test_a_container_sees_only_its_own_part_of_the_tree(runtime: Runtime) -> None:
    """CVE-2023-25809: /sys/fs/cgroup of a container begins at the container's own cgroup and is
    read-only. The container can neither see nor write to cgroups of the host, also with a user
    namespace."""
    script = (
        "cat /proc/self/cgroup | grep ^0; ls /sys/fs/cgroup | grep -c slice; (echo 0 >"
        " /sys/fs/cgroup/cgroup.procs) 2>&1; mkdir /sys/fs/cgroup/x 2>&1; mount -o remount,rw"
        " /sys/fs/cgroup 2>&1; true"
    )

    def mapped(config: Config) -> None:
        config["linux"]["namespaces"].append({"type": "user"})
        config["linux"].update(MAPS)
        config["root"]["readonly"] = False

    os.chown(runtime.rootfs, 100000, 100000)
    for path in (runtime.folder, runtime.folder.parent, runtime.folder.parent.parent):
        path.chmod(path.stat().st_mode | 0o055)
    for change in (None, mapped):
        out = runtime.shell(script, change=change).out.splitlines()
        assert out[:2] == ["0::/", "0"], out
        assert sum("Read-only file system" in line for line in out) >= 2, out
        assert any(
            "mount:" in line and ("denied" in line or "permitted" in line) for line in out
        ), out


def test_groups_deeper_than_a_path_are_counted_and_removed(runtime: Runtime) -> None:
    """A container that owns its cgroup tree nests 1,100 cgroups, deeper than PATH_MAX and Python's
    recursion limit, and hides a process in the last one. `ps` lists the process, `delete` kills it,
    and no cgroup remains."""
    script = (
        "cd /sys/fs/cgroup; i=0; while [ $i -lt 1100 ]; do mkdir deeper && cd -P deeper || exit 1;"
        " i=$((i+1)); done;sleep 1000 & echo $! > cgroup.procs; echo made; wait"
    )

    def change(config: Config) -> None:
        config["mounts"] = [m for m in config["mounts"] if m["destination"] != "/sys/fs/cgroup"]
        config["mounts"].append(mount("/sys/fs/cgroup", "cgroup", "cgroup", "rw"))

    box = runtime.box("sh", "-c", script, change=change).up()
    assert wait_until(lambda: len(runtime("ps", "--format", "json", box.id).ok().json) == 2, 60)
    assert any(box.id in group for group in groups())
    box.delete("--force").ok()
    assert not any(box.id in group for group in groups())


def test_a_container_cannot_set_a_release_agent(runtime: Runtime) -> None:
    """CVE-2022-0492: a container mounts a v1 hierarchy in a new user namespace to write its
    release_agent. The mount fails for root with the default capabilities and for an ordinary
    user."""

    def user(config: Config) -> None:
        config["process"]["user"] = {"uid": 1000, "gid": 1000}

    for change in (None, user):
        script = (
            "for c in memory rdma cpu; do unshare -UrmC mount -t cgroup -o $c x /tmp 2>/dev/null &&"
            " echo MOUNTED; mount -t cgroup -o $c x /tmp 2>/dev/null && echo MOUNTED; done; ls"
            " /sys/fs/cgroup/release_agent 2>/dev/null; true"
        )
        assert runtime.shell(script, change=change).out == ""


def test_devices_of_the_host_cannot_be_opened(runtime: Runtime, rootfs: Path) -> None:
    """Device rules: the image has nodes of the host's disk and of other devices, and the container
    makes more with CAP_MKNOD. The nodes exist, but the device filter of the cgroup lets neither run
    nor exec open any of them."""
    disk = os.stat("/").st_dev
    nodes = {
        "disk": ("b", os.major(disk), os.minor(disk)),
        "kmsg": ("c", 1, 11),
        "loop": ("c", 10, 237),
        "fuse": ("c", 10, 229),
    }
    for name, (kind, major, minor) in nodes.items():
        os.mknod(rootfs / name, 0o060666 if kind == "b" else 0o020666, os.makedev(major, minor))
    script = "; ".join(
        f"mknod /tmp/{name} {kind} {major} {minor}" for name, (kind, major, minor) in nodes.items()
    )
    opens = (
        "for d in /disk /kmsg /loop /fuse /tmp/*; do (: < $d) 2>/dev/null && echo OPEN $d; done; ls"
        " /tmp | wc -l"
    )

    def change(config: Config) -> None:
        config["root"]["readonly"] = False
        names = ["CAP_MKNOD", "CAP_SYS_RAWIO", "CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE"]
        config["process"]["capabilities"] = dict.fromkeys(
            ("bounding", "effective", "permitted"), names
        )

    assert runtime.shell(f"{script}; {opens}", change=change).out == "4\n"
    box = runtime.box("sleep", "60", change=change).up()
    assert box.exec("sh", "-c", opens).ok().out == "4\n"


def test_shared_memory_and_queues_are_the_containers_own(runtime: Runtime) -> None:
    """A container's /dev/shm and /dev/mqueue are sticky, world-writable, nosuid, nodev and noexec,
    and empty although the host's /dev/shm has a file."""
    marker = Path("/dev/shm") / f"pyrunc-{os.getpid()}"
    marker.write_text("host")
    try:
        out = runtime.shell(
            "stat -c %a /dev/shm /dev/mqueue; ls /dev/shm /dev/mqueue; grep -E '/dev/(shm|mqueue) '"
            " /proc/self/mountinfo"
        ).out
    finally:
        marker.unlink()
    assert out.splitlines()[:2] == ["1777", "1777"] and marker.name not in out
    for line in out.splitlines()[-2:]:
        assert {"nosuid", "nodev", "noexec"} <= set(line.split()[5].split(",")), line


def test_system_v_objects_of_the_host_are_invisible(runtime: Runtime) -> None:
    """A container has its own IPC namespace: its list of System V segments lacks a segment of the
    host."""
    import ctypes

    libc = ctypes.CDLL(None)
    segment = libc.shmget(0, 4096, 0o1666)
    assert segment >= 0
    try:
        listed = Path("/proc/sysvipc/shm").read_text().splitlines()
        assert len(listed) >= 2
        assert len(runtime.shell("cat /proc/sysvipc/shm").out.splitlines()) == 1
    finally:
        libc.shmctl(segment, 0, None)
