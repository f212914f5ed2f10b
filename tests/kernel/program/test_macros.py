"""Tests the effects of the launcher macros (pyrunc.program.macros) on a real file system, in
separate mount namespaces, also while another process swaps names."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import pack

import pytest

from pyrunc.abi.clone import CLONE_NEWNS
from pyrunc.abi.file import AT_FDCWD, O_PATH
from pyrunc.abi.mount import (
    MS_PRIVATE,
    MS_REC,
)
from pyrunc.abi.prctl import SECCOMP_SET_MODE_FILTER
from pyrunc.kernel.call import raw
from pyrunc.program import macros
from pyrunc.program.assemble import Assembler
from pyrunc.program.errors import OperationFailed
from pyrunc.program.launch import launch
from pyrunc.program.model import PROGRESS, STATUS, Slot


def perform(body: Callable[[Assembler, Slot], None], root: Path) -> str:
    """Run operations in their own mount namespace, with a descriptor of `root`; returns
    their output."""
    a = Assembler()
    macros.prologue(a)
    a.sys("unshare", CLONE_NEWNS)
    a.sys("mount", 0, "/", 0, MS_REC | MS_PRIVATE, 0)
    body(a, macros.open_at(a, AT_FDCWD, str(root), O_PATH | a.arch.o_directory, resolve=0))
    a.exit(0)
    read, write = os.pipe()
    try:
        with launch(a.program(), stdio=(0, write, write)) as running:
            os.close(write)
            write = -1
            while (message := running.receive()) is not None:
                assert message.tag in (PROGRESS, STATUS)
            with open(read, closefd=False) as file:
                return file.read()
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)


def make_directories(path: str) -> Callable[[Assembler, Slot], None]:
    return lambda a, root: a.sys("close", macros.make_directories(a, root, path))


@pytest.mark.parametrize("path", ["/a", "/a/b/c/d", "a/b", "/", "", "/a//b/./c", "/x/../y/z"])
def test_directories_are_made(tmp_path: Path, path: str) -> None:
    perform(make_directories(path), tmp_path)
    assert (tmp_path / os.path.normpath("/" + path).lstrip("/")).is_dir()


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("in", "real"),
        ("abs", "/real"),
        ("up", "../../../../real"),
        ("self", "./real/../real"),
        ("long", "real/deep/.."),
    ],
)
def test_links_are_followed_inside_the_root(tmp_path: Path, link: str, target: str) -> None:
    root = tmp_path / "root"
    (root / "real/deep").mkdir(parents=True)
    (root / link).symlink_to(target)
    perform(make_directories(f"/{link}/new/directory"), root)
    assert (root / "real/new/directory").is_dir()
    assert sorted(os.listdir(tmp_path)) == ["root"]


def test_a_link_that_dangles_is_an_error_and_makes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "dangling").symlink_to("/nowhere/at/all")
    with pytest.raises(OperationFailed) as caught:
        perform(make_directories("/dangling/x"), root)
    assert caught.value.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)
    assert os.listdir(root) == ["dangling"]


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OperationFailed, match="ENOTDIR"):
        perform(make_directories("/file/x"), tmp_path)


def test_magic_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "proc").symlink_to("/proc/self/root")
    with pytest.raises(OperationFailed):
        perform(make_directories("/proc/x"), tmp_path)


def test_names_that_are_swapped_meanwhile_never_lead_outside(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "a").mkdir()
    (root / "evil").symlink_to(f"../outside/../../../../../../../..{outside}")
    stop = threading.Event()

    def swap() -> None:
        fd = os.open(root, O_PATH)
        while not stop.is_set():
            raw("renameat2", fd, b"a", fd, b"evil", 2)
        os.close(fd)

    swapper = threading.Thread(target=swap)
    swapper.start()
    successes = errors = 0
    try:
        for number in range(200):
            try:
                perform(make_directories(f"/a/new{number}/../new{number}/deep"), root)
                successes += 1
            except OperationFailed:
                errors += 1
    finally:
        stop.set()
        swapper.join()
    assert os.listdir(outside) == []
    assert successes and errors, (successes, errors)


def test_missing_files_are_made_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")

    def body(a: Assembler, root: Slot) -> None:
        for path in ("/there", "/new", "/deep/er/new"):
            a.sys("close", macros.make_file(a, root, path))

    perform(body, tmp_path)
    assert (tmp_path / "there").read_text() == "kept"
    for path in ("new", "deep/er/new"):
        status = (tmp_path / path).stat()
        assert stat.S_ISREG(status.st_mode) and status.st_size == 0


@pytest.mark.parametrize("what", ["/dev/zero", "/etc/passwd", "/"])
def test_another_device_is_refused(tmp_path: Path, what: str) -> None:
    def body(a: Assembler, root: Slot) -> None:
        fd = macros.open_at(a, AT_FDCWD, what, resolve=0)
        macros.require_device(a, fd, 1, 3, "/dev/null")

    with pytest.raises(OperationFailed, match=r"ENODEV.*not the character device 1:3"):
        perform(body, tmp_path)


def test_a_failed_requirement_reports_its_reason(tmp_path: Path) -> None:
    def body(a: Assembler, root: Slot) -> None:
        macros.require(a, root, "ge", 0, errno.EBADF, "fine")
        macros.require(a, root, "lt", 0, errno.EOVERFLOW, "too large")

    with pytest.raises(OperationFailed, match=r"EOVERFLOW.*too large"):
        perform(body, tmp_path)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a folder of directories: with a program, with a file that is not executable, with a
    directory, and empty."""
    for name in ("good", "plain", "folder", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "good/tool").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "good/tool").chmod(0o755)
    (tmp_path / "plain/tool").write_text("#!/bin/sh\n")
    (tmp_path / "folder/tool").mkdir()
    return tmp_path


