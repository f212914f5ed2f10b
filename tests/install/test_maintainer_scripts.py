"""Tests Debian's maintainer scripts alone, with stand-ins for the package's programs."""

from __future__ import annotations

import fcntl
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from pyrunc.keeper.client import ensure
from tests.support.keeper import is_gone
from tests.support.processes import wait_until

DEBIAN = Path(__file__).parents[2] / "debian"
WRITES_SNAPSHOT = '[ "$1" != --write-snapshot ] || { echo taken >"$2"; exit 0; }\n'


@dataclass
class Installed:
    """The package's files below a folder, which the scripts take for the root directory."""

    root: Path

    @property
    def program(self) -> Path:
        return self.root / "usr/bin/pyrunc"

    @property
    def native(self) -> Path:
        return self.root / "usr/lib/pyrunc/pyrunc/native"

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a maintainer script with all paths below the folder, and with an `nft` that does
        nothing."""
        command = ["sh", "-c", self._text(script), script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def run_with_mounts(
        self, mounts: str, script: str, *arguments: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the script in a new mount namespace after the commands `mounts`."""
        command = [
            "unshare",
            "--mount",
            "sh",
            "-ec",
            f"cd {self.root}; {mounts}\n{self._text(script)}",
        ]
        return subprocess.run(
            [*command, script, *arguments], capture_output=True, text=True, check=False
        )

    def _text(self, script: str) -> str:
        text = (DEBIAN / script).read_text()
        return "nft() { :; }\n" + re.sub(
            r"(?<![\w/.-])/(usr|run|etc|var)/", rf"{self.root}/\1/", text
        )

    def write(self, path: str, text: str = "") -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def files(self, *tops: str) -> list[str]:
        files = (path for top in tops for path in (self.root / top).rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.root)) for path in files)


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    package = Installed(tmp_path)
    package.native.mkdir(parents=True)
    package.program.parent.mkdir(parents=True)
    write_program(package.native / "pyrunc-script", "echo the script\n")
    return package


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def starts(installed: Installed) -> bool:
    return subprocess.run([installed.program, "--version"], check=False).returncode == 0


def test_a_program_that_starts_keeps_its_snapshot(installed: Installed) -> None:
    write_program(installed.program, WRITES_SNAPSHOT)
    done = installed.run("postinst", "triggered")
    assert (done.returncode, done.stderr) == (0, "")
    assert (installed.native / "pyrunc-snapshot").read_text() == "taken\n"
    assert installed.program.read_text().endswith(WRITES_SNAPSHOT)


