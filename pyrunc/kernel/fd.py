"""Makes, seals, copies and closes descriptors, all of them close-on-exec; reads and writes whole
files."""

from __future__ import annotations

import fcntl
import os
from _socket import SCM_RIGHTS, SOL_SOCKET
from _stat import S_ISREG
from struct import Struct

from pyrunc.abi.file import (
    F_ADD_SEALS,
    F_SEAL_EXEC,
    F_SEAL_GROW,
    F_SEAL_SEAL,
    F_SEAL_SHRINK,
    F_SEAL_WRITE,
    MFD_ALLOW_SEALING,
    MFD_CLOEXEC,
    MFD_EXEC,
    MFD_NOEXEC_SEAL,
    SYNC_FILE_RANGE_WRITE,
)
from pyrunc.errors import KernelError, kernel_errors
from pyrunc.kernel.call import raw

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

EINVAL = 22
_INT = Struct("@i")
UNCHANGED = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE


def read_file(path: str) -> bytes:
    """Return a file's whole content. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return file.readall() or b""


def write_once(path: str, content: bytes) -> None:
    """Write a whole setting with one write(2) to a file of a pseudo file system (/proc, resctrl).
    Raises OSError."""
    with closing_fd(os.open(path, os.O_WRONLY | os.O_CLOEXEC)) as number:
        os.write(number, content)


def start_writeback(number: int, offset: int, length: int) -> None:
    """Make the kernel begin to write a part of a file to its disk, without waiting
    (sync_file_range(2)). Only a later fsync(2) ensures that the data is on disk, and reports
    errors."""
    # Pulls of one layer of 150 MB onto ext4: the quickest of 18 took 691 ms with this, 808 when the
    # fsync at the end had all of it to write.
    raw("sync_file_range", number, offset, length, SYNC_FILE_RANGE_WRITE)


class closing_fd:
    """A context manager that closes a descriptor at the end of its block: `with
    closing_fd(os.open(path, flags)) as number:`."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> int:
        return self._number

    def __exit__(self, *_: object) -> None:
        os.close(self._number)


def pwrite_all(number: int, content: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `content` to a file at `offset`, by several calls if pwrite(2) takes only a
    part. Raises OSError."""
    view = memoryview(content)
    while view:
        written = os.pwrite(number, view, offset)
        view, offset = view[written:], offset + written


class short_path:
    """A context manager that gives a folder a short path during its block: `with short_path(folder)
    as path: listener.bind(f"{path}/{name}")`. The address of a unix socket has at most 107 bytes
    (unix(7)). Raises OSError."""

    __slots__ = ("_folder", "_number")

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder, self._number = folder, -1

    def __enter__(self) -> str:
        self._number = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._number}"

    def __exit__(self, *_: object) -> None:
        os.close(self._number)


def stream_name(number: int, pid: str = "self") -> str:
    """Return CRIU's name of a process's descriptor: `pipe:[inode]` for a pipe, `file[mount:inode]`
    for a regular file, both numbers in hex. "" for another kind, and for a closed descriptor.
    Source: https://criu.org/Inheriting_FDs_on_restore."""
    path = f"/proc/{pid}/fd/{number}"
    try:
        target = os.readlink(path)
        if target.startswith("pipe:["):
            return target
        status = os.stat(path)
        if S_ISREG(status.st_mode):
            lines = read_file(f"/proc/{pid}/fdinfo/{number}").splitlines()
            mount = next(line for line in lines if line.startswith(b"mnt_id:"))
            return f"file[{int(mount.split()[1]):x}:{status.st_ino:x}]"
    except OSError:
        pass
    return ""


def close_all(numbers: Iterable[int]) -> None:
    """Close the descriptors; skip numbers that are -1."""
    for number in numbers:
        if number != -1:
            os.close(number)


def received(ancillary: Iterable[tuple[int, int, bytes]]) -> tuple[int, ...]:
    """Return the descriptors in the ancillary data of recvmsg(2), which the caller closes."""
    return tuple(
        number
        for level, kind, content in ancillary
        if level == SOL_SOCKET and kind == SCM_RIGHTS
        for (number,) in _INT.iter_unpack(content[: len(content) // 4 * 4])
    )


def open_memfd(name: str, content: bytes = b"", *, executable: bool = False) -> int:
    """Create a memfd with this content, at position 0. Seals can be added later. Raises
    KernelError, with EACCES when vm.memfd_noexec=2 refuses an executable memfd.

    Without `executable` the memfd cannot be executed (MFD_NOEXEC_SEAL). Linux before 6.3 has no
    such flag, so there each memfd can be executed.
    """
    flags = MFD_CLOEXEC | MFD_ALLOW_SEALING
    # One of the two is always passed: without, vm.memfd_noexec decides, and Linux 6.3 logs a
    # warning.
    number = raw(
        "memfd_create", name.encode(), flags | (MFD_EXEC if executable else MFD_NOEXEC_SEAL)
    )
    if number == -EINVAL:
        number = raw("memfd_create", name.encode(), flags)
    if number < 0:
        raise KernelError("memfd_create", f"'{name}'", -number)
    try:
        pwrite_all(number, content, 0)
    except OSError as error:
        os.close(number)
        raise KernelError.of(error, "write", f"memfd '{name}'") from None
    return number


def add_seals(number: int, seals: int) -> None:
    """Add seals to a memfd (fcntl(2), F_ADD_SEALS). Raises KernelError."""
    with kernel_errors("fcntl", f"F_ADD_SEALS {seals:#x}"):
        fcntl.fcntl(number, F_ADD_SEALS, seals)


def open_sealed_executable(name: str, content: bytes) -> int:
    """Create a memfd that can be executed, but never be changed again; return a read-only
    descriptor. So a container cannot overwrite the runtime through /proc/self/exe (CVE-2019-5736).

    The memfd is sealed against write, grow, shrink and further seals, and from Linux 6.3 on against
    changes of its x bits. Raises KernelError, with EACCES when vm.memfd_noexec=2 refuses an
    executable memfd.
    """
    number = open_memfd(name, content, executable=True)
    try:
        os.fchmod(number, 0o555)
        try:
            fcntl.fcntl(number, F_ADD_SEALS, UNCHANGED | F_SEAL_EXEC)
        except OSError:
            add_seals(number, UNCHANGED)
        # execve answers ETXTBSY as long as a writable descriptor exists, so the only one left is
        # read-only.
        return os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise KernelError.of(error, "memfd", f"'{name}'") from None
    finally:
        os.close(number)


def duplicates(numbers: Iterable[int]) -> list[int]:
    """Return copies of the descriptors. When one cannot be made, none is left open. Raises
    OSError."""
    copies: list[int] = []
    try:
        for number in numbers:
            copies.append(os.dup(number))
    except OSError:
        close_all(copies)
        raise
    return copies


def duplicate(number: int, lowest: int = 3) -> int:
    """Return a copy of the descriptor, with a number of at least `lowest` (F_DUPFD_CLOEXEC). Raises
    KernelError."""
    with kernel_errors("fcntl", f"F_DUPFD_CLOEXEC of {number}"):
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest)
