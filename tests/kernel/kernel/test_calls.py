"""Tests pyrunc's wrappers of system calls on the real kernel: descriptors, mounts, namespaces,
processes, credentials, limits."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.abi.clone import CLONE_NEWNET, CLONE_NEWUTS
from pyrunc.abi.mount import (
    MOUNT_ATTR_RDONLY,
    MS_PRIVATE,
    MS_SHARED,
)
from pyrunc.errors import InvalidArgument, KernelError
from pyrunc.kernel import call, fd, limit, mount, namespace, path, process, reaper
from tests.support.processes import wait_until

# f_type of statfs(2)
TMPFS_MAGIC = 0x01021994
OVERLAYFS_SUPER_MAGIC = 0x794C7630
OVERLAY_TAKES_DESCRIPTORS = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 13)


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Return the pid of a sleeping child."""
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    yield pid
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


class TestCalls:
    def test_an_error_names_call_and_object(self) -> None:
        with pytest.raises(KernelError) as caught:
            call.syscall("openat", "'/nonexistent'", -100, b"/nonexistent", 0, 0)
        assert str(caught.value) == "openat '/nonexistent': ENOENT"

    def test_a_raw_call_returns_the_negative_errno(self) -> None:
        assert call.raw("close", -1) == -errno.EBADF
        assert call.raw("getpid") == os.getpid()


class TestDescriptors:
    def test_memfds_hold_their_content(self) -> None:
        number = fd.open_memfd("test", b"content")
        assert os.read(number, 100) == b"content"
        assert not os.get_inheritable(number)
        os.close(number)

    def test_a_sealed_executable_runs_and_cannot_be_changed(self) -> None:
        number = fd.open_sealed_executable("true", Path("/bin/true").read_bytes())
        try:
            assert subprocess.run([f"/proc/self/fd/{number}"], pass_fds=[number]).returncode == 0
            writable = os.open(f"/proc/self/fd/{number}", os.O_RDWR)
            for attempt in (lambda: os.write(writable, b"x"), lambda: os.ftruncate(writable, 1)):
                with pytest.raises(PermissionError):
                    attempt()
            with pytest.raises(KernelError, match=r"F_ADD_SEALS.*EPERM"):
                fd.add_seals(writable, 0)
            os.close(writable)
        finally:
            os.close(number)

    def test_a_descriptor_is_copied_to_a_high_number(self) -> None:
        copy = fd.duplicate(0, 600)
        assert copy >= 600 and not os.get_inheritable(copy)
        os.close(copy)
        with pytest.raises(KernelError, match="EBADF"):
            fd.duplicate(9999)


