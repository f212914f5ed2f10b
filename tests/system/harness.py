"""Runs a runtime as its callers do: a program with arguments, exit codes and files. Imports nothing
of this project's product.

`PYRUNC_RUNTIME` names another runtime, which must pass the same tests (tests of pyrunc's own verbs
check `is_pyrunc`). Output goes to files: a container keeps its descriptors, and a pipe would never
end.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support import bundle, ledger, session

TIMEOUT_S = 90.0
_numbers = itertools.count(1)


class Result:
    """Exit code and output of a command."""

    def __init__(self, command: Sequence[str], code: int, out: str, err: str) -> None:
        self.command = command
        self.code = code
        self.out = out
        self.err = err

    def ok(self) -> Result:
        """Assert that the exit code is 0; return this result."""
        assert self.code == 0, self
        return self

    def fails(self, words: str = "", code: int = 1) -> Result:
        """Assert that the command failed with this exit code and with `words` in its error output
        (in any case); return this result."""
        assert self.code == code, self
        assert words.lower() in self.err.lower(), self
        return self

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def __repr__(self) -> str:
        return f"{' '.join(self.command)} -> {self.code}\n--- out\n{self.out}\n--- err\n{self.err}"


class Runtime:
    """Runs the program with a separate state folder."""

    def __init__(self, folder: Path, rootfs: Path) -> None:
        self.program, self.folder, self.rootfs = bundle.runtime(), folder, rootfs
        self.root = folder / "state"
        self.ids: list[str] = []

    @property
    def is_pyrunc(self) -> bool:
        return Path(self.program[0]).name == "pyrunc"

    def __call__(
        self,
        *words: str,
        options: Sequence[str] = (),
        stdin: str | bytes | None = None,
        env: dict[str, str] | None = None,
        **more: Any,
    ) -> Result:
        """Run `program --root … OPTIONS WORDS`."""
        command = [*self.program, "--root", str(self.root), *options, *words]
        number = next(_numbers)
        out, err = self.folder / f"{number}.out", self.folder / f"{number}.err"
        with open(out, "wb") as to_out, open(err, "wb") as to_err:
            child = subprocess.run(
                command,
                stdout=to_out,
                stderr=to_err,
                timeout=TIMEOUT_S,
                env=os.environ | env if env is not None else None,
                check=False,
                **(
                    {"stdin": subprocess.DEVNULL}
                    if stdin is None
                    else {"input": stdin if isinstance(stdin, bytes) else stdin.encode()}
                ),
                **more,
            )
        return Result(
            command, child.returncode, out.read_bytes().decode("utf-8", "replace"),
            err.read_bytes().decode("utf-8", "replace")
        )  # fmt: skip

    def command(self, *words: str) -> list[str]:
        """Return the command line of `program --root … WORDS`."""
        return [*self.program, "--root", str(self.root), *words]

    def box(
        self, *args: str, change: Callable[[dict[str, Any]], None] | None = None, **linux: Any
    ) -> Box:
        """Write a container's bundle without calling the runtime. `change` edits the
        configuration."""
        name = f"{session.name('sys')}-{next(_numbers)}"
        config = bundle.configuration(*args, cgroupsPath=f"/{name}", **linux)
        config["root"] = {"path": str(self.rootfs), "readonly": True}
        if change is not None:
            change(config)
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        self.ids.append(name)
        return Box(self, name, folder)

    def run(
        self, *args: str, change: Callable[[dict[str, Any]], None] | None = None, **linux: Any
    ) -> Result:
        """Write a bundle as `box` does, and run its container to its end."""
        box = self.box(*args, change=change, **linux)
        return self("run", "--bundle", str(box.folder), box.id)

    def shell(
        self, script: str, change: Callable[[dict[str, Any]], None] | None = None, **linux: Any
    ) -> Result:
        """Run a shell script in a container; returns its output if it succeeds."""
        return self.run("sh", "-c", script, change=change, **linux).ok()

    def clean_up(self) -> None:
        """Delete the remaining containers. Fail if any state is left."""
        for name in [name for name in self.ids if (self.root / name).exists()]:
            self("kill", "--all", name, "KILL")
            reap_killed(name)
            self("delete", "--force", name)
        reap()
        left = sorted(os.listdir(self.root)) if self.root.exists() else []
        assert not left, f"state left behind: {left}"


class Box:
    """A container, by its id."""

    def __init__(self, runtime: Runtime, name: str, folder: Path) -> None:
        self.runtime, self.id, self.folder = runtime, name, folder

    def create(self, *options: str, **more: Any) -> Result:
        return self.runtime("create", "--bundle", str(self.folder), *options, self.id, **more)

    def start(self) -> Result:
        return self.runtime("start", self.id)

    def up(self) -> Box:
        """Create and start the container."""
        self.create().ok()
        self.start().ok()
        return self

    def exec(self, *words: str, options: Sequence[str] = (), **more: Any) -> Result:
        return self.runtime("exec", *options, self.id, *words, **more)

    def kill(self, *words: str) -> Result:
        return self.runtime("kill", self.id, *words)

    def delete(self, *options: str) -> Result:
        return self.runtime("delete", *options, self.id)

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.runtime("state", self.id).ok().json
        return state

    @property
    def status(self) -> str:
        return str(self.state["status"])

    @property
    def pid(self) -> int:
        return int(self.state["pid"])

    def gone(self) -> None:
        """Wait until the program has ended."""
        eventually(lambda: self.status == "stopped")


def reap(wait_s: float = 0.0) -> None:
    """Take the exit status of every dead child, and wait a moment for those that are about to
    die."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid and time.monotonic() > deadline:
            return
        if not pid:
            time.sleep(0.02)


def reap_killed(container_id: str, timeout_s: float = 20.0) -> None:
    """Take the exit status of all our children in a killed container."""

    def is_in_container(child: str) -> bool:
        pid, *_ = child.split()
        try:
            return container_id in Path(f"/proc/{pid}/cgroup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    # Until an exec, our child, is reaped, the init of its pid namespace does not end (Linux,
    # zap_pid_ns_processes()).
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        reap()
        if not any(map(is_in_container, ledger.children())):
            return
        time.sleep(0.01)


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until `condition` holds; fails when the time is up."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
