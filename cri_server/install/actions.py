"""What is done to a machine, one action at a time: each knows whether it is needed, can be shown,
and can be carried out."""

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
from pyrunc.kernel.mountinfo import mount_points


def beneath(root: Path, path: str) -> Path:
    """The absolute `path` of the machine at `root`."""
    return root / path.lstrip("/")


def read(file: Path) -> bytes:
    """The content of a regular file, which a link may lead to. Raises OSError, Error for anything
    else: a pipe or a device in its place would never end."""
    place = os.open(file, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise Error(f"{file} is no regular file")
        with open(f"/proc/self/fd/{place}", "rb") as opened:
            return opened.read()
    finally:
        os.close(place)


@dataclass(frozen=True, slots=True)
class Folder:
    path: str
    mode: int = 0o755

    def __str__(self) -> str:
        return f"make {self.path}/"

    def is_done(self, root: Path) -> bool:
        return beneath(root, self.path).is_dir()

    def do(self, root: Path) -> None:
        folder = beneath(root, self.path)
        folder.mkdir()
        folder.chmod(self.mode)


@dataclass(frozen=True, slots=True)
class Write:
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
class Link:
    path: str
    target: str

    def __str__(self) -> str:
        return f"link {self.path} -> {self.target}"

    def is_done(self, root: Path) -> bool:
        link = beneath(root, self.path)
        return link.is_symlink() and os.readlink(link) == self.target

    def do(self, root: Path) -> None:
        link = beneath(root, self.path)
        made = link.with_name(f".{link.name}.{os.getpid()}")
        made.symlink_to(self.target)
        made.rename(link)


@dataclass(frozen=True, slots=True)
class Remove:
    """A file or a link; a folder only when it is empty, or with all that is in it when `whole`. A
    mount point stays, and with it what the file system itself has there."""

    path: str
    whole: bool = False

    def __str__(self) -> str:
        return f"remove {self.path}{'/ and all in it' if self.whole else ''}"

    def is_done(self, root: Path) -> bool:
        found = beneath(root, self.path)
        if found.is_symlink() or not found.is_dir():
            return not os.path.lexists(found)
        if is_mounted(found):
            return not self.whole or not _content(found)
        return not self.whole and any(found.iterdir())

    def do(self, root: Path) -> None:
        found = beneath(root, self.path)
        if found.is_symlink() or not found.is_dir():
            found.unlink()
        elif not self.whole:
            found.rmdir()
        elif is_mounted(found):
            for entry in _content(found):
                shutil.rmtree(
                    entry
                ) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        else:
            shutil.rmtree(found)


@dataclass(frozen=True, slots=True)
class EndKeeper:
    """The keeper of a state directory, which outlives its server as long as it has something."""

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
    """Whether something is mounted on the folder."""
    return os.path.realpath(folder) in {mount.path for mount in mount_points()}


def _content(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.name != "lost+found"]


@dataclass(frozen=True, slots=True)
class Run:
    """A command of the machine. `may_fail`: where its service need not exist."""

    words: tuple[str, ...]
    may_fail: bool = False

    def __str__(self) -> str:
        return f"run {' '.join(self.words)}"

    def is_done(self, root: Path) -> bool:
        return False

    def do(self, root: Path) -> None:
        done = subprocess.run(self.words, capture_output=True, text=True, check=False)
        if done.returncode and not self.may_fail:
            raise Error(
                f"{' '.join(self.words)}: exit code {done.returncode}: {done.stderr.strip()}"
            )


@dataclass(frozen=True, slots=True)
class Keep:
    """Nothing is done, and it is said why."""

    path: str
    why: str

    def __str__(self) -> str:
        return f"keep {self.path}: {self.why}"

    def is_done(self, root: Path) -> bool:
        return False

    def do(self, root: Path) -> None:
        pass


Action = Folder | Write | Link | Remove | Run | Keep | EndKeeper
