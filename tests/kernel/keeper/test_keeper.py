"""Tests the keeper with real processes: stored entries, started and reaped processes, and the ends
of processes that the keeper survives."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from errno import EINVAL, EMSGSIZE, ENOENT, ENOSPC, ENOSYS, EPROTO
from pathlib import Path

import pytest

from pyrunc.errors import KernelError, Unavailable, Unsupported
from pyrunc.keeper import client
from pyrunc.keeper.client import MESSAGE, Keeper, NoKeeper, ensure
from pyrunc.kernel.process import alive_since
from pyrunc.kernel.process import stat as stat_of
from tests.support.keeper import end_keeper, is_gone, keeper_pid
from tests.support.processes import wait_until


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe2(os.O_CLOEXEC)
    try:
        yield ends
    finally:
        for fd in ends:
            with contextlib.suppress(OSError):
                os.close(fd)


def connected(folder: Path) -> socket.socket:
    """Returns a connection for requests that no client of ours sends."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    connection.connect(str(folder / client.SOCKET))
    return connection


def message(
    call: int, name: bytes = b"", data: bytes = b"", version: int = client.VERSION
) -> bytes:
    return MESSAGE.pack(version, call, len(name), 0, 0, 0, 0, 0, 0) + name + data


def error_of(connection: socket.socket, packet: bytes) -> int:
    connection.send(packet)
    return int(MESSAGE.unpack_from(connection.recv(client.MESSAGE_LIMIT_BYTES))[3])


# -- the store


def test_an_entry_outlives_its_owner(keeper: Keeper) -> None:
    with pipe() as (reading, writing):
        keeper.put("container/a", b"record", [reading, writing])
        os.write(writing, b"kept")
    keeper.close()
    stored = Keeper(keeper.folder).get("container/a")
    assert stored is not None and stored.data == b"record"
    assert os.read(stored.fds[0], 10) == b"kept" and not os.get_inheritable(stored.fds[0])
    for fd in stored.fds:
        os.close(fd)


def test_an_entry_is_replaced_and_dropped_with_its_descriptors(keeper: Keeper) -> None:
    with pipe() as (reading, writing):
        keeper.put("a", b"1", [writing])
        os.close(writing)
        assert not select.select([reading], [], [], 0)[0]
        keeper.put("a", b"2")
        assert select.select([reading], [], [], 10)[0] and os.read(reading, 1) == b""
    stored = keeper.get("a")
    assert stored is not None and (stored.data, stored.fds) == (b"2", [])
    keeper.drop("a")
    keeper.drop("a")
    assert keeper.get("a") is None


def test_entries_of_all_sizes_survive_their_neighbours_ends(keeper: Keeper) -> None:
    contents = {f"e/{n}": bytes([n]) * (n * n) for n in range(60)}
    for name, content in contents.items():
        keeper.put(name, content)
    for name in list(contents)[::3]:
        keeper.drop(name)
        del contents[name]
    for name in list(contents)[::5]:
        contents[name] = b"again" + contents[name]
        keeper.put(name, contents[name])
    assert sorted(keeper.names("e/")) == sorted(contents)
    for name, content in contents.items():
        stored = keeper.get(name)
        assert stored is not None and stored.data == content


def test_names_are_listed_in_pages_and_by_prefix(keeper: Keeper) -> None:
    names = [f"{kind}/{n:0100}" for kind in ("pod", "container") for n in range(1500)]
    for name in names:
        keeper.put(name, b"")
    assert sorted(keeper.names()) == sorted(names)
    assert sorted(keeper.names("pod/")) == sorted(names[:1500])
    assert keeper.names("nothing") == []


def test_a_full_store_refuses_entries_and_continues(keeper: Keeper) -> None:
    stored = 0
    with pytest.raises(KernelError) as refused:
        for stored in range(100):
            keeper.put(f"big/{stored}", b"x" * 120_000)
    assert refused.value.errno == ENOSPC and stored > 50
    keeper.drop("big/0")
    keeper.put(f"big/{stored}", b"y" * 120_000)
    with pytest.raises(KernelError):
        keeper.put("big/0", b"x" * 120_000)


def test_the_keeper_limits_the_number_of_entries(keeper: Keeper) -> None:
    with pytest.raises(KernelError) as refused:
        for number in range(10_000):
            keeper.put(f"{number}", b"")
    assert refused.value.errno == ENOSPC and len(keeper.names()) == 8192
    keeper.put("1", b"replaced")


