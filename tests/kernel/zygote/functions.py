"""Functions that the zygote tests run: each shows one thing that a child can do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from pyrunc import ipc
from pyrunc.errors import NotFound
from pyrunc.records import Record, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message


class Question(Record):
    """Arguments of the functions in this module; each function uses some of them."""

    say: str = ""
    code: int = 0
    blocks: int = 0
    script: str = ""
    file: str = ""
    text: str = ""


class WhoAreYou(Request):
    """A request to `serve`, which answers its pid."""

    call = "who"


def read(arguments: Message, fds: list[int]) -> None:
    with open(Question.of(arguments).file) as file:
        print(file.read(), end="")


def serve(arguments: Message, fds: list[int]) -> None:
    """Runs a worker that answers each request with its pid."""
    with socket.socket(fileno=fds[0]) as link:
        while (received := ipc.receive(link)) is not None:
            answer = {"pid": os.getpid(), "last": False}
            ipc.send(link, {"id": received[0]["id"], "ok": answer})


def echo(arguments: Message, fds: list[int]) -> int:
    sys.stdout.write(Question.of(arguments).say + sys.stdin.read() + os.environ.get("EXTRA", ""))
    sys.stderr.write("to stderr")
    for fd in fds:
        os.write(fd, b"to a descriptor")
    return Question.of(arguments).code


def descriptors(arguments: Message, fds: list[int]) -> None:
    listing = os.open("/proc/self/fd", os.O_RDONLY)
    print(sorted(int(name) for name in os.listdir(listing) if int(name) != listing))


def hand_over(arguments: Message, fds: list[int]) -> list[int]:
    reading, writing = os.pipe()
    os.write(writing, b"from the job")
    return [reading]


RESULT_SOCKET = 3


def _send_result(message: Message, count: int) -> int:
    """Sends `message` with `count` descriptors on the result socket, in place of the function's
    result."""
    answers = socket.socket(fileno=os.dup(RESULT_SOCKET))
    ipc.send(answers, message, [0] * count)
    return 0


def hand_over_many(arguments: Message, fds: list[int]) -> int:
    return _send_result({"ok": True}, ipc.MOST_FDS)


def hand_over_with_an_error(arguments: Message, fds: list[int]) -> int:
    return _send_result({"error": NotFound("with descriptors").to_fields()}, ipc.MOST_FDS)


def hand_over_nonsense(arguments: Message, fds: list[int]) -> int:
    return _send_result({"ok": "perhaps"}, 1)


def send_memfd(arguments: Message, fds: list[int]) -> int:
    return _send_result({"ok": True, "more": "x" * 100_000}, 0)


def refuse_at_length(arguments: Message, fds: list[int]) -> None:
    raise NotFound("\u20ac" * 100_000)


def refuse(arguments: Message, fds: list[int]) -> None:
    raise NotFound("no such thing")


def crash(arguments: Message, fds: list[int]) -> None:
    raise ZeroDivisionError("a bug")


def leave(arguments: Message, fds: list[int]) -> None:
    sys.exit(7)


def die(arguments: Message, fds: list[int]) -> None:
    os.kill(os.getpid(), 9)


def flood(arguments: Message, fds: list[int]) -> None:
    for _ in range(Question.of(arguments).blocks):
        os.write(1, b"x" * 65536)


def replace(arguments: Message, fds: list[int]) -> None:
    os.execv("/bin/sh", ["sh", "-c", Question.of(arguments).script])


def family(arguments: Message, fds: list[int]) -> None:
    """Starts a child, a grandchild in its own session and a daemonized orphan; writes their pids to
    the file."""
    script = (
        'echo $$ >>"$0"; setsid sh -c \'echo $$ >>"$0"; exec sleep 100\' "$0" & '
        '( setsid sh -c \'echo $$ >>"$0"; exec sleep 100\' "$0" & ) ; sleep 100'
    )
    subprocess.Popen(["sh", "-c", script, Question.of(arguments).file])
    time.sleep(100)


def background(arguments: Message, fds: list[int]) -> None:
    """Ends at once and leaves a process that holds stdout open."""
    child = subprocess.Popen(["sleep", "100"])
    print(child.pid)


def answer_on(arguments: Message, fds: list[int]) -> None:
    """Runs detached: sends its pid, session and parent over the socket, then waits until the socket
    closes."""
    sock = socket.socket(fileno=fds[0])
    sock.send(f"{os.getpid()} {os.getsid(0)} {os.getppid()}".encode())
    while request := sock.recv(100):
        sock.send(f"{os.getppid()} {request.decode()}".encode())


def append(arguments: Message, fds: list[int]) -> None:
    os.write(fds[0], (Question.of(arguments).text + " ").encode())
