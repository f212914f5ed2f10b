"""Tests that a keeper, built with the compiler's sanitizers, answers hostile bytes or hangs up, and
goes on."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.keeper import client
from pyrunc.keeper.client import MESSAGE, Keeper, ensure
from tests.support.keeper import end_keeper, keeper_pid

SOURCE = Path(__file__).parents[3] / "pause" / "keeper.c"
MESSAGES = 10_000
NAMES = [b"", b"a", b"b/c", b"b/d", b"x" * 128, b"x" * 129, b"bad name", b"\xff\0"]


@pytest.fixture
def sanitized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    """Builds the keeper with sanitizers, or the ordinary program if the compiler has none."""
    program, folder = tmp_path / "keeper", tmp_path / "run"
    command = [
        "cc",
        "-std=c11",
        "-O1",
        "-g",
        "-DHOSTED",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ]
    built = subprocess.run(
        [*command, str(SOURCE), "-o", str(program)], capture_output=True, check=False
    )
    if built.returncode == 0:
        monkeypatch.setattr(client, "PROGRAM", str(program))
        monkeypatch.setenv("ASAN_OPTIONS", f"log_path={tmp_path}/report:detect_leaks=0")
        monkeypatch.setenv("UBSAN_OPTIONS", f"log_path={tmp_path}/report:print_stacktrace=1")
    folder.mkdir()
    keeper = ensure(folder)
    yield keeper
    keeper.close()
    end_keeper(folder)


def hostile(chance: random.Random) -> bytes:
    """Returns a request that is invalid in some part, or a valid one."""
    name, data = chance.choice(NAMES), chance.randbytes(chance.choice([0, 1, 7, 40, 600, 9000]))
    call = chance.choice([*range(10), chance.getrandbits(16)])
    count = chance.choice([0, 1, 2, chance.getrandbits(32)])
    if call == client.START:
        data = chance.choice(
            [b"", data, bytes(8), b"/nothing\0x\0", b"/nothing\0" * chance.randrange(5000)]
        )
    size = chance.choice([len(name)] * 8 + [0, len(name) + 1, chance.getrandbits(32), 2**32 - 1])
    pid, status = chance.getrandbits(31), -chance.getrandbits(31)
    times = chance.getrandbits(64), chance.getrandbits(64)
    packet = (
        MESSAGE.pack(chance.choice([1] * 9 + [2]), call, size, 0, pid, status, count, *times)
        + name
        + data
    )
    shape = chance.randrange(20)
    if shape == 0:
        return packet[: chance.randrange(len(packet) + 1)]
    if shape == 1:
        return chance.randbytes(chance.randrange(200))
    return packet


def read_answers(connection: socket.socket) -> None:
    """Returns the replies that have arrived, with their descriptors. Raises OSError when the keeper
    has closed the connection."""
    while select.select([connection], [], [], 0.0005)[0]:
        answer, received, _, _ = socket.recv_fds(connection, client.MESSAGE_LIMIT_BYTES, 64)
        for fd in received:
            os.close(fd)
        if not answer:
            raise ConnectionResetError


def test_the_keeper_survives_hostile_bytes(sanitized: Keeper, tmp_path: Path) -> None:
    seed = int(os.environ.get("PYRUNC_FUZZ_SEED", "20261126"))
    chance, folder = random.Random(seed), Path(sanitized.folder)
    pid = keeper_pid(folder)
    fds = [0, 1, *os.pipe2(os.O_CLOEXEC)]
    with contextlib.ExitStack() as stack:
        connections: list[socket.socket] = []
        for _ in range(MESSAGES):
            if len(connections) < 8 or chance.randrange(50) == 0:
                connection = stack.enter_context(
                    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                )
                connection.settimeout(10)
                connection.connect(str(folder / client.SOCKET))
                connections.append(connection)
            connection = chance.choice(connections)
            sent_fds = [
                chance.choice(fds) for _ in range(chance.choice([0, 0, 0, 1, 3, 32, 33, 253]))
            ]
            try:
                socket.send_fds(connection, [hostile(chance)], sent_fds)
                if chance.randrange(4):
                    read_answers(connection)
            except OSError:
                connection.close()
            if connection.fileno() < 0 or chance.randrange(200) == 0:
                connection.close()
                connections.remove(connection)
        reports = [path.read_text() for path in tmp_path.glob("report*")]
        assert not reports and keeper_pid(folder) == pid, f"seed {seed}: {reports}"
    for fd in fds[2:]:
        os.close(fd)
    for name in sanitized.names():
        sanitized.drop(name)
    assert sanitized.hello() == pid and sanitized.names() == []
    assert len(os.listdir(f"/proc/{pid}/fd")) < 20, "descriptors were lost"