@pytest.mark.parametrize("name", ["", "a b", "a\n", "\0", "ä", "a" * 129])
def test_invalid_names_are_refused(keeper: Keeper, name: str) -> None:
    with pytest.raises(KernelError) as refused:
        keeper.put(name, b"")
    assert refused.value.errno == EINVAL and keeper.names() == []


# -- without waiting


def test_a_posted_call_outlives_its_sender(keeper: Keeper, tmp_path: Path) -> None:
    """Entries that a client has posted are stored although the client exits before the keeper reads
    them."""
    pid = keeper.hello()
    sender = Keeper(tmp_path)
    sender.hello()
    # The keeper reads nothing until the sender is gone.
    os.kill(pid, signal.SIGSTOP)
    try:
        with pipe() as (reading, _):
            for number in range(10):
                sender.post_put(f"a/{number}", b"posted", [reading])
        sender.post_drop("a/9")
        sender.post_note(5, 6, 7)
        sender.close()
        asker = Keeper(tmp_path)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(asker.names)
            time.sleep(0.2)
            os.kill(pid, signal.SIGCONT)
            assert sorted(reply.result(10)) == [f"a/{number}" for number in range(9)]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (ended := asker.exit_of(5, 6)) is not None and ended.status == 7
    asker.close()


def test_only_refused_posts_are_answered(keeper: Keeper) -> None:
    keeper.post_put("a", b"")
    keeper.post_drop("unknown")
    keeper.post_put("bad name", b"")
    assert keeper.names() == ["a"]
    keeper.post_put("", b"")
    assert wait_until(lambda: select.select([keeper], [], [], 0)[0], 10)
    assert keeper.collect() == [EINVAL, EINVAL]


def test_a_post_that_cannot_be_sent_is_an_error_at_once(keeper: Keeper) -> None:
    pid = keeper.hello()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable):
            for number in range(10_000):
                keeper.post_put(f"a/{number}", bytes(1000))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert keeper.hello() == pid


# -- what it starts and reaps


