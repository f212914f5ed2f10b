"""Provides a machine in namespaces, with a shell, for programs that install a cluster. What they
write below /etc, /var/lib and other folders goes to a folder of the test."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.support.cluster_node import Node
from tests.support.processes import installed


class Machine:
    """A machine in namespaces.

    - `written`: folders of the machine; files that are written below them go to `folder`.
    - `name`: the name of its network namespace and of its pods' cgroup.
    - `programs`: folders that come first in the PATH of its processes.
    """

    def __init__(
        self, folder: Path, name: str, written: Iterable[str], programs: Iterable[str | Path]
    ) -> None:
        self.folder = folder
        self.node = Node(folder / "node", name)
        self.node.pods_group = f"/{name}"
        self._folders = tuple(written)
        self._path = ":".join([*map(str, programs), os.environ["PATH"]])

    def begin(self) -> None:
        """Make the namespaces, and an overlay over each folder that is written to."""
        self.node.make_network()
        self.node.make_mounts(())
        for place in self._folders:
            upper, work = self.written(place), self.folder / "work" / place.strip("/")
            upper.mkdir(parents=True)
            work.mkdir(parents=True)
            self.types(
                f"mount -t overlay -o lowerdir={place},upperdir={upper},workdir={work} overlay "
                f"{place}"
            )
        self.types("echo 1 >/proc/sys/net/ipv4/ip_forward")

    def serve(self, archives: Iterable[Path], network: Mapping[str, Any] | None = None) -> None:
        """Start pyrunc's server, and load the image `archives`, which it would otherwise pull."""
        self.node.write_configuration(network)
        self.node.start_server()
        for archive in archives:
            self.cri("load", str(archive))

    def written(self, place: str) -> Path:
        """Return the folder on the host with the files that were written below `place` on the
        machine."""
        return self.folder / "written" / place.strip("/")

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs `command` on the machine, with its PATH."""
        return self.node.inside("env", f"PATH={self._path}", *command)

    def types(self, command: str) -> str:
        """Run a shell command on the machine; return its output. Raises AssertionError when it
        fails."""
        done = subprocess.run(
            self.inside("sh", "-ec", command), capture_output=True, text=True, check=False
        )
        assert not done.returncode, (
            f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def cri(self, *words: str) -> str:
        """Run `pyrunc-cri` on the machine."""
        command = [*installed("pyrunc-cri"), "--address", f"unix://{self.node.socket}", *words]
        return self.types(shlex.join(command))
