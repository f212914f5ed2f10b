"""Attacks on the runtime by the process that it starts, over the launcher's socket
(CVE-2021-43784's family).

After pivot_root the process runs in the container, where a neighbour with CAP_SYS_PTRACE could
control it. Here a program that sends the test's messages on the launcher's socket replaces the
launcher.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.errors import Error
from pyrunc.launch.model import Launch
from pyrunc.launch.run import launch as start
from pyrunc.plan import model
from pyrunc.plan.lower import lower
from pyrunc.program import launch
from pyrunc.program.model import (
    DESCRIPTOR,
    FAILURE,
    LISTENER,
    PID,
    PROGRESS,
    READY,
    REFUSED,
    STATUS,
)
from pyrunc.undo import Undo

SAY = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
/* Reads frames from descriptor 0: a byte for the number of descriptors to pass, a byte for the \
length, and that many bytes. */
int main(int argc, char **argv)
{
	int sync = atoi(argv[1]);
	unsigned char head[2], body[256];
	while (read(0, head, 2) == 2 && read(0, body, head[1]) == head[1]) {
		union { char space[CMSG_SPACE(16 * sizeof(int))]; struct cmsghdr align; } control;
		struct iovec part = { body, head[1] };
		struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
		if (head[0]) {
			int fds[16];
			for (int i = 0; i < head[0] && i < 16; i++)
				fds[i] = 0;
			message.msg_control = control.space;
			message.msg_controllen = CMSG_SPACE(head[0] * sizeof(int));
			struct cmsghdr *c = CMSG_FIRSTHDR(&message);
			c->cmsg_level = SOL_SOCKET;
			c->cmsg_type = SCM_RIGHTS;
			c->cmsg_len = CMSG_LEN(head[0] * sizeof(int));
			memcpy(CMSG_DATA(c), fds, head[0] * sizeof(int));
		}
		sendmsg(sync, &message, MSG_NOSIGNAL);
	}
	return argc < 0;
}
"""


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("liar")
    (folder / "say.c").write_text(SAY)
    subprocess.run(["gcc", "-O1", "-static", "-o", folder / "say", folder / "say.c"], check=True)
    return folder / "say"


@pytest.fixture(autouse=True)
def lying(liar: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the launcher by the hostile program."""
    number = os.open(liar, os.O_RDONLY)
    status = os.fstat(number)
    monkeypatch.setattr(launch, "_executable", (number, status.st_dev, status.st_ino))
    yield
    os.close(number)


def frame(tag: int, value: int = 0, extra: int = 0, *, op: int = 0, fds: int = 0) -> bytes:
    return bytes((fds, 24)) + struct.pack("<IIqq", tag & 0xFFFFFFFF, op & 0xFFFFFFFF, value, extra)


def answer_to(frames: bytes) -> str:
    """Return the runtime's error after these frames of the launcher, or `believed` if it accepts
    them."""
    reading, writing = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(writing, frames), os.close(writing)))
    plan = model.Plan(
        (model.Prepare(), model.Clone((), False), model.Ready(), model.Execute(("true",), ())), ()
    )
    try:
        with Undo() as undo, open("/dev/null", "w") as null:
            writer.start()
            out = null.fileno()
            start(Launch(lower(plan), {}, (reading, out, out), ("true",)), undo)
    except Error as error:
        return str(error)
    except (KeyError, IndexError, ValueError, OSError, AssertionError) as error:
        return f"not ours: {type(error).__name__}: {error}"
    finally:
        writer.join()
        os.close(reading)
    return "believed"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def stranger() -> Iterator[int]:
    """Return the pid of a process that is not a child of the runtime."""
    # a grandchild, whose parent lives
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        yield pid
        os.kill(pid, signal.SIGKILL)


def test_a_reported_pid_must_be_a_child_of_the_runtime(stranger: int) -> None:
    """The launcher reports the pid of the process that the runtime kills when the start fails. The
    runtime accepts neither a stranger's pid nor 0, -1, 1 or one out of range, and the stranger
    lives."""
    for pid in (stranger, os.getppid(), 0, -1, 1, 2**31, 2**63 - 1, -(2**63), os.getpid()):
        text = answer_to(frame(PID, pid) + frame(READY))
        assert "not a child of this process" in text, (pid, text)
    assert Path(f"/proc/{stranger}/stat").read_text().split(")")[1].split()[0] in "SR"


def test_a_second_report_of_a_pid_is_an_error() -> None:
    """When the launcher reports a child of the runtime twice, the start fails with an error, and
    child and launcher are reaped."""
    child = subprocess.Popen(["sleep", "60"])
    text = answer_to(frame(PID, child.pid) + frame(PID, child.pid))
    assert "two processes" in text or "not a child" in text, text
    child.wait()


def test_any_frames_end_in_an_error_without_leaks() -> None:
    """A false launcher sends random frames: unknown tags, numbers at the limits, wrong lengths, up
    to sixteen descriptors. Each start ends in an error of the runtime, and no descriptor is
    leaked."""
    rng = random.Random(3)
    tags = [
        PID,
        READY,
        DESCRIPTOR,
        PROGRESS,
        LISTENER,
        STATUS,
        FAILURE,
        REFUSED,
        0,
        1,
        77,
        0xFFFFFFF0,
    ]
    values = [0, 1, -1, 3, 5, 255, 2**31, -(2**31), 2**63 - 1, -(2**63), os.getpid()]
    before = descriptors()
    for _ in range(150):
        frames = b""
        for _ in range(rng.randint(0, 4)):
            if rng.random() < 0.2:
                body = rng.randbytes(rng.choice((0, 1, 8, 23, 25, 200)))
                frames += bytes((rng.choice((0, 1, 16)), len(body))) + body
            else:
                frames += frame(
                    rng.choice(tags),
                    rng.choice(values),
                    rng.choice(values),
                    op=rng.choice((0, 1, 5, 2**31)),
                    fds=rng.choice((0, 0, 1, 2, 16)),
                )
        text = answer_to(frames)
        assert text != "believed" and not text.startswith("not ours"), (text, frames)
        assert descriptors() == before, (text, frames)