# A fault of the program -> the script's message.
FAILURES = {
    "a snapshot that kills it": (
        WRITES_SNAPSHOT + "[ ! -e {snapshot} ] || kill -SEGV $$\n",
        "does not start from its snapshot",
    ),
    "no snapshot": (
        '[ "$1" != --write-snapshot ] || { echo half >"$2"; exit 1; }\n',
        "no snapshot",
    ),
    "a signal at each start": ("kill -SEGV $$\n", "the plain script is in its place"),
    "a signal once it has its snapshot": (
        WRITES_SNAPSHOT + "kill -SEGV $$\n",
        "the plain script is in its place",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_package_leaves_a_program_that_starts(installed: Installed, failure: str) -> None:
    program, message = FAILURES[failure]
    snapshot = installed.native / "pyrunc-snapshot"
    write_program(installed.program, program.replace("{snapshot}", str(snapshot)))
    done = installed.run("postinst", "triggered")
    assert done.returncode == 0
    assert message in done.stderr
    assert starts(installed)
    assert sorted(path.name for path in installed.native.iterdir()) == ["pyrunc-script"]
    assert [path.name for path in installed.program.parent.iterdir()] == ["pyrunc"]


def test_a_program_that_the_kernel_cannot_run_is_replaced_by_the_script(
    installed: Installed,
) -> None:
    installed.program.write_bytes(b"\x7fELF and nothing else")
    installed.program.chmod(0o755)
    assert installed.run("postinst", "triggered").returncode == 0
    assert starts(installed)


DATA = ("var/lib/pyrunc/server.lock", "var/lib/pyrunc/images/a", "run/pyrunc-cri/server.lock")
REGISTRIES = ("etc/pyrunc/certs.d/docker.io/hosts.toml", "etc/pyrunc/credential-providers.d/a.yaml")
# debconf's shell functions, with an administrator who answers at once.
CONFMODULE = 'db_input() { echo "asked $2" >&2; }\ndb_go() { :; }\ndb_get() { RET=%s; }\n'
# debconf's answer -> the files of /etc/pyrunc that remain.
ANSWERS = {
    "no debconf": (None, ()),
    "yes": ("true", ()),
    "no": ("false", REGISTRIES),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_purge_removes_registry_settings_unless_the_administrator_declines(
    installed: Installed, answer: str
) -> None:
    reply, remaining = ANSWERS[answer]
    for path in (*DATA, *REGISTRIES):
        installed.write(path)
    if reply is not None:
        installed.write("usr/share/debconf/confmodule", CONFMODULE % reply)
    done = installed.run("postrm", "purge")
    assert done.returncode == 0, done.stderr
    assert ("asked pyrunc/purge_registries" in done.stderr) == (reply is not None)
    assert installed.files("var", "run", "etc") == sorted(remaining)


def test_a_purge_asks_nothing_when_there_is_nothing_to_ask_about(installed: Installed) -> None:
    for path in DATA:
        installed.write(path)
    (installed.root / "etc/pyrunc").mkdir(parents=True)
    installed.write("usr/share/debconf/confmodule", CONFMODULE % "false")
    done = installed.run("postrm", "purge")
    assert (done.returncode, done.stderr) == (0, "")
    assert installed.files("var", "run") == [] and not (installed.root / "etc/pyrunc").exists()


def test_a_purge_ends_the_keeper(installed: Installed) -> None:
    state = installed.root / "run/pyrunc-cri"
    state.mkdir(parents=True)
    keeper = ensure(state)
    pid = keeper.hello()
    keeper.put("pod/left", b"")
    keeper.close()
    done = installed.run("postrm", "purge")
    assert (done.returncode, done.stderr) == (0, "")
    assert wait_until(lambda: is_gone(pid), 10) and not state.exists()


@pytest.mark.parametrize("folder", ["var/lib/pyrunc", "run/pyrunc-cri"])
def test_a_purge_deletes_nothing_under_a_server_that_runs(
    installed: Installed, folder: str
) -> None:
    for path in (*DATA, *REGISTRIES):
        installed.write(path)
    before = installed.files("var", "run", "etc")
    with open(installed.root / folder / "server.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = installed.run("postrm", "purge")
    assert done.returncode == 1 and f"a server uses {installed.root / folder}: stop" in done.stderr
    assert installed.files("var", "run", "etc") == before
    assert installed.run("postrm", "purge").returncode == 0
    assert installed.files("var", "run", "etc") == []


# What Debian 12's packages do in their maintainer scripts, and what ours does.
#   remove, server of the unit:   all four stop it (deb-systemd-invoke stop); so do we.
#   remove, another server:       containerd, podman: nothing. docker.io: its init script.
#                                 mariadb-server: its preinst refuses ("Stop it yourself and try
#                                 again!"). We refuse.
#   purge, data:                  containerd (/var/lib/containerd), podman (/var/lib/containers):
#                                 stays. docker.io: all of /var/lib/docker, with a script that
#                                 unmounts mounts below. mariadb-server: asks, then all but
#                                 lost+found. We remove images and records.
#   purge, data on its own disk:  mariadb-server empties it and leaves the mount point (Debian bug
#                                 829491). So do we; `rm -rf` of a mount point fails, and dpkg with
#                                 it, at each attempt.
#   purge, a mount below:         docker.io unmounts it. We refuse: it may be a folder of the
#                                 administrator's.
#   purge, configuration:         conffiles go (dpkg). What the administrator has added stays in all
#                                 four. We ask.
MOUNTED = {
    "its own disk": (
        (
            "mount -t tmpfs x var/lib/pyrunc; mkdir var/lib/pyrunc/lost+found; touch"
            " var/lib/pyrunc/.x var/lib/pyrunc/y"
        ),
        "{root}/var/lib/pyrunc/lost+found {root}/var/lib/pyrunc",
    ),
    "the same without lost+found": (
        "mount -t tmpfs x var/lib/pyrunc; mkdir -p var/lib/pyrunc/images/a",
        "{root}/var/lib/pyrunc",
    ),
}


@pytest.mark.parametrize("mounted", MOUNTED)
def test_a_purge_empties_a_disk_that_is_mounted_there(installed: Installed, mounted: str) -> None:
    commands, remaining = MOUNTED[mounted]
    (installed.root / "var/lib/pyrunc").mkdir(parents=True)
    show = "trap 'find \"$PWD/var/lib/pyrunc\" -depth' EXIT"
    done = installed.run_with_mounts(f"{commands}; {show}", "postrm", "purge")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == remaining.format(root=installed.root).split()


@pytest.mark.parametrize(
    "folder", ["var/lib/pyrunc/images", "var/lib/pyrunc-pods/logs", "run/pyrunc-cri/a"]
)
def test_a_purge_deletes_nothing_below_a_mount(installed: Installed, folder: str) -> None:
    for path in DATA:
        installed.write(path)
    installed.write("home/file", "canary")
    (installed.root / folder).mkdir(parents=True, exist_ok=True)
    before = installed.files("var", "run", "home")
    done = installed.run_with_mounts(f"mount --bind home {folder}", "postrm", "purge")
    message = f"{installed.root / folder} is a mount point: umount it, then purge again"
    assert done.returncode == 1 and message in done.stderr
    assert installed.files("var", "run", "home") == before


def test_a_removal_keeps_data_and_settings(installed: Installed) -> None:
    for path in (*DATA, *REGISTRIES):
        installed.write(path)
    before = installed.files("var", "run", "etc")
    assert installed.run("postrm", "remove").returncode == 0
    assert installed.files("var", "run", "etc") == before


def test_a_purge_follows_no_link(installed: Installed) -> None:
    """The folders that a purge removes are links to a folder of another user: the links must be
    removed, and their targets must stay."""
    victim = installed.root / "victim"
    victim.mkdir()
    (victim / "file").write_text("canary")
    for link in (
        "etc/pyrunc",
        "var/lib/pyrunc",
        "run/pyrunc-cri",
        "run/pyrunc/cri.sock",
        "run/pyrunc/.seccomp",
    ):
        (installed.root / link).parent.mkdir(parents=True, exist_ok=True)
        (installed.root / link).symlink_to(victim)
    done = installed.run("postrm", "purge")
    assert done.returncode == 0, done
    assert (victim / "file").read_text() == "canary"
    assert not [path for path in installed.root.rglob("*") if path.is_symlink()]
