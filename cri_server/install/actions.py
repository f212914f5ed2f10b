"""Actions on the files and services of the machine whose root directory is `root`. str(action)
describes the action, is_done(root) tells whether nothing is left to do, and do(root) carries it
out."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pyrunc.atomic_file import write_bytes
from pyrunc.errors import Error
from pyrunc.keeper.client import Keeper, end
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.mountinfo import mount_points


def beneath(root: Path, path: str) -> Path:
    """Return `path`, an absolute path of the machine, as a path below `root`, the machine's root
    directory: `/etc` gives `root/etc`."""
    return root / path.lstrip("/")


def read(file: Path) -> bytes:
    """Return the content of a regular file, also through symbolic links. Raises OSError, and Error
    for any other kind of file."""
    # O_PATH neither opens a device nor waits for a pipe's writer (open(2)); /proc/self/fd then
    # opens the file that was checked, even if the name now refers to another one.
    with closing_fd(os.open(file, os.O_PATH | os.O_CLOEXEC)) as place:
        # Local users may have put a pipe or a device there, from which read(2) could block for
        # ever.
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise Error(f"{file} is not a regular file")
        with open(f"/proc/self/fd/{place}", "rb") as opened:
            return opened.read()


@dataclass(frozen=True, slots=True)
class Folder:
    """Creates a folder."""

    path: str
    mode: int = 0o755

    def __str__(self) -> str:
        return f"make {self.path}/"

    def is_done(self, root: Path) -> bool:
        return beneath(root, self.path).is_dir()

    def do(self, root: Path) -> None:
        folder = beneath(root, self.path)
        folder.mkdir()
        # The umask reduces the mode of mkdir(2).
        folder.chmod(self.mode)


@dataclass(frozen=True, slots=True)
class Write:
    """Writes a file. Replaces an existing file or symbolic link."""

    path: str
    content: bytes
    mode: int = 0o644

    def __str__(self) -> str:
        return f"write {self.path}"

    def is_done(self, root: Path) -> bool:
        file = beneath(root, self.path)
        if file.is_symlink() or not file.is_file():
            return False
        return read(file) == self.content and file.stat().st_mode & 0o777 == self.mode

    def do(self, root: Path) -> None:
        write_bytes(str(beneath(root, self.path)), self.content, mode=self.mode)


@dataclass(frozen=True, slots=True)
class SymbolicLink:
    """Makes a symbolic link. Replaces an existing file or link."""

    path: str
    target: str

    def __str__(self) -> str:
        return f"link {self.path} -> {self.target}"

    def is_done(self, root: Path) -> bool:
        link = beneath(root, self.path)
        return link.is_symlink() and os.readlink(link) == self.target

    def do(self, root: Path) -> None:
        link = beneath(root, self.path)
        # symlink(2) cannot replace a file, rename(2) can
        temporary = link.with_name(f".{link.name}.{os.getpid()}")
        temporary.symlink_to(self.target)
        temporary.rename(link)


@dataclass(frozen=True, slots=True)
class Remove:
    """Removes a file, a link or an empty folder. With `whole` also removes a folder with its
    contents.

    A mount point stays; with `whole` its contents are removed, except for lost+found, which belongs
    to the file system.
    """

    path: str
    whole: bool = False

    def __str__(self) -> str:
        return f"remove {self.path}{'/ and all in it' if self.whole else ''}"

    def is_done(self, root: Path) -> bool:
        target = beneath(root, self.path)
        if target.is_symlink() or not target.is_dir():
            return not os.path.lexists(target)
        if is_mounted(target):
            return not self.whole or not _content(target)
        return not self.whole and any(target.iterdir())

    def do(self, root: Path) -> None:
        target = beneath(root, self.path)
        if target.is_symlink() or not target.is_dir():
            target.unlink()
        elif not self.whole:
            target.rmdir()
        elif is_mounted(target):
            for entry in _content(target):
                shutil.rmtree(
                    entry
                ) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        else:
            shutil.rmtree(target)


@dataclass(frozen=True, slots=True)
class EndKeeper:
    """Ends the process pyrunc-keeper of the state directory `path`. This process does not end by
    itself while it stores descriptors for the server."""

    path: str

    def __str__(self) -> str:
        return f"end pyrunc-keeper of {self.path}"

    def is_done(self, root: Path) -> bool:
        keeper = Keeper(beneath(root, self.path))
        try:
            keeper.hello()
        except Error:
            return True
        finally:
            keeper.close()
        return False

    def do(self, root: Path) -> None:
        end(beneath(root, self.path))


def is_mounted(folder: Path) -> bool:
    """Return whether the folder is a mount point."""
    return os.path.realpath(folder) in {mount.path for mount in mount_points()}


def _content(folder: Path) -> list[Path]:
    # e2fsck(8) puts recovered files into lost+found, and only mklost+found(8) makes it again.
    return [entry for entry in folder.iterdir() if entry.name != "lost+found"]


@dataclass(frozen=True, slots=True)
class RunCommand:
    """Runs a command on this machine. With `may_fail` a failure of the command is ignored, because
    the service that it controls may not exist."""

    arguments: tuple[str, ...]
    may_fail: bool = False

    def __str__(self) -> str:
        return f"run {' '.join(self.arguments)}"

    def is_done(self, root: Path) -> bool:
        return False

    def do(self, root: Path) -> None:
        result = subprocess.run(self.arguments, capture_output=True, text=True, check=False)
        if result.returncode and not self.may_fail:
            command = " ".join(self.arguments)
            raise Error(f"{command}: exit code {result.returncode}: {result.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class KeepFile:
    """Leaves a path as it is, and reports the reason."""

    path: str
    why: str

    def __str__(self) -> str:
        return f"keep {self.path}: {self.why}"

    def is_done(self, root: Path) -> bool:
        return False

    def do(self, root: Path) -> None:
        pass


Action = Folder | Write | SymbolicLink | Remove | RunCommand | KeepFile | EndKeeper
