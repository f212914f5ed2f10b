"""Runs a detached container by `pyrunc`, and reads its cgroup."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.support import bundle

MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")


class DetachedContainer:
    """A container in `folder`, with its cgroup `group`. `options`: global options of the runtime;
    `cgroups_path`: `cgroupsPath` of the configuration."""

    def __init__(
        self, folder: Path, identifier: str, cgroups_path: str, options: tuple[str, ...] = ()
    ) -> None:
        self.id, self.folder = identifier, folder
        self._cgroups_path, self._options = cgroups_path, options

    def pyrunc(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of the runtime, and return its output."""
        state = str(self.folder / "state")
        # Into files, because the container keeps its output open.
        with open(self.folder / "out", "w+") as out, open(self.folder / "err", "w+") as err:
            ended = subprocess.run(
                [*bundle.runtime(), *self._options, "--root", state, *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, check=False, timeout=120,
            )  # fmt: skip
            out.seek(0)
            err.seek(0)
            done = subprocess.CompletedProcess(ended.args, ended.returncode, out.read(), err.read())
        assert not check or done.returncode == 0, (
            f"pyrunc {arguments}: {done.returncode}: {done.stderr}"
        )
        return done

    def start(
        self,
        *command: str,
        resources: dict[str, Any] | None = None,
        annotations: dict[str, str] | None = None,
    ) -> None:
        """Start the container, which runs `command`, in the background."""
        config = bundle.configuration(
            *command, resources=resources or {}, cgroupsPath=self._cgroups_path
        )
        config["annotations"] = annotations or {}
        bundle.make(self.folder / "bundle", config)
        self.pyrunc("run", "-d", "--bundle", str(self.folder / "bundle"), self.id)

    @property
    def pid(self) -> int:
        return int(json.loads(self.pyrunc("state", self.id).stdout)["pid"])

    @property
    def group(self) -> Path:
        line = Path(f"/proc/{self.pid}/cgroup").read_text().strip()
        return CGROUPS / line.removeprefix("0::/")

    def read(self, file: str) -> str:
        return (self.group / file).read_text().strip()

    def sh(self, script: str) -> subprocess.CompletedProcess[str]:
        return self.pyrunc("exec", self.id, "sh", "-c", script, check=False)