class TestMounts:
    def test_a_detached_mount_is_nowhere_on_the_host(self) -> None:
        number = mount.open_mount("tmpfs", [("mode", "0711"), ("size", "64k")])
        try:
            assert mount.fstatfs_type(number) == TMPFS_MAGIC
            assert os.fstat(number).st_mode & 0o777 == 0o711
            inside = path.open_beneath(number, "file", os.O_WRONLY | os.O_CREAT, 0o600)
            with pytest.raises(OSError) as caught:
                for _ in range(100):
                    os.write(inside, bytes(4096))
            assert caught.value.errno == errno.ENOSPC
            os.close(inside)
            assert "mode=711" not in Path("/proc/self/mountinfo").read_text()
        finally:
            os.close(number)

    def test_mount_attributes_are_set_and_cleared(self) -> None:
        number = mount.open_mount("tmpfs", attributes=MOUNT_ATTR_RDONLY)
        with pytest.raises(OSError, match="Read-only"):
            os.mkdir("x", dir_fd=number)
        mount.mount_setattr(number, attr_clr=MOUNT_ATTR_RDONLY)
        os.mkdir("x", dir_fd=number)
        os.close(number)

    def test_an_option_that_is_wrong_is_named(self) -> None:
        with pytest.raises(KernelError, match="'size=nonsense'"):
            mount.open_mount("tmpfs", [("size", "nonsense")])
        with pytest.raises(KernelError, match="fsopen 'nofs': ENODEV"):
            mount.open_mount("nofs")

    @pytest.mark.parametrize("by_descriptor", [False, True])
    def test_an_overlay_is_mounted(self, tmp_path: Path, by_descriptor: bool) -> None:
        for name in ("top", "bottom", "upper", "work"):
            (tmp_path / name).mkdir()
        (tmp_path / "top/file").write_text("top")
        (tmp_path / "bottom/file").write_text("bottom")
        if by_descriptor and not OVERLAY_TAKES_DESCRIPTORS:
            pytest.skip("overlayfs takes layers by descriptor from Linux 6.13 on")
        (tmp_path / "bottom/colon:and\\backslash").write_text("x")
        layers = [str(tmp_path / name) for name in ("top", "bottom", "upper", "work")]
        fds = [os.open(layer, os.O_PATH) for layer in layers] if by_descriptor else []
        chosen: list[str | int] = [*fds] if by_descriptor else [*layers]
        number = mount.open_overlay(chosen[:2], chosen[2], chosen[3], options=[("metacopy", "off")])
        try:
            assert mount.fstatfs_type(number) == OVERLAYFS_SUPER_MAGIC
            assert path.read_in_root(number, "file") == b"top"
            assert "colon:and\\backslash" in os.listdir(f"/proc/self/fd/{number}")
            os.close(path.open_beneath(number, "new", os.O_WRONLY | os.O_CREAT, 0o600))
        finally:
            fd.close_all([number, *fds])
        assert (tmp_path / "upper/new").exists()

    def test_an_overlay_of_many_layers_with_odd_names(self, tmp_path: Path) -> None:
        layers = []
        for index in range(60):
            layer = tmp_path / f"layer with : and , {index} {'long' * 30}"
            layer.mkdir()
            (layer / str(index)).touch()
            layers.append(str(layer))
        number = mount.open_overlay(layers)
        assert len(os.listdir(f"/proc/self/fd/{number}")) == 60
        os.close(number)

    def test_a_read_only_clone_of_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("x")
        number = mount.open_read_only_clone(file)
        with pytest.raises(OSError) as caught:
            os.open(f"/proc/self/fd/{number}", os.O_WRONLY)
        assert caught.value.errno == errno.EROFS
        os.close(number)

    def test_a_clone_that_cannot_be_made_read_only_is_closed(self, tmp_path: Path) -> None:
        before = os.listdir("/proc/self/fd")
        # mount_setattr(2) accepts only one kind of propagation.
        with pytest.raises(KernelError) as caught:
            mount.open_read_only_clone(tmp_path, propagation=MS_PRIVATE | MS_SHARED)
        assert caught.value.errno == errno.EINVAL
        assert os.listdir("/proc/self/fd") == before


class TestNamespaces:
    def test_the_kind_is_checked(self) -> None:
        os.close(namespace.open_namespace("/proc/self/ns/uts", "uts"))
        with pytest.raises(KernelError, match="expected a net namespace, found uts"):
            namespace.open_namespace("/proc/self/ns/uts", "net")
        with pytest.raises(KernelError, match="found something else"):
            namespace.open_namespace("/etc/passwd", "net")
        with pytest.raises(KernelError, match="ENOENT"):
            namespace.open_namespace("/nonexistent", "net")
        with pytest.raises(KernelError, match="not a namespace"):
            namespace.kind_of(0)

    def test_setns_joins_a_namespace_by_pidfd(self) -> None:
        other = os.posix_spawn("/usr/bin/unshare", ["unshare", "--uts", "sleep", "60"], {})
        try:
            own = os.stat("/proc/self/ns/uts").st_ino
            assert wait_until(lambda: os.stat(f"/proc/{other}/ns/uts").st_ino != own, 30, 0.01)
            pidfd = os.pidfd_open(other)
            pid = os.fork()
            if pid == 0:
                namespace.setns(pidfd, CLONE_NEWUTS)
                same = (
                    os.stat("/proc/self/ns/uts").st_ino == os.stat(f"/proc/{other}/ns/uts").st_ino
                )
                os._exit(0 if same else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            os.close(pidfd)
        finally:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)

    def test_the_wrong_kind_is_an_error(self) -> None:
        own = namespace.open_own("uts")
        with pytest.raises(KernelError, match=r"setns.*EINVAL"):
            namespace.setns(own, CLONE_NEWNET)
        os.close(own)


