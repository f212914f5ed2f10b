"""Runs commands in the guest as root or as an ordinary user, and makes containers with them."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support import bundle
from tests.support.processes import wait_until

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CGROUPS = Path("/sys/fs/cgroup")
PYRUNC = Path("/usr/local/bin/pyrunc")

Done = subprocess.CompletedProcess[str]


class User:
    """A user who runs commands: root with the guest's own environment, others with that of a
    login."""

    def __init__(self, name: str = "root", uid: int = 0, *, bus: bool = True) -> None:
        self.name, self.uid = name, uid
        self.runtime_dir = f"/run/user/{uid}" if bus else f"/tmp/runtime-{uid}"
        self.home = "/root" if uid == 0 else f"/home/{name}"

    def run(
        self,
        *command: str | Path,
        check: bool = True,
        timeout_s: float = 120,
        terminal: bool = False,
    ) -> Done:
        words = [str(word) for word in command]
        if terminal:
            return self._on_a_terminal(words, timeout_s)
        # Output goes to files, because a detached container keeps its streams open.
        with (
            tempfile.TemporaryDirectory() as folder,
            open(f"{folder}/out", "w+") as out,
            open(f"{folder}/err", "w+") as err,
        ):
            ended = subprocess.run(
                [*self._become(), *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd="/tmp",
                check=False,
                env=self._environment(),
                timeout=timeout_s,
            )
            out.seek(0)
            err.seek(0)
            done = Done(words, ended.returncode, out.read(), err.read())
        assert not check or done.returncode == 0, (
            f"{words}: {done.returncode}: {done.stdout}{done.stderr}"
        )
        return done

    def _on_a_terminal(self, words: list[str], timeout_s: float) -> Done:
        """Run a command on a new terminal; return its output with newlines alone at the ends of
        lines."""
        master, slave = os.openpty()
        with subprocess.Popen(
            [*self._become(), *words], stdin=slave, stdout=slave, stderr=slave, cwd="/tmp",
            start_new_session=True, env=self._environment(),
        ) as running:  # fmt: skip
            os.close(slave)
            output, deadline = b"", time.monotonic() + timeout_s
            while select.select([master], [], [], max(deadline - time.monotonic(), 0))[0]:
                try:
                    output += os.read(master, 65536)
                except OSError:  # EIO: no process has the terminal any more
                    break
            os.close(master)
            running.wait(timeout=30)
        text = output.decode(errors="replace").replace("\r\n", "\n")
        assert running.returncode == 0, f"{words}: {running.returncode}: {text}"
        return Done(words, running.returncode, text, "")

    def output(self, *command: str | Path, **how: Any) -> str:
        return self.run(*command, **how).stdout.strip()

    def _become(self) -> list[str]:
        ids = [f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        return ["setpriv", *ids] if self.uid else []

    def _environment(self) -> Mapping[str, str]:
        if not self.uid:
            return {**os.environ, "PATH": PATH}
        return {
            "PATH": PATH,
            "USER": self.name,
            "HOME": self.home,
            "XDG_RUNTIME_DIR": self.runtime_dir,
        }


class Container:
    """A container of `user`, made from a bundle in `folder`."""

    def __init__(self, folder: Path, user: User, *options: str) -> None:
        self.id, self.folder, self.user = f"oci-{uuid.uuid4().hex[:8]}", folder, user
        self.bundle, self._options = folder / "bundle", options

    def make(
        self,
        *command: str,
        change: Callable[[dict[str, Any]], None] = lambda config: None,
        **linux: Any,
    ) -> None:
        """Write the bundle, which then belongs to the user; `change` changes the configuration in
        place."""
        config = bundle.configuration(*command, **linux)
        change(config)
        bundle.make(self.bundle, config)
        if self.user.uid:
            for path in (self.folder, *self.folder.parents):
                if path.owner() == "root" and path.is_relative_to("/tmp/"):
                    path.chmod(0o755)
            self.user_owns(self.bundle)

    def user_owns(self, path: Path) -> None:
        subprocess.run(["chown", "-R", f"{self.user.uid}:{self.user.uid}", str(path)], check=True)

    def pyrunc(self, *arguments: str | Path, check: bool = True, **how: Any) -> Done:
        return self.user.run(PYRUNC, *self._options, *arguments, check=check, **how)

    def run(self) -> None:
        self.pyrunc("run", "-d", "--bundle", self.bundle, self.id)

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.pyrunc("state", self.id).stdout)
        return state

    @property
    def group(self) -> Path:
        return CGROUPS / Path(f"/proc/{self.state['pid']}/cgroup").read_text().strip().removeprefix(
            "0::/"
        )

    def sh(self, script: str, *options: str, check: bool = True) -> Done:
        return self.pyrunc("exec", *options, self.id, "sh", "-c", script, check=check)

    def wait(self, status: str, timeout_s: float = 20) -> None:
        assert wait_until(lambda: self.state["status"] == status, timeout_s, 0.2), self.state

    def remove(self) -> None:
        self.pyrunc("delete", "--force", self.id)


def install() -> None:
    """Install the compiled runtime where any user and any engine finds it, writable for root
    only."""
    place, python = Path("/usr/local/lib/pyrunc"), "/opt/venv/bin/python"
    shutil.rmtree(place / "pyrunc", ignore_errors=True)
    shutil.copytree(
        "/root/project/pyrunc", place / "pyrunc", ignore=shutil.ignore_patterns("__pycache__")
    )
    subprocess.run([python, "-m", "compileall", "-q", str(place)], check=True)
    subprocess.run(["chmod", "-R", "a+rX", str(place)], check=True)
    program = (
        "from pyrunc.cli import entry; print(entry.script(entry.here().python,"
        " entry.here().searched))"
    )
    text = subprocess.run(
        [python, "-c", program], cwd=place, capture_output=True, text=True, check=True
    ).stdout
    PYRUNC.write_text(text)
    PYRUNC.chmod(0o755)


def ordinary_user(name: str, uid: int) -> None:
    """Make a user who may use 65536 more ids, and whose systemd runs without a login."""
    if not Path(f"/home/{name}").exists():
        # useradd adds the ids.
        subprocess.run(["useradd", "-m", "-u", str(uid), "-s", "/bin/sh", name], check=True)
    subprocess.run(["loginctl", "enable-linger", name], check=True)
    assert wait_until(Path(f"/run/user/{uid}/bus").exists, 60, 0.5), "the user's systemd has no bus"


def granted_ids(name: str) -> tuple[int, int]:
    """Return (first id, number of ids) of the user in /etc/subuid."""
    for line in Path("/etc/subuid").read_text().splitlines():
        owner, first, count = line.split(":")
        if owner == name:
            return int(first), int(count)
    raise AssertionError(f"{name} has no ids in /etc/subuid")