def forbid(a: Assembler, calls: Sequence[str]) -> None:
    """Append the load of a seccomp filter under which these system calls fail with EPERM."""
    load, jump_equal, answer = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    filter_ops = [pack("<HBBI", load, 0, 0, 0)]
    for call in calls:
        filter_ops.append(pack("<HBBI", jump_equal, 0, 1, a.arch.syscalls[call]))
        filter_ops.append(pack("<HBBI", answer, 0, 0, refuse))
    filter_ops.append(pack("<HBBI", answer, 0, 0, allow))
    program = a.data(pack("<HxxxxxxQ", len(filter_ops), 0))
    a.pointer(program.at(8), a.data(b"".join(filter_ops)))
    a.sys("seccomp", SECCOMP_SET_MODE_FILTER, 0, program)


@pytest.mark.parametrize("forbidden", [(), ("execveat",), ("execveat", "faccessat2")])
@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (["good"], 0),
        (["good/tool", "good"], 0),
        (["good/tool", "plain"], errno.EACCES),
        (["empty", "plain", "folder", "good"], 0),
        (["empty"], errno.ENOENT),
        (["empty", "plain"], errno.EACCES),
        (["plain", "empty"], errno.EACCES),
        (["folder"], errno.EISDIR),
        ([], errno.ENOENT),
    ],
)
def test_the_check_of_a_program_agrees_with_execve(
    programs: Path, order: list[str], expected: int, forbidden: tuple[str, ...]
) -> None:
    candidates = [str(programs / name / "tool") for name in order]

    def check(a: Assembler, root: Slot) -> None:
        forbid(a, forbidden)
        macros.check_program(a, candidates, "tool")

    def execute(a: Assembler, root: Slot) -> None:
        result = a.slot(4)
        macros.execute(a, candidates, a.pointers(["tool"]), a.pointers([]), result=result)
        a.fail(result)

    if not expected:
        perform(check, programs)
        assert perform(execute, programs) == "ran\n"
        return
    with pytest.raises(OperationFailed) as caught:
        perform(check, programs)
    assert (caught.value.errno, caught.value.mark) == (expected, "program")
    with pytest.raises(OperationFailed) as caught:
        perform(execute, programs)
    # execve itself does not tell a directory from a file without x.
    assert caught.value.errno == (errno.EACCES if expected == errno.EISDIR else expected)


def test_a_program_that_cannot_be_checked_is_not_refused(programs: Path) -> None:
    def check(a: Assembler, root: Slot) -> None:
        forbid(a, ["execveat", "faccessat2", "faccessat"])
        macros.check_program(a, [str(programs / "empty/tool")], "tool")

    perform(check, programs)


def test_another_error_of_execve_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("no format\n")
    (tmp_path / "tool").chmod(0o755)

    def body(a: Assembler, root: Slot) -> None:
        result = a.slot(4)
        macros.execute(
            a,
            [str(tmp_path / "tool"), "/bin/true"],
            a.pointers(["tool"]),
            a.pointers([]),
            result=result,
        )
        a.fail(result)

    with pytest.raises(OperationFailed, match="ENOEXEC"):
        perform(body, tmp_path)
