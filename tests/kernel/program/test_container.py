"""Tests a whole container that the launcher makes alone: namespaces, overlay root, mounts, devices,
pivot_root, identity, execve."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.abi.capability import LINUX_CAPABILITY_VERSION_3
from pyrunc.abi.clone import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUTS,
)
from pyrunc.abi.file import AT_EMPTY_PATH, AT_FDCWD, O_PATH
from pyrunc.abi.mount import (
    MNT_DETACH,
    MOVE_MOUNT_F_EMPTY_PATH,
    MOVE_MOUNT_T_EMPTY_PATH,
    MS_REC,
    MS_SLAVE,
    OPEN_TREE_CLONE,
)
from pyrunc.abi.prctl import PR_CAPBSET_DROP, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS
from pyrunc.errors import KernelError
from pyrunc.kernel import mount
from pyrunc.program import macros
from pyrunc.program.assemble import Assembler
from pyrunc.program.launch import EXIT_REFUSED, LAUNCHER, launch
from pyrunc.program.model import PID, READY, Line, Operand, Program

ROOT = 3
NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWCGROUP
)
MOUNTS = [
    ("proc", "/proc"),
    ("tmpfs", "/dev"),
    ("devpts", "/dev/pts"),
    ("sysfs", "/sys"),
    ("tmpfs", "/dev/shm"),
    ("mqueue", "/dev/mqueue"),
]


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    """Provide a folder with the layers of a busybox root."""
    for name in ("lower/bin", "upper", "work"):
        (tmp_path / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox
    shutil.copy(busybox, tmp_path / "lower/bin/busybox")
    yield tmp_path


def attach(a: Assembler, mounted: Operand, place: Operand) -> None:
    a.sys("move_mount", mounted, "", place, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH)


def container(mount_point: Path, script: str, program: str = "busybox") -> Program:
    a = Assembler()
    macros.prologue(a)
    macros.fork_parent(a, NAMESPACES)
    a.wait()
    a.sys("setsid")
    a.sys("umask", 0)
    a.sys("mount", 0, "/", 0, MS_REC | MS_SLAVE, 0)
    attach(a, ROOT, macros.open_at(a, AT_FDCWD, str(mount_point), resolve=0))
    root = macros.open_at(a, AT_FDCWD, str(mount_point), O_PATH | a.arch.o_directory, resolve=0)
    for number, (fstype, path) in enumerate(MOUNTS):
        a.at(Line(f"mount '{fstype}' on '{path}'", number))
        fs, mounted = a.slot(4), a.slot(4)
        a.sys("fsopen", fstype, 1, store=fs)
        a.sys("fsconfig", fs, 6, 0, 0, 0)
        a.sys("fsmount", fs, 1, 0, store=mounted)
        attach(a, mounted, macros.make_directories(a, root, path))
    a.at(Line("make '/dev/null'"))
    a.sys("mknodat", macros.open_at(a, root, "dev"), "null", 0o20666, os.makedev(1, 3))
    null = macros.open_at(a, root, "dev/null")
    macros.require_device(a, null, 1, 3, "/dev/null")
    tree = a.slot(4)
    a.sys("open_tree", null, "", OPEN_TREE_CLONE | AT_EMPTY_PATH, store=tree)
    attach(a, tree, macros.open_at(a, root, "/proc/uptime"))
    a.sys("fchdir", root)
    a.sys("pivot_root", ".", ".")
    a.sys("umount2", ".", MNT_DETACH)
    a.sys("chdir", "/")
    a.sys("sethostname", "box", 3)
    for bit in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        a.sys("prctl", PR_CAPBSET_DROP, bit, 0, 0, 0)
    a.sys("setgroups", 0, 0)
    a.sys("setresgid", 1000, 1000, 1000)
    a.sys("setresuid", 1000, 1000, 1000)
    a.sys("capset", a.data(struct.pack("<Ii", LINUX_CAPABILITY_VERSION_3, 0)), a.data(24))
    a.sys("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    macros.forbid_dumps(a)
    candidates = [program] if "/" in program else [f"/usr/bin/{program}", f"/bin/{program}"]
    macros.check_program(a, candidates)
    a.send(READY)
    macros.close_all_from(a, 3, cloexec=True)
    result = a.slot(4)
    a.at(Line("execute 'busybox'"))
    macros.execute(
        a,
        candidates,
        a.pointers(["busybox", "sh", "-c", script]),
        a.pointers(["PATH=/bin"]),
        result=result,
    )
    a.fail(result)
    return a.program()


def start(image: Path, script: str, program: str = "busybox") -> tuple[int, str]:
    root = mount.open_overlay([str(image / "lower")], str(image / "upper"), str(image / "work"))
    read, write = os.pipe()
    try:
        with launch(
            container(image / "lower", script, program), stdio=(0, write, write), fds={ROOT: root}
        ) as running:
            os.close(root)
            os.close(write)
            pid = running.expect(PID).value
            running.reap_launcher()
            pidfd = os.pidfd_open(pid)
            running.release()
            running.expect(READY)
            assert running.receive() is None
        with open(read, closefd=False) as file:
            text = file.read()
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        assert ended is not None and ended.si_code == os.CLD_EXITED
        return ended.si_status, text
    finally:
        os.close(read)


def test_a_program_starts_a_whole_container(image: Path) -> None:
    script = """
        echo $$ $(busybox hostname) $(busybox id -u) $(busybox id -g)
        busybox ls /
        busybox ls /proc/self/fd
        busybox wc -c < /proc/uptime
        busybox grep -E '^(Cap|Sig[BI]|NoNew)' /proc/self/status
        busybox ip link | busybox grep -c mtu
        busybox wc -l < /proc/mounts
        exit 42
    """
    ended, text = start(image, script)
    lines = text.splitlines()
    assert ended == 42
    assert lines[0] == "1 box 1000 1000"
    assert lines[1:5] == ["bin", "dev", "proc", "sys"]
    assert lines[5:9] == ["0", "1", "2", "3"]
    assert lines[9] == "0"
    status = dict(line.split(":\t") for line in lines[10:-2])
    assert status.pop("NoNewPrivs") == "1"
    assert set(status.values()) == {"0" * 16}
    assert len(status) == 7
    assert lines[-2] == "1"
    assert lines[-1] == str(len(MOUNTS) + 2)
    # Nothing of it was ever visible on the host.
    assert str(image) not in Path("/proc/self/mountinfo").read_text()
    # Device nodes and the like are in mounts of the container, its own directories in the upper
    # layer.
    assert sorted(os.listdir(image / "upper")) == ["dev", "proc", "sys"]


def test_a_signal_ends_the_container(image: Path) -> None:
    # Process 1 cannot kill itself, so its child is what dies.
    ended, _ = start(image, "busybox sh -c 'kill -KILL $$'; exit $?")
    assert ended == 137


def test_an_image_that_runs_the_runtime_s_own_executable_gets_the_sealed_copy(image: Path) -> None:
    # CVE-2019-5736: the interpreter line makes the kernel execute what the process was until then.
    evil = image / "lower/evil"
    evil.write_text("#!/proc/self/exe\n")
    evil.chmod(0o755)
    before = Path(LAUNCHER).read_bytes(), os.stat(LAUNCHER)
    ended, text = start(image, "", "/evil")
    assert (ended, text) == (EXIT_REFUSED, "")
    after = os.stat(LAUNCHER)
    assert Path(LAUNCHER).read_bytes() == before[0]
    assert (after.st_mtime_ns, after.st_ino) == (before[1].st_mtime_ns, before[1].st_ino)


WATCH = "for round in $(busybox seq 60); do busybox ls -l /proc/[0-9]*/fd 2>/dev/null; done"


def visitor(dumpable: bool, lingers_ns: int) -> Program:
    """Return a program that joins the pid and mount namespaces of descriptor 3, becomes uid 1000
    there, waits `lingers_ns`, and executes busybox."""
    a = Assembler()
    macros.prologue(a)
    a.sys("prctl", PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)
    a.sys("setns", 3, CLONE_NEWPID | CLONE_NEWNS)
    macros.fork_parent(a, 0)
    a.sys("setresgid", 1000, 1000, 1000)
    a.sys("setresuid", 1000, 1000, 1000)
    a.sys("prctl", PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)
    a.sys("nanosleep", a.data(struct.pack("<qq", *divmod(lingers_ns, 10**9))), 0)
    result = a.slot(4)
    macros.execute(
        a, ["/bin/busybox"], a.pointers(["busybox", "true"]), a.pointers([]), result=result
    )
    a.fail(result)
    return a.program()


@pytest.mark.parametrize("dumpable", [False, True])
def test_no_process_inside_can_inspect_a_newcomer_before_execve(
    image: Path, dumpable: bool
) -> None:
    """CVE-2016-9962: a process of the container cannot inspect the entering process before its
    execve."""
    # It can if that process is `dumpable`, so the test would see an inspection.
    began = time.monotonic_ns()
    subprocess.run(
        [image / "lower/bin/busybox", "ls", "-l", "/proc/self/fd"],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    # So that a round of the watch falls into it also on an emulated processor, where one takes a
    # fifth of a second.
    lingers_ns = max(20_000_000, 2 * (time.monotonic_ns() - began))
    root = mount.open_overlay([str(image / "lower")], str(image / "upper"), str(image / "work"))
    read, write = os.pipe()
    with launch(
        container(image / "lower", WATCH), stdio=(0, write, write), fds={ROOT: root}
    ) as running:
        os.close(root)
        os.close(write)
        pidfd = os.pidfd_open(running.expect(PID).value)
        running.release()
        running.expect(READY)
        assert running.receive() is None
    while os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        try:
            with launch(visitor(dumpable, lingers_ns), stdio=(0, 0, 0), fds={3: pidfd}) as running:
                pid = running.expect(PID).value
                assert running.receive() is None
            os.waitpid(pid, 0)
        except KernelError as error:
            # The container ended meanwhile, and its namespaces with it.
            assert error.call in ("setns", "clone3"), error
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)
    with open(read) as file:
        text = file.read()
    assert text.count(" -> ") > 60
    assert ("socket:" in text) == dumpable
