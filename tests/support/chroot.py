"""A Debian in a folder, entered as a machine of its own: mounts, processes, names and, when wanted,
network are separate.

`python -m tests.support.chroot deb SUITE` builds the package for another Debian and puts it into
dist/ of this tree.

All that runs in such a machine ends with it. Systems are made once by mmdebstrap and kept as
archives in the cache folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support import toolchain

PROJECT = Path(__file__).parents[2]
BUILD_PACKAGES = (
    "ca-certificates", "debhelper", "gcc", "git", "libc6-dev", "libseccomp2", "make", "nftables", "busybox-static",
    "python3-dev", "python3-venv",
)  # fmt: skip
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}  # fmt: skip
# How this machine reaches mirrors and package indexes.
OF_THE_HOST = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/pip.conf",
    "/etc/ssl/certs/ca-certificates.crt",
)
# $0 is the root. The holder of the namespaces is its process 1 and ends with our end of its stdin.
ENTER = """
set -e
mount --bind "$0" "$0"; cd "$0"
mount -t proc proc proc; mount --rbind /sys sys; mount --rbind /dev dev
mount -t tmpfs -o mode=0755 tmpfs run; mount -t tmpfs tmpfs tmp; mkdir -m 0700 .old
pivot_root . .old; cd /; umount -l /.old; rmdir /.old
echo ready
exec cat
"""


class Machine:
    """A running one. `root` is its root as seen from here, without what is mounted in it."""

    def __init__(self, root: Path, pid: int) -> None:
        self.root, self.pid = root, pid

    def run(self, command: str, *, check: bool = True, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """A shell command inside. Raises AssertionError with its output when it fails."""
        done = subprocess.run(
            [*self.enter(), command],
            env=ENVIRONMENT | (environment or {}), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert not check or not done.returncode, (
            f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def enter(self) -> list[str]:
        """The words before a shell command that is to run inside; it is this machine's child."""
        return ["nsenter", f"--target={self.pid}", "--all", "--root", "sh", "-c", 'cd /; eval "$0"']


@contextlib.contextmanager
def machine(
    folder: Path, suite: str, packages: Sequence[str] = (), *, own_network: bool = False
) -> Iterator[Machine]:
    """A fresh system with `packages` below `folder`, which is empty again afterwards."""
    root = folder / "root"
    root.mkdir(parents=True)
    try:
        subprocess.run(
            ["tar", "-xf", archive(suite, packages), "-C", root, "--numeric-owner"], check=True
        )
        for path in map(Path, OF_THE_HOST):
            _copy(path, root / str(path).lstrip("/"))
        with entered(root, own_network=own_network) as found:
            yield found
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def entered(root: Path, *, own_network: bool = False) -> Iterator[Machine]:
    """The system at `root` as a machine; all its processes are killed at the end."""
    spaces = [
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--uts",
        "--ipc",
        *(["--net"] if own_network else []),
    ]
    holder = subprocess.Popen(
        ["unshare", *spaces, "--propagation=private", "sh", "-c", ENTER, str(root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdin is not None
    try:
        assert holder.stdout.readline() == "ready\n", f"{root} cannot be entered"
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        found = Machine(root, int(children[0]))
        if own_network:
            up = ["nsenter", f"--target={found.pid}", "--net", "ip", "link", "set", "lo", "up"]
            subprocess.run(up, check=True)
        yield found
    finally:
        holder.stdin.close()  # process 1 ends, and with it all others
        try:
            holder.wait(10)
        except subprocess.TimeoutExpired:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
        holder.stdout.close()


def archive(suite: str, packages: Sequence[str] = ()) -> Path:
    """A minimal system with `packages`, made when it is not there."""
    name = hashlib.sha256(" ".join(sorted(packages)).encode()).hexdigest()[:12]
    path = toolchain.cache() / "debian" / f"{suite}-{name}.tar"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = path.with_suffix(f".{os.getpid()}.tar")
            include = [f"--include={','.join(packages)}"] if packages else []
            command = [
                "mmdebstrap",
                "--quiet",
                "--mode=root",
                "--variant=minbase",
                *include,
                suite,
                str(made),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(
                    f"mmdebstrap {suite}: exit code {done.returncode}\n{done.stderr}"
                )
            made.rename(path)
    return path


def build_package(suite: str, out: Path) -> Path:
    """The package of this tree for the Debian `suite`, built in a chroot of it."""
    with (
        tempfile.TemporaryDirectory(prefix="pyrunc-deb-") as work,
        machine(Path(work) / "m", suite, BUILD_PACKAGES) as debian,
    ):
        tree = debian.root / "root/pyrunc"
        subprocess.run(["git", "clone", "-q", PROJECT, tree], check=True)
        listing = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=PROJECT, capture_output=True, text=True, check=True)  # fmt: skip
        for name in filter(None, listing.stdout.split("\0")):
            _copy(PROJECT / name, tree / name)
        done = debian.run("make -C /root/pyrunc deb", environment=pip_settings())
        print(done.stdout, end="")
        (built,) = (tree / "dist").glob("*.deb")
        out.mkdir(exist_ok=True)
        shutil.copy(built, out / built.name)
        return out / built.name


def pip_settings() -> dict[str, str]:
    """What tells pip where packages are; a folder of this machine is not there inside."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") and name != "PIP_FIND_LINKS"
    }


def _copy(source: Path, target: Path) -> None:
    """A file that is there; a link at the target is replaced, for it may lead out of the machine."""
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copy2(source, target)


if __name__ == "__main__":
    if sys.argv[1:2] != ["deb"] or len(sys.argv) != 3:
        sys.exit("usage: python -m tests.support.chroot deb SUITE")
    print(build_package(sys.argv[2], PROJECT / "dist"))
