"""The tar archives of `cp` with `-`: writes a file or folder to stdout as an archive, or extracts
an archive from stdin."""

from __future__ import annotations

import os
import stat
import sys
import tarfile

from cri_server.cli.containers.file_copy import CHUNK_BYTES, FOLDER, Copy
from pyrunc.errors import InvalidArgument, WrongState
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.path import open_regular_at


def write(folder: int, name: str) -> None:
    """Write `name`, a file or folder in the open folder `folder`, to stdout as a tar. Raises
    OSError, and InvalidArgument if stdout is a terminal."""
    if sys.stdout.isatty():
        raise InvalidArgument("an archive cannot be written to a terminal: redirect stdout")
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        _add(archive, folder, name, name if name != "." else "")


def _add(archive: tarfile.TarFile, folder: int, name: str, path: str) -> None:
    """Add `name`, a file or folder in the open folder `folder`, to the archive as `path`. Follows
    no symbolic link."""
    status = os.lstat(name, dir_fd=folder)
    info = tarfile.TarInfo(path or ".")
    info.mode = stat.S_IMODE(status.st_mode)
    info.uid = status.st_uid
    info.gid = status.st_gid
    info.mtime = status.st_mtime
    if stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
        archive.addfile(info)
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
        with closing_fd(os.open(name, FOLDER, dir_fd=folder)) as below:
            for each in sorted(os.listdir(below)):
                _add(archive, below, each, f"{path}/{each}".lstrip("/"))
    elif stat.S_ISREG(status.st_mode):
        with os.fdopen(open_regular_at(folder, name), "rb") as file:
            # The size is that of the opened file: the container may have replaced the name since
            # the lstat(2).
            info.size = os.fstat(file.fileno()).st_size
            archive.addfile(info, file)


def extract(copy: Copy, target: int) -> None:
    """Extract the tar archive on stdin, plain or compressed, into the open folder `target`.

    Raises OSError, and WrongState in these cases:

    - stdin is no tar archive;
    - a member's name leads out of `target`, or an existing file is in its way;
    - a member is no file, folder or symbolic link.
    """
    try:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|*") as archive:
            for member in archive:
                _extract(copy, archive, member, target)
    except tarfile.TarError as error:
        raise WrongState(f"stdin is not a tar archive: {error}") from None


def _extract(copy: Copy, archive: tarfile.TarFile, member: tarfile.TarInfo, target: int) -> None:
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    # Such a name is not resolved but refused: archives that leave their destination are attacks
    # (CVE-2018-1002100 and CVE-2019-1002101 in `kubectl cp`).
    if ".." in parts:
        raise WrongState(f"the name {member.name!r} in the archive leads out of the destination")
    if not parts:
        return
    status = _status(member)
    folder = os.dup(target)
    try:
        for part in parts[:-1]:
            below = copy.folder(folder, part, 0o755)
            os.close(folder)
            folder = below
        _make(copy, archive, member, status, folder, parts[-1])
    finally:
        os.close(folder)


def _make(
    copy: Copy,
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    status: os.stat_result,
    folder: int,
    name: str,
) -> None:
    if member.isdir():
        with closing_fd(copy.folder(folder, name)) as created:
            copy.finish(status, created)
    elif member.isfile():
        content = archive.extractfile(member)
        assert content is not None
        copy.file(status, iter(lambda: content.read(CHUNK_BYTES), b""), folder, name)
    elif member.issym():
        copy.link(status, member.linkname, folder, name)
    else:
        raise WrongState(f"{member.name!r} in the archive is neither a file, a folder nor a link")


def _status(member: tarfile.TarInfo) -> os.stat_result:
    """Return an archive member's type, mode, owner, size and time as a stat result, which `Copy`
    needs."""
    kind = stat.S_IFDIR if member.isdir() else stat.S_IFLNK if member.issym() else stat.S_IFREG
    mtime_ns = int(member.mtime * 1_000_000_000)
    fields = (kind | member.mode & 0o7777, 0, 0, 1, member.uid, member.gid, member.size, 0, 0, 0)
    return os.stat_result(fields, {"st_atime_ns": mtime_ns, "st_mtime_ns": mtime_ns})
