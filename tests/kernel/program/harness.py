"""Runs the real launcher, of this machine or of arm64 under qemu-user, with programs as bytes, also
with bytes that no assembler makes."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pyrunc.kernel.fd import open_memfd
from pyrunc.program.launch import LAUNCHER, MESSAGE
from pyrunc.program.model import Program

ROOT = Path(__file__).parents[3]
NATIVE = platform.machine()
MACHINES = sorted({NATIVE, "aarch64"})
SYNC = 700  # where the socket is in the launcher; the program is one above


def program_of(name: str, machine: str) -> list[str]:
    """Return the command that runs our static program `name` for the architecture `machine`."""
    if machine == NATIVE:
        return [str(Path(LAUNCHER).parent / name)]
    if not shutil.which("qemu-aarch64-static") or not shutil.which("aarch64-linux-gnu-gcc"):
        pytest.skip("no qemu-aarch64-static or aarch64-linux-gnu-gcc")
    subprocess.run(["make", "-s", "-C", str(ROOT / "pause"), "arm64"], check=True)
    return ["qemu-aarch64-static", str(ROOT / "pause/build/aarch64" / name)]


@dataclass
class Ended:
    """A launcher's messages and exit status (negative: the signal that ended it)."""

    status: int
    messages: list[tuple[int, int, int, int]] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    output: bytes = b""

    @property
    def values(self) -> list[tuple[int, int]]:
        """Return the numbers of each message."""
        return [(value, extra) for _, _, value, extra in self.messages]


class Launched:
    """A running launcher; `end` collects its messages."""

    def __init__(
        self, encoded: bytes | Program, machine: str, arguments: Sequence[str] | None = None
    ) -> None:
        raw = encoded.encoded if isinstance(encoded, Program) else encoded
        command = program_of("launcher", machine)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        image = open_memfd("test program", raw)
        # Two numbers that follow each other and are free here too.
        sync = fcntl.fcntl(theirs, fcntl.F_DUPFD, SYNC)
        program = fcntl.fcntl(image, fcntl.F_DUPFD, sync + 1)
        assert program == sync + 1
        theirs.close()
        os.close(image)
        try:
            self.process = subprocess.Popen(
                [*command, *([str(sync)] if arguments is None else arguments)],
                pass_fds=(sync, program),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        finally:
            os.close(sync)
            os.close(program)

    def receive(self) -> tuple[tuple[int, int, int, int] | None, list[int]]:
        """Return one message with its descriptors; None at the end."""
        try:
            packet, fds, _, _ = socket.recv_fds(self.socket, MESSAGE.size, 8)
        except ConnectionResetError:
            return None, []
        return (MESSAGE.unpack(packet), fds) if packet else (None, fds)

    def release(self, byte: int = 1) -> None:
        """Send the byte for which the program waits."""
        self.socket.send(bytes([byte]))

    def end(self) -> Ended:
        """Collect everything until the launcher has ended."""
        ended = Ended(0)
        self.socket.settimeout(60)
        while True:
            message, fds = self.receive()
            ended.fds += fds
            if message is None:
                break
            ended.messages.append(message)
        self.socket.close()
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            ended.output = stdout.read()
        ended.status = self.process.wait(timeout=60)
        return ended


def run(
    encoded: bytes | Program, machine: str = NATIVE, *, arguments: Sequence[str] | None = None
) -> Ended:
    """Run a program that needs no answers."""
    return Launched(encoded, machine, arguments).end()
