"""Prepares engines: podman's configuration, and an image from a busybox root."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support import bundle
from tests.vm.oci import commands
from tests.vm.oci.commands import User

IMAGE = "localhost/box"
CONFIGURATION = f"""[engine]
runtime = "pyrunc"
runtime_supports_json = ["pyrunc"]
runtime_supports_nocgroup = ["pyrunc"]
[engine.runtimes]
pyrunc = ["{commands.PYRUNC}"]
[network]
default_rootless_network_cmd = "pasta"
"""


class Podman:
    """Runs podman with our runtime, for one user."""

    def __init__(self, user: User, *options: str) -> None:
        self.user, self._options = user, options

    def __call__(
        self, *arguments: str, check: bool = True, terminal: bool = False
    ) -> commands.Done:
        command = ("podman", *self._options, *arguments)
        return self.user.run(*command, check=check, terminal=terminal, timeout_s=240)

    def output(self, *arguments: str) -> str:
        return self(*arguments).stdout.strip()

    def run(self, *arguments: str) -> str:
        """Run `podman run --rm` without a network, of our image; return its output."""
        return self.output("run", "--rm", "--network", "none", *arguments)

    def start(self, name: str, *options: str) -> None:
        """Start the container `name` without a network. At SIGTERM it exits with 5."""
        script = "trap 'exit 5' TERM; while :; do sleep 0.2; done"
        self(
            *("run", "-d", "--name", name, "--network", "none"), *options,
            *(IMAGE, "sh", "-c", script)
        )  # fmt: skip

    def pid(self, name: str) -> int:
        return int(self.output("inspect", name, "--format", "{{.State.Pid}}"))

    def group(self, name: str) -> Path:
        line = Path(f"/proc/{self.pid(name)}/cgroup").read_text().strip()
        return commands.CGROUPS / line.removeprefix("0::/")


def configure() -> None:
    """Make our runtime podman's first choice; Debian's crun stays unused."""
    Path("/etc/containers/containers.conf").write_text(CONFIGURATION)


def box(folder: Path) -> Path:
    """Return a tar archive of a busybox root that every user may read."""
    root = bundle.make_root(folder / "box")
    for name in ("tmp", "root"):
        (root / name).chmod(0o1777 if name == "tmp" else 0o700)
    archive = Path("/tmp/box.tar")
    subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
    return archive
