"""Tests a default container, seen from inside (namespaces, mounts, devices, descriptors, signals),
and what it leaves outside."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from pyrunc.compile.requests import CgroupChoice
from pyrunc.container.create import create
from pyrunc.container.start import release
from pyrunc.errors import InvalidArgument, NotFound
from tests.kernel.box import Box, finish, mounts


@pytest.mark.parametrize("overlay", [True, False])
def test_a_container_has_the_default_mounts(box: Box, overlay: bool) -> None:
    mounted = mounts(box.run("cat /proc/self/mountinfo", overlay=overlay))
    assert mounted["/proc"][1] == "proc"
    assert mounted["/dev"][1] == "tmpfs"
    assert "nosuid" in mounted["/dev"][0]
    assert mounted["/dev/pts"][1] == "devpts"
    assert mounted["/dev/shm"][0].split(",") == ["rw", "nosuid", "nodev", "noexec", "relatime"]
    assert mounted["/dev/mqueue"][1] == "mqueue"
    assert mounted["/sys"][0].startswith("ro")
    assert mounted["/sys/fs/cgroup"][1] == "cgroup2"
    assert mounted["/"][1] == ("overlay" if overlay else mounted["/"][1])
    assert all("shared:" not in fields for _, _, fields in mounted.values())
    assert len(mounted) < 25, "the old root is still there"


def test_a_container_has_the_default_devices(box: Box) -> None:
    listing = box.run(
        "cd /dev; stat -c '%n %F %t:%T %a %u:%g' null zero full random urandom tty; readlink fd; "
        "readlink ptmx"
    )
    lines = listing.splitlines()
    assert lines[:6] == [
        "null character special file 1:3 666 0:0",
        "zero character special file 1:5 666 0:0",
        "full character special file 1:7 666 0:0",
        "random character special file 1:8 666 0:0",
        "urandom character special file 1:9 666 0:0",
        "tty character special file 5:0 666 0:0",
    ]
    assert lines[6:] == ["/proc/self/fd", "pts/ptmx"]


def test_a_container_has_only_stdio_open(box: Box) -> None:
    secret = os.open("/", os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        with box.running() as (created, _):
            assert sorted(os.listdir(f"/proc/{created.pid}/fd")) == ["0", "1", "2"]
    finally:
        os.close(secret)


def test_a_container_has_no_blocked_or_ignored_signals(box: Box) -> None:
    text = box.outcome("grep", "-e", "SigBlk", "-e", "SigIgn", "/proc/self/status")[1]
    assert text.split() == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16]


def test_a_container_has_its_own_namespaces(box: Box) -> None:
    with box.running() as (created, _):
        for kind in ("mnt", "pid", "net", "ipc", "uts", "cgroup"):
            assert os.readlink(f"/proc/{created.pid}/ns/{kind}") != os.readlink(
                f"/proc/self/ns/{kind}"
            )
        for kind in ("user", "time"):
            assert os.readlink(f"/proc/{created.pid}/ns/{kind}") == os.readlink(
                f"/proc/self/ns/{kind}"
            )


def test_a_container_has_pid_1_and_loopback(box: Box) -> None:
    assert box.run(
        "echo $$; cat /sys/class/net/lo/operstate; ip link show lo | grep -c UP"
    ).split() == [
        "1",
        "unknown",
        "1",
    ]


def test_a_container_joins_the_namespaces_of_its_paths(box: Box) -> None:
    with box.running() as (first, _):
        for kind, name in (("pid", "pid"), ("network", "net"), ("ipc", "ipc"), ("uts", "uts")):
            for entry in box.linux["namespaces"]:
                if entry["type"] == kind:
                    entry["path"] = f"/proc/{first.pid}/ns/{name}"
        box.config["hostname"] = ""
        with box.running() as (second, request):
            for kind in ("pid", "net", "ipc", "uts"):
                assert os.readlink(f"/proc/{first.pid}/ns/{kind}") == os.readlink(
                    f"/proc/{second.pid}/ns/{kind}"
                )
            assert os.readlink(f"/proc/{first.pid}/ns/mnt") != os.readlink(
                f"/proc/{second.pid}/ns/mnt"
            )
            assert "sleep" in box.execute(second, request, "cat /proc/1/cmdline")


def test_a_container_is_our_child_in_its_own_cgroup(box: Box) -> None:
    with box.running() as (created, _):
        assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{created.pid}/status").read_text()
        assert created.cgroup is not None
        assert created.cgroup.processes() == [created.pid]
    assert not created.cgroup.exists()


def test_limits_are_warnings_where_the_controller_is_missing(box: Box) -> None:
    box.linux["resources"]["memory"] = {"limit": 64 << 20}
    with box.running() as (created, _):
        assert created.warnings or "memory" in Path("/sys/fs/cgroup/cgroup.controllers").read_text()


def test_a_container_may_have_no_cgroup(box: Box) -> None:
    with box.running(cgroup=None) as (created, _):
        own = Path("/proc/self/cgroup").read_text()
        theirs = Path(f"/proc/{created.pid}/cgroup").read_text()
        assert own == theirs


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["nothing-like-it"], 'exec: "nothing-like-it": executable file not found in $PATH'),
        (["/bin/nothing"], 'exec: "/bin/nothing": stat /bin/nothing: no such file or directory'),
    ],
)
def test_a_missing_program_is_an_error(box: Box, args: list[str], text: str) -> None:
    with pytest.raises(NotFound) as caught:
        box.outcome(*args)
    assert str(caught.value) == text


def test_arguments_that_are_too_long_are_an_error(box: Box, tmp_path: Path) -> None:
    """An argument above the kernel's limit raises an error that names the argument, also when the
    container waits for its start and reports only the errno."""
    args = ["true", "x" * 140_000]
    text = "argument list too long: argument 1 has 140001 bytes"
    with pytest.raises(InvalidArgument, match=text):
        box.outcome(*args)
    created = create(box.request(*args, start_immediately=False, state_dir=str(tmp_path)))
    try:
        with pytest.raises(InvalidArgument, match=text):
            release(str(tmp_path), args)
    finally:
        finish(created)


def add_programs_without_interpreters(box: Box) -> None:
    """Add the programs `script` and `loaded` to /opt, which is in PATH; their interpreters are
    missing."""
    folder = box.image / "opt"
    folder.mkdir()
    (folder / "script").write_text("#!/no/interpreter\n")
    (folder / "script").chmod(0o755)
    # Its loader is missing in the image.
    shutil.copy("/bin/true", folder / "loaded")
    box.process["env"] = ["PATH=/nowhere:/opt:/bin"]


@pytest.mark.parametrize("name", ["script", "/opt/script", "loaded", "/opt/loaded"])
def test_a_program_without_its_interpreter_is_an_error(box: Box, tmp_path: Path, name: str) -> None:
    add_programs_without_interpreters(box)
    with pytest.raises(NotFound) as caught:
        box.outcome(name)
    assert str(caught.value).startswith(f"exec {name}: no such file or directory (")
    created = create(box.request(name, start_immediately=False, state_dir=str(tmp_path)))
    try:
        with pytest.raises(NotFound) as caught:
            release(str(tmp_path), [name])
        assert str(caught.value).startswith(f"exec {name}: no such file or directory (")
    finally:
        finish(created)


@pytest.mark.parametrize(
    ("path", "words"), [("/etc/passwd", "permission denied"), ("/bin", "is a directory")]
)
def test_a_path_that_cannot_be_executed_is_an_error(box: Box, path: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        box.outcome(path)


def test_the_program_is_searched_in_the_containers_path(box: Box) -> None:
    (box.image / "opt").mkdir()
    (box.image / "opt/hello").write_text("#!/bin/sh\necho hello $1\n")
    (box.image / "opt/hello").chmod(0o755)
    box.process["env"] = ["PATH=/nowhere:/etc/passwd:/opt"]
    assert box.outcome("hello", "you") == (0, "hello you\n")


def test_a_container_has_its_environment(box: Box) -> None:
    os.environ["LEAK"] = "1"
    box.process["env"] = ["PATH=/bin", "A=1", "B=x\ny", "A=2"]
    try:
        listing = box.outcome("env", "-0")[1].split("\0")
        assert listing == ["PATH=/bin", "B=x\ny", "A=2", "HOME=/root", ""]
        box.process["user"] = {"uid": 1000, "gid": 1000}
        assert "HOME=/home/web" in box.run("env")
        box.process["env"] = ["PATH=/bin", "HOME=/elsewhere"]
        assert "HOME=/elsewhere" in box.run("env")
        assert "LEAK" not in box.run("env")
    finally:
        del os.environ["LEAK"]


def test_run_returns_the_programs_exit_code(box: Box) -> None:
    assert box.outcome("sh", "-c", "exit 42")[0] == 42
    # pid 1 ignores its own signals
    assert box.outcome("sh", "-c", "exec 2>/dev/null; kill -9 $$")[0] in (0, 137)


def test_a_created_container_waits_for_start(box: Box, tmp_path: Path) -> None:
    state = tmp_path / ("s" * 120)
    state.mkdir()
    seen: list[int] = []
    request = box.request(
        "sh",
        "-c",
        "echo started > /tmp/x; exec sleep 100",
        start_immediately=False,
        state_dir=str(state),
        record=lambda process: seen.append(process.pid),
    )
    created = create(request)
    try:
        assert seen == [created.pid]
        assert stat.S_ISSOCK((state / "start.sock").stat().st_mode)
        assert Path(f"/proc/{created.pid}/comm").read_text() == "pyrunc:init\n"
        assert os.readlink(f"/proc/{created.pid}/exe").startswith("/memfd:pyrunc:launcher")
        assert not (box.upper / "tmp/x").exists()
        release(str(state), request.spec.process.args if request.spec.process else ())
        assert not (state / "start.sock").exists()
        # "exe": busybox becomes another applet by /proc/self/exe
        assert Path(f"/proc/{created.pid}/comm").read_text() in ("sh\n", "exe\n", "sleep\n")
        # a shell has the file open for a moment
        while Path(f"/proc/{created.pid}/comm").read_text() != "sleep\n":
            time.sleep(0.01)
        assert (box.upper / "tmp/x").read_text() == "started\n"
        assert sorted(os.listdir(f"/proc/{created.pid}/fd")) == ["0", "1", "2"]
    finally:
        os.kill(created.pid, 9)
        finish(created)


def test_a_missing_program_is_an_error_of_create(box: Box, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="executable file not found"):
        create(box.request("nothing", start_immediately=False, state_dir=str(tmp_path)))
    assert not (tmp_path / "start.sock").exists()


def test_a_failed_create_leaves_no_cgroup(box: Box) -> None:
    box.add_mount("/dev/null", str(box.image / "etc/passwd"), "bind")
    request = box.request("true", cgroup=CgroupChoice(missing_controllers="warn"))
    with pytest.raises(Exception, match="/dev/null exists and is not the configured device"):
        create(request)
    from pyrunc.cgroups.naming import place

    assert not place("", request.id, "cgroupfs").exists()
