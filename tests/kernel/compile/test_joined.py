"""Tests containers that join namespaces of every kind by path: the container's process is in the
namespace, and a path of the wrong kind is an error before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.compile.idmaps import maps_of_namespace, open_user_namespace
from pyrunc.errors import InvalidSpec, KernelError
from pyrunc.kernel.namespace import open_namespace
from pyrunc.spec.model import IdMap
from tests.kernel.box import Box

NAMES = {
    "network": "net", "ipc": "ipc", "uts": "uts", "cgroup": "cgroup", "pid": "pid", "user": "user",
    "time": "time", "mount": "mnt",
}  # fmt: skip
MAPS = [{"containerID": 0, "hostID": 200000, "size": 1000}]


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """Return the pid of a process in new namespaces of every kind except cgroup."""
    # A cgroup namespace only changes the view.
    script = (
        "import ctypes, os, sys, time\n"
        "libc = ctypes.CDLL(None)\n"
        "assert libc.unshare(0x10000000) == 0\n"
        "print(os.getpid(), flush=True)\n"
        "sys.stdin.readline()\n"
        "os.setresgid(0, 0, 0); os.setresuid(0, 0, 0)\n"
        "assert libc.unshare(0x40000000 | 0x8000000 | 0x4000000 | 0x20000 | 0x2000000 | "
        "0x20000000 | 0x80) == 0\n"
        "pid = os.fork()\n"
        "if pid: print(pid, flush=True)\n"
        "sys.stdin.readline()\n"
        "os.kill(pid, 9) if pid else None\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin and child.stdout
    pid = int(child.stdout.readline())
    for name in ("gid_map", "uid_map"):
        Path(f"/proc/{pid}/{name}").write_text("0 200000 1000\n")
    child.stdin.write(b"\n")
    child.stdin.flush()
    yield int(child.stdout.readline())
    child.stdin.close()
    child.wait()
    child.stdout.close()


def join(box: Box, pid: int, *kinds: str) -> None:
    rest = [e for e in box.linux["namespaces"] if e["type"] not in kinds]
    box.linux["namespaces"] = [
        *rest,
        *({"type": k, "path": f"/proc/{pid}/ns/{NAMES[k]}"} for k in kinds),
    ]
    if "uts" in kinds:
        box.config["hostname"] = ""


@pytest.mark.parametrize("kind", ["network", "ipc", "uts", "cgroup", "pid", "time"])
def test_a_container_can_join_a_single_namespace(box: Box, elsewhere: int, kind: str) -> None:
    join(box, elsewhere, kind)
    with box.running() as (created, request):
        name = NAMES[kind]
        assert os.readlink(f"/proc/{created.pid}/ns/{name}") == os.readlink(
            f"/proc/{elsewhere}/ns/{name}"
        )
        link = box.execute(created, request, f"readlink /proc/self/ns/{name}").strip()
        assert link == os.readlink(f"/proc/{elsewhere}/ns/{name}")


def test_the_cgroup_belongs_to_the_user_of_a_joined_namespace(box: Box, elsewhere: int) -> None:
    """The container's cgroup belongs to root of the joined user namespace, so a process that is
    cloned into the cgroup, or enters it later, can make cgroups below it."""
    join(box, elsewhere, "user")
    place = next(m for m in box.config["mounts"] if m["destination"] == "/sys/fs/cgroup")
    place["options"].remove("ro")
    with box.running() as (created, request):
        assert created.cgroup is not None and os.stat(created.cgroup.directory).st_uid == 200000
        output = box.execute(created, request, "mkdir /sys/fs/cgroup/below; cat /proc/self/cgroup")
        assert output.splitlines()[-1] == "0::/"


@pytest.mark.parametrize("maps", [True, False])
def test_a_container_joins_all_namespaces_of_a_process(
    box: Box, elsewhere: int, maps: bool
) -> None:
    """The id maps of the joined user namespace apply, whether the configuration repeats them or
    not."""
    join(box, elsewhere, "user", "network", "ipc", "uts", "pid", "cgroup", "time")
    if maps:
        box.linux["uidMappings"] = box.linux["gidMappings"] = MAPS
    reading, writing = os.pipe()
    os.close(reading)
    assert box.run("id -u; cat /proc/self/uid_map; stat -c %u /bin").split() == [
        "0",
        "0",
        "200000",
        "1000",
        "0",
    ]
    with box.running() as (created, request):
        assert os.stat(f"/proc/{created.pid}").st_uid == 200000
        assert box.execute(created, request, "stat -c %u /proc/self/fd/1").strip() == "0"
    os.close(writing)


def test_id_maps_must_equal_those_of_the_joined_user_namespace(box: Box, elsewhere: int) -> None:
    join(box, elsewhere, "user", "network", "ipc", "uts", "pid")
    box.linux["uidMappings"] = box.linux["gidMappings"] = [{**MAPS[0], "size": 10}]
    with pytest.raises(
        InvalidSpec, match=r"linux\.uidMappings: differ from the mappings of the user namespace"
    ):
        box.run("true")


def test_maps_of_a_namespace_without_a_process_are_read(tmp_path: Path) -> None:
    maps = (IdMap(0, 300000, 10), IdMap(20, 400000, 5)), (IdMap(0, 500000, 7),)
    namespace = open_user_namespace(*maps)
    try:
        assert maps_of_namespace("/run/somewhere", namespace) == maps
    finally:
        os.close(namespace)


def test_a_container_can_join_a_mount_namespace(box: Box, tmp_path: Path) -> None:
    """The container's root is attached in the joined namespace and becomes its `/`, as under runc:
    other processes there see it too."""
    namespace_process = subprocess.Popen(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", "echo; exec sleep 1000"],
        stdout=subprocess.PIPE,
    )
    assert namespace_process.stdout
    namespace_process.stdout.readline()
    try:
        join(box, namespace_process.pid, "mount")
        with box.running() as (created, request):
            theirs = os.readlink(f"/proc/{namespace_process.pid}/ns/mnt")
            assert os.readlink(f"/proc/{created.pid}/ns/mnt") == theirs
            assert box.execute(created, request, "cat /etc/passwd").startswith("root:x:0:0")
    finally:
        namespace_process.kill()
        namespace_process.wait()
        namespace_process.stdout.close()


@pytest.mark.parametrize("kind", sorted(NAMES))
@pytest.mark.parametrize("what", ["other kind", "file", "missing"])
def test_a_namespace_path_must_lead_to_a_namespace_of_its_type(
    box: Box, tmp_path: Path, kind: str, what: str
) -> None:
    (tmp_path / "file").touch()
    wrong = "uts" if kind != "uts" else "ipc"
    path = {
        "other kind": f"/proc/self/ns/{wrong}",
        "file": f"{tmp_path}/file",
        "missing": f"{tmp_path}/x",
    }[what]
    box.linux["namespaces"] = [e for e in box.linux["namespaces"] if e["type"] != kind] + [
        {"type": kind, "path": path}
    ]
    box.config["hostname"] = ""
    words = "ENOENT" if what == "missing" else f"expected a {NAMES[kind]} namespace"
    with pytest.raises(KernelError, match=words):
        box.run("true")


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("uts", {"hostname": "x"}, "hostname: needs a uts namespace other than the host's"),
        ("uts", {"domainname": "x"}, "domainname: needs a uts"),
        (
            "network",
            {"sysctl": {"net.ipv4.ip_forward": "1"}},
            "linux.sysctl.net.ipv4.ip_forward: needs a network",
        ),
        ("ipc", {"sysctl": {"kernel.shmmax": "1"}}, "linux.sysctl.kernel.shmmax: needs an? ipc"),
    ],
)
def test_settings_of_the_hosts_namespaces_are_refused(
    box: Box, kind: str, change: dict[str, object], words: str
) -> None:
    box.config["hostname"] = ""
    join(box, os.getpid(), kind)
    for key, value in change.items():
        (box.linux if key == "sysctl" else box.config)[key] = value
    with pytest.raises(InvalidSpec, match=words):
        box.run("true")


def test_a_time_namespace_with_a_user_namespace_has_its_offsets(box: Box) -> None:
    """A container with a time and a user namespace has the configured time offsets, and an exec has
    them too."""
    box.linux["namespaces"] += [{"type": "time"}, {"type": "user"}]
    box.linux["uidMappings"] = box.linux["gidMappings"] = MAPS
    box.linux["timeOffsets"] = {
        "boottime": {"secs": 1000000},
        "monotonic": {"secs": 500000, "nanosecs": 7},
    }
    with box.running() as (created, request):
        text = Path(f"/proc/{created.pid}/timens_offsets").read_text().split()
        assert text == ["monotonic", "500000", "7", "boottime", "1000000", "0"]
        up = float(box.execute(created, request, "cut -d' ' -f1 /proc/uptime"))
        assert 999900 < up - float(Path("/proc/uptime").read_text().split()[0]) < 1000060
        path = f"/proc/{created.pid}/ns/time"
        assert open_and_close(path) == os.stat(path).st_ino


def open_and_close(path: str) -> int:
    number = open_namespace(path, "time")
    try:
        return os.fstat(number).st_ino
    finally:
        os.close(number)


def test_a_joined_user_namespace_can_have_new_clocks(box: Box, elsewhere: int) -> None:
    join(box, elsewhere, "user", "network", "ipc", "uts", "pid")
    box.linux["namespaces"].append({"type": "time"})
    box.linux["timeOffsets"] = {"boottime": {"secs": 1000000}}
    with box.running() as (created, _):
        assert Path(f"/proc/{created.pid}/timens_offsets").read_text().split()[4] == "1000000"


@pytest.mark.parametrize("clock", [{"secs": -1 << 62}, {"secs": 1 << 62}])
def test_clocks_out_of_range_are_refused(box: Box, clock: dict[str, int]) -> None:
    box.linux["namespaces"].append({"type": "time"})
    box.linux["timeOffsets"] = {"monotonic": clock}
    with pytest.raises(KernelError, match=r"offset clocks monotonic .*: ERANGE"):
        box.run("true")