def started(keeper: Keeper, script: str, **environment: str) -> tuple[int, int, int]:
    """Starts a shell under the keeper; returns its pid, its pidfd and a pipe from its descriptor
    5."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        pid, pidfd = keeper.start(
            ["/bin/sh", "-c", script], {"PATH": "/bin:/usr/bin", **environment}, {5: writing}
        )
    finally:
        os.close(writing)
    return pid, pidfd, reading


def output(reading: int) -> str:
    with open(reading, "rb") as file:
        return file.read().decode()


def test_a_started_program_inherits_only_the_passed_descriptors_and_environment(
    keeper: Keeper,
) -> None:
    keeper.put("other", b"", [0])
    script = (
        "ls /proc/self/fd >&5; grep -E '^Sig(Blk|Ign)' /proc/self/status >&5; echo $GIVEN $PWD >&5;"
        " ps -o sid= $$ >&5"
    )
    pid, pidfd, reading = started(keeper, script, GIVEN="this")
    words = output(reading).split()
    os.close(pidfd)
    # 3 is the folder that ls reads
    assert words == [
        "0",
        "1",
        "2",
        "3",
        "5",
        "SigBlk:",
        "0" * 16,
        "SigIgn:",
        "0" * 16,
        "this",
        "/",
        str(pid),
    ]


def test_descriptors_may_exchange_their_numbers(keeper: Keeper) -> None:
    with pipe() as (one_reading, one), pipe() as (other_reading, other):
        _, pidfd = keeper.start(
            ["/bin/sh", "-c", f"cd /proc/self/fd; echo one >{other}; echo other >{one}"],
            {},
            {one: other, other: one},
        )
        os.close(pidfd)
        os.close(one)
        os.close(other)
        assert os.read(one_reading, 10) == b"one\n" and os.read(other_reading, 10) == b"other\n"


def test_a_missing_program_ends_with_exit_code_127(keeper: Keeper) -> None:
    _, pidfd = keeper.start(["/nothing/here"], {}, {})
    assert select.select([pidfd], [], [], 10)[0]
    os.close(pidfd)


@pytest.mark.parametrize(
    ("script", "code"), [("exit 42", 42), ("exit 0", 0), ("kill -9 $$", -9), ("kill -6 $$", -6)]
)
def test_an_orphans_exit_is_recorded_by_pid_and_start_time(
    keeper: Keeper, script: str, code: int
) -> None:
    """When a child of the keeper is killed, the keeper records the exit of the orphan that the
    child leaves, even if the orphan is in another session."""
    # The shell stands for a shim. When it is killed, its child becomes the keeper's.
    inner = f"setsid sh -c 'echo $$ >&5; read line <&6; {script}'"
    with pipe() as (waiting, go):
        reading, writing = os.pipe2(os.O_CLOEXEC)
        _, pidfd = keeper.start(
            ["/bin/sh", "-c", f"{inner} & wait"],
            {"PATH": "/bin:/usr/bin"},
            {5: writing, 6: waiting},
        )
        os.close(writing)
        orphan = int(os.read(reading, 20))
        stat = stat_of(orphan)
        assert stat is not None and keeper.exit_of(orphan, stat.start_time) is None
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert wait_until(
            lambda: (now := stat_of(orphan)) is not None and now.parent == keeper.hello(), 10
        )
        os.write(go, b"\n")
        assert wait_until(lambda: stat_of(orphan) is None, 10)
        ended = keeper.exit_of(orphan, stat.start_time)
        assert ended is not None and os.waitstatus_to_exitcode(ended.status) == code
        assert abs(time.time_ns() - ended.time_ns) < 10**10
        assert keeper.exit_of(orphan, stat.start_time + 1) is None
        os.close(reading)
        os.close(pidfd)


def test_exit_records_are_a_ring(keeper: Keeper) -> None:
    for number in range(1, 5000):
        keeper.post_note(number, 7, number % 256 << 8)
        if number % 50 == 0:
            keeper.hello()  # waits until the keeper has read the notes
    assert keeper.exit_of(1, 7) is None
    ended = keeper.exit_of(4999, 7)
    assert ended is not None and os.waitstatus_to_exitcode(ended.status) == 4999 % 256
    keeper.post_note(4999, 7, 0)
    assert (again := keeper.exit_of(4999, 7)) is not None and again.status == ended.status


# -- who may speak, and who cannot stop it


def test_only_root_may_connect(keeper: Keeper, tmp_path: Path) -> None:
    path = tmp_path / client.SOCKET
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o666)  # what is behind the mode
    folder = os.open(tmp_path, os.O_PATH)
    script = (
        "import os, socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        f" os.setuid(65534);s.connect('/proc/self/fd/{folder}/{client.SOCKET}');"
        " s.settimeout(5)\ntry:\n s.send(bytes(40)); print(s.recv(100))\nexcept OSError as error:"
        " print('refused', error.errno)"
    )
    for parent in [tmp_path, *tmp_path.parents]:
        if str(parent).count("/") > 1 and parent.owner() == "root":
            parent.chmod(0o711)
    ended = subprocess.run(
        ["python3", "-c", script], pass_fds=[folder], capture_output=True, text=True, check=False
    )
    os.close(folder)
    assert "refused" in ended.stdout or ended.stdout == "b''\n", ended


@pytest.mark.parametrize(
    ("packet", "error"),
    [
        (message(99), ENOSYS),
        (message(0), ENOSYS),
        (message(client.HELLO, version=2), EPROTO),
        (message(client.GET, b"unknown"), ENOENT),
        (MESSAGE.pack(1, client.PUT, 2**32 - 1, 0, 0, 0, 0, 0, 0), EINVAL),
        (MESSAGE.pack(1, client.PUT, 5, 0, 0, 0, 0, 0, 0) + b"abcd", EINVAL),
        (message(client.START, b"", b"/bin/true"), EINVAL),
        (message(client.START), EINVAL),
        (message(client.PUT, b"a", bytes(client.MESSAGE_LIMIT_BYTES)), EMSGSIZE),
    ],
)
def test_invalid_requests_are_refused(
    keeper: Keeper, tmp_path: Path, packet: bytes, error: int
) -> None:
    with connected(tmp_path) as connection:
        assert error_of(connection, packet) == error
        assert error_of(connection, message(client.HELLO)) == 0, "the connection goes on"


def test_an_invalid_message_ends_its_connection_only(keeper: Keeper, tmp_path: Path) -> None:
    with connected(tmp_path) as connection:
        connection.send(b"GET / HTTP/1.1\r\n")
        assert connection.recv(100) == b""
    assert keeper.hello() == keeper_pid(tmp_path)


def test_too_many_descriptors_are_closed(keeper: Keeper, tmp_path: Path) -> None:
    with pipe() as (reading, writing), connected(tmp_path) as connection:
        socket.send_fds(connection, [message(client.PUT, b"a")], [writing] * 250)
        os.close(writing)
        assert MESSAGE.unpack_from(connection.recv(100))[3] == EINVAL
        assert select.select([reading], [], [], 10)[0]


def test_a_client_that_does_not_read_is_dropped(keeper: Keeper, tmp_path: Path) -> None:
    keeper.put("big", b"x" * 100_000)
    with connected(tmp_path) as connection, pytest.raises(OSError):
        for _ in range(10_000):
            connection.send(message(client.GET, b"big"))
    started = time.monotonic()
    keeper.hello()
    assert time.monotonic() - started < 1


def test_idle_clients_make_room_for_others(keeper: Keeper, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        pid = keeper.hello()
        for _ in range(600):
            connection = stack.enter_context(connected(tmp_path))
            assert error_of(connection, message(client.HELLO)) == 0
        assert keeper.hello() == pid, "it has connected again"


def test_a_keeper_that_is_stopped_costs_a_bounded_wait(keeper: Keeper, tmp_path: Path) -> None:
    pid, impatient = keeper.hello(), Keeper(tmp_path, timeout_s=0.1)
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(100):
            with pytest.raises(Unavailable):
                impatient.hello()
    finally:
        os.kill(pid, signal.SIGCONT)
        impatient.close()
    assert keeper.hello() == pid


# -- its life


def test_a_missing_keeper_and_a_lost_keeper_are_different_errors(
    keeper: Keeper, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoKeeper, match=f"^no keeper was started in {tmp_path}/empty$"):
        Keeper(tmp_path / "empty").names()
    end_keeper(tmp_path, signal.SIGKILL)
    with pytest.raises(Unavailable, match=r"failed: Connection refused$") as lost:
        Keeper(tmp_path).names()
    assert not isinstance(lost.value, NoKeeper)


def test_a_folder_has_one_keeper(keeper: Keeper, tmp_path: Path) -> None:
    assert client._spawn(str(tmp_path)) == client.LOCKED
    other = ensure(tmp_path)
    assert other.hello() == keeper.hello() == keeper_pid(tmp_path)
    other.close()


def test_a_terminals_signals_do_not_end_the_keeper(keeper: Keeper, tmp_path: Path) -> None:
    pid = keeper.hello()
    for number in (
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTSTP,
        signal.SIGPIPE,
        signal.SIGUSR1,
    ):
        os.kill(pid, number)
    assert keeper.hello() == pid
    assert Path(f"/proc/{pid}/comm").read_text() == "pyrunc-keeper\n" and os.getsid(pid) == pid
    end_keeper(tmp_path)
    assert not (tmp_path / client.SOCKET).exists()


def test_a_killed_keeper_is_replaced(keeper: Keeper, tmp_path: Path) -> None:
    pid = keeper.hello()
    keeper.put("a", b"")
    end_keeper(tmp_path, signal.SIGKILL)
    with pytest.raises(Unavailable):
        keeper.hello()
    other = ensure(tmp_path)
    assert keeper.hello() == other.hello() != pid
    assert keeper.names() == []
    other.close()


def test_a_keeper_ends_when_its_store_is_empty(tmp_path: Path) -> None:
    keeper = ensure(tmp_path)
    pid, pidfd, reading = started(keeper, "exec sleep 100")
    keeper.close()
    time.sleep(5.5)
    assert keeper.hello() == keeper_pid(tmp_path), "it has a child"
    keeper.put("a", b"")
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    keeper.close()
    time.sleep(5.5)
    pid = keeper.hello()
    assert pid == keeper_pid(tmp_path), "it stores something"
    keeper.drop("a")
    time.sleep(5.5)
    assert keeper.hello() == pid, "it has a client"
    keeper.close()
    assert wait_until(lambda: is_gone(pid), 10)
    os.close(pidfd)
    os.close(reading)


def test_a_keeper_of_another_version_is_reported(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "VERSION", 2)
    with pytest.raises(Unsupported, match="version 1, not 2"):
        keeper.hello()


def test_a_keeper_whose_folder_was_removed_ends(keeper: Keeper, tmp_path: Path) -> None:
    """A keeper ends when its folder disappears, as a tmpfs does at a reboot; otherwise it would
    store its entries forever."""
    keeper.put("a", b"content")
    pid = keeper.hello()
    keeper.close()
    time.sleep(6.0)
    assert alive_since(pid) is not None, "another server may come"
    (tmp_path / "keeper.lock").unlink()
    assert wait_until(lambda: alive_since(pid) is None, 30)