class TestProcesses:
    def test_a_pid_without_a_process_is_none(self) -> None:
        assert process.stat(4194305) is None and process.alive_since(4194305) is None

    def test_stat_describes_a_process(self, sleeper: int) -> None:
        facts = process.stat(sleeper)
        assert facts is not None and facts.alive
        assert (facts.parent, facts.session) == (os.getpid(), os.getsid(0))
        assert facts.start_time == process.alive_since(sleeper)

        def has_memory() -> bool:  # none is counted just after execve(2)
            facts = process.stat(sleeper)
            return facts is not None and facts.resident > 0

        assert wait_until(has_memory, 30, 0.01)

    def test_a_zombie_has_facts_but_is_not_alive(self, sleeper: int) -> None:
        started = process.alive_since(sleeper)
        os.kill(sleeper, signal.SIGKILL)
        os.waitid(os.P_PID, sleeper, os.WEXITED | os.WNOWAIT)
        facts = process.stat(sleeper)
        assert facts is not None and (facts.state, facts.alive) == ("Z", False)
        assert facts.start_time == started
        assert process.alive_since(sleeper) is None

    def test_names_with_parentheses_do_not_confuse(self) -> None:
        pid = os.fork()
        if pid == 0:
            Path("/proc/self/comm").write_text("a) R 1 (b")
            time.sleep(60)
        try:
            comm = Path(f"/proc/{pid}/comm")
            assert wait_until(lambda: comm.read_text() == "a) R 1 (b\n", 30, 0.01)
            assert wait_until(lambda: (facts := process.stat(pid)) and facts.state == "S", 30, 0.01)
            facts = process.stat(pid)
            assert facts is not None and (facts.state, facts.parent) == ("S", os.getpid())
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def test_a_descriptor_of_another_process_can_be_opened(self) -> None:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        try:
            pidfd = os.pidfd_open(pid)
            copy = process.open_from_process(pidfd, write)
            os.write(copy, b"x")
            assert os.read(read, 1) == b"x"
            with pytest.raises(KernelError, match="EBADF"):
                process.open_from_process(pidfd, 9999)
            fd.close_all([pidfd, copy])
        finally:
            fd.close_all([read, write])
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def test_a_parent_that_has_ended_before_the_signal_was_set(self) -> None:
        pid = os.fork()
        if pid == 0:
            reaper.set_child_subreaper()
            middle = os.fork()
            if middle == 0:
                parent = os.getpid()
                if os.fork() == 0:
                    while os.getppid() == parent:
                        time.sleep(0.001)
                    reaper.set_parent_death_signal(signal.SIGKILL, parent)
                    os._exit(0)
                os._exit(0)
            os.waitpid(middle, 0)
            os._exit(-os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == signal.SIGKILL

    def test_a_subreaper_gets_the_orphans(self) -> None:
        pid = os.fork()
        if pid == 0:
            reaper.set_child_subreaper()
            child = os.fork()
            if child == 0:
                if os.fork() == 0:
                    time.sleep(0.1)
                    os._exit(9)
                os._exit(0)
            os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


class TestLimits:
    def test_limits_of_another_process_are_set_and_read(self, sleeper: int) -> None:
        before = limit.prlimit(sleeper, "RLIMIT_NOFILE", 100, 200)
        assert before == limit.prlimit(0, "RLIMIT_NOFILE")
        assert limit.prlimit(sleeper, "RLIMIT_NOFILE") == (100, 200)
        limit.prlimit(sleeper, "RLIMIT_CORE", 0, -1)
        assert (
            "Max core file size        0                    unlimited"
            in Path(f"/proc/{sleeper}/limits").read_text()
        )

    def test_unknown_and_forbidden_limits_are_errors(self, sleeper: int) -> None:
        with pytest.raises(InvalidArgument, match="RLIMIT_NONSENSE"):
            limit.prlimit(0, "RLIMIT_NONSENSE")
        with pytest.raises(KernelError, match="prlimit64 RLIMIT_CPU of pid"):
            limit.prlimit(sleeper, "RLIMIT_CPU", 5, 3)
