"""Starts and stops `pyrunc-cri serve` in a chroot, as its systemd unit would."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.support import chroot
from tests.support.processes import wait_until


class Server:
    def __init__(self, machine: chroot.Machine) -> None:
        self.machine = machine
        command = [*machine.enter(), "exec pyrunc-cri serve"]
        self.log = machine.root / "root/server.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, env=chroot.ENVIRONMENT, stderr=log, stdin=subprocess.DEVNULL
            )
        ready = wait_until(self._has_answered_or_ended, 60)
        assert ready and self.process.poll() is None, self.log.read_text()

    def _has_answered_or_ended(self) -> bool:
        answered = self.machine.run("pyrunc-cri pods", check=False).returncode == 0
        return answered or self.process.poll() is not None

    def stop(self) -> None:
        """Stop the server like `systemctl stop` with KillMode=process."""
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        for pid in children or [self.process.pid]:
            os.kill(int(pid), signal.SIGTERM)
        # nsenter waits for the server that it started.
        self.process.wait(30)
        self.log.unlink(missing_ok=True)
