"""Runs a Debian system in a folder like a separate machine: with its own mounts, processes, host
name and, on request, network.

`python -m tests.support.chroot deb SUITE` builds the package for another Debian and puts it into
dist/ of this tree.

All processes in such a machine end with it. Systems are made once by mmdebstrap and stored as
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
    "ca-certificates", "debhelper", "gcc", "git", "libc6-dev", "libseccomp2", "make", "nftables",
    "busybox-static",
    "python3-dev", "python3-venv",
)  # fmt: skip
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}  # fmt: skip
# How this machine reaches mirrors and package indexes.
OF_THE_HOST = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/pip.conf",
    "/etc/ssl/certs/ca-certificates.crt",
)
# $0 is the root. Process 1 holds the namespaces and ends when we close our end of its stdin.
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
    """A running Debian system. `root` is its root folder as seen from the host, without its
    mounts."""

    def __init__(self, root: Path, pid: int) -> None:
        self.root, self.pid = root, pid

    def run(self, command: str, *, check: bool = True, environment: dict[str,
        str] | None = None) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a shell command in the machine. Raises AssertionError with its output when it
        fails."""
        done = subprocess.run(
            [*self.enter(), command],
            env=ENVIRONMENT | (environment or {}), capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert not check or not done.returncode, (
            f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def enter(self) -> list[str]:
        """Return the beginning of a command line whose last argument is a shell command to run in
        the machine."""
        return ["nsenter", f"--target={self.pid}", "--all", "--root", "sh", "-c", 'cd /; eval "$0"']


@contextlib.contextmanager
def machine(
    folder: Path, suite: str, packages: Sequence[str] = (), *, own_network: bool = False
) -> Iterator[Machine]:
    """Run a fresh Debian system with `packages` below `folder`; remove the folder at the end."""
    root = folder / "root"
    root.mkdir(parents=True)
    try:
        subprocess.run(
            ["tar", "-xf", archive(suite, packages), "-C", root, "--numeric-owner"], check=True
        )
        for path in map(Path, OF_THE_HOST):
            _copy(path, root / str(path).lstrip("/"))
        with entered(root, own_network=own_network) as chroot:
            yield chroot
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def entered(root: Path, *, own_network: bool = False) -> Iterator[Machine]:
    """Run the system at `root` as a machine; all its processes are killed at the end."""
    spaces = [
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--uts",
        "--ipc",
        *(["--net"] if own_network else []),
    ]
    namespace_process = subprocess.Popen(
        ["unshare", *spaces, "--propagation=private", "sh", "-c", ENTER, str(root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert namespace_process.stdout is not None and namespace_process.stdin is not None
    try:
        assert namespace_process.stdout.readline() == "ready\n", f"{root} cannot be entered"
        children = (
            Path(f"/proc/{namespace_process.pid}/task/{namespace_process.pid}/children")
            .read_text()
            .split()
        )
        chroot = Machine(root, int(children[0]))
        if own_network:
            up = ["nsenter", f"--target={chroot.pid}", "--net", "ip", "link", "set", "lo", "up"]
            subprocess.run(up, check=True)
        yield chroot
    finally:
        namespace_process.stdin.close()  # process 1 ends, and with it all others
        try:
            namespace_process.wait(10)
        except subprocess.TimeoutExpired:
            namespace_process.send_signal(signal.SIGKILL)
            namespace_process.wait()
        namespace_process.stdout.close()


def archive(suite: str, packages: Sequence[str] = ()) -> Path:
    """Return a tar of a minimal Debian system with `packages`, which the first call makes."""
    name = hashlib.sha256(" ".join(sorted(packages)).encode()).hexdigest()[:12]
    path = toolchain.cache() / "debian" / f"{suite}-{name}.tar"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            tar = path.with_suffix(f".{os.getpid()}.tar")
            include = [f"--include={','.join(packages)}"] if packages else []
            command = [
                "mmdebstrap",
                "--quiet",
                "--mode=root",
                "--variant=minbase",
                *include,
                suite,
                str(tar),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(
                    f"mmdebstrap {suite}: exit code {done.returncode}\n{done.stderr}"
                )
            tar.rename(path)
    return path


def build_package(suite: str, out: Path) -> Path:
    """Build the package of this tree for the Debian `suite`, in a chroot of this suite."""
    with (
        tempfile.TemporaryDirectory(prefix="pyrunc-deb-") as work,
        machine(Path(work) / "m", suite, BUILD_PACKAGES) as debian,
    ):
        tree = debian.root / "root/pyrunc"
        subprocess.run(["git", "clone", "-q", PROJECT, tree], check=True)
        listing = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=PROJECT,
            capture_output=True, text=True, check=True)  # fmt: skip
        for name in filter(None, listing.stdout.split("\0")):
            _copy(PROJECT / name, tree / name)
        done = debian.run("make -C /root/pyrunc deb", environment=pip_settings())
        print(done.stdout, end="")
        (built,) = (tree / "dist").glob("*.deb")
        out.mkdir(exist_ok=True)
        shutil.copy(built, out / built.name)
        return out / built.name


def pip_settings() -> dict[str, str]:
    """Return those of pip's settings in the environment that are valid in the machine."""
    return {
        name: value
        for name, value in os.environ.items()
        # The folder of PIP_FIND_LINKS does not exist in the machine.
        if name.startswith("PIP_") and name != "PIP_FIND_LINKS"
    }


def _copy(source: Path, target: Path) -> None:
    """Copy a file, if it exists."""
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        # A link here may lead out of the machine.
        target.unlink(missing_ok=True)
        shutil.copy2(source, target)


if __name__ == "__main__":
    if sys.argv[1:2] != ["deb"] or len(sys.argv) != 3:
        sys.exit("usage: python -m tests.support.chroot deb SUITE")
    print(build_package(sys.argv[2], PROJECT / "dist"))
