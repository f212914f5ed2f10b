"""Tests `exec` with the features of kubectl, crictl and nerdctl: namespaces and containers, `--`,
input without a terminal, a timeout."""

from __future__ import annotations

import subprocess

import pytest

from tests.cri.client_verbs import cli, command_line
from tests.cri.server_harness import REPOSITORY, Server
from tests.support.processes import wait_until


@pytest.fixture
def web(server: Server) -> Server:
    """Run pod `web` with two containers, `c` and `d`."""
    pod = server.run_pod(server.pod_config("web"))
    for name in ("c", "d"):
        config = server.container_config()
        config.metadata.name = name
        server.launch(pod, config)
    return server


@pytest.mark.parametrize(
    "words",
    [
        ["web/d", "--"],
        ["default/web/d"],
        ["-c", "d", "web"],
        ["web", "-c", "d", "--"],
        ["-n", "default", "web", "-c", "d", "--"],
        ["web", "--namespace", "default", "--container", "d", "-i", "--"],
    ],
)
def test_a_container_is_named_as_by_kubectl(web: Server, words: list[str]) -> None:
    assert cli(web, "exec", *words, "echo", "yes").stdout == b"yes\n"


def test_two_dashes_within_the_command_belong_to_the_command(web: Server) -> None:
    done = cli(web, "exec", "web/c", "sh", "-c", 'echo "$@"', "--", "-c", "--", "x")
    assert done.stdout == b"-c -- x\n"


def test_piped_input_ends_without_a_terminal(web: Server) -> None:
    """If stdin is a pipe, the command gets no terminal despite `-t`, as in kubectl: on a terminal
    its input would never end."""
    done = cli(web, "exec", "-it", "web/c", "cat", stdin=b"line\n")
    assert done.stdout == b"line\n" and b"stdin is not a terminal: -t is ignored" in done.stderr
    assert cli(web, "exec", "-it", "web/c", "cat").stdout == b""


def test_exec_ends_a_command_after_its_timeout(web: Server) -> None:
    done = cli(web, "exec", "--timeout", "0.5", "web/c", "sleep", "3600", code=1)
    assert done.stderr == b"pyrunc-cri: the command took longer than 0.5 s\n"
    (c,) = (c.id for c in web.containers() if c.metadata.name == "c")
    assert wait_until(lambda: web.output(c, "ps").count("sleep 3600") == 1, 60), (
        "only the container's own process remains"
    )


def test_exec_can_set_user_environment_and_directory(web: Server) -> None:
    """User and groups are looked up in the container's /etc/passwd and /etc/group; HOME is the
    user's."""
    script = (
        "printf 'root:x:0:0::/root:/bin/sh\\nme:x:1000:100::/tmp:/bin/sh\\n' > /etc/passwd; printf"
        " 'users:x:100:\\nmore:x:7:me\\n' > /etc/group"
    )
    cli(web, "exec", "web/c", "sh", "-c", script)
    for user, ids in (
        ("me", b"1000 100 100 7"),
        ("me:more", b"1000 7 7"),
        ("0", b"0 0 0"),
        ("5:6", b"5 6 6"),
    ):
        done = cli(web, "exec", "-u", user, "web/c", "sh", "-c", "echo $(id -u) $(id -g) $(id -G)")
        assert done.stdout.split() == ids.split(), user
    show = 'echo "$A $B $PWD $HOME"'
    done = cli(
        web,
        "exec",
        "-e",
        "A=1",
        "--env",
        "B=x=y",
        "-w",
        "/etc",
        "-u",
        "me",
        "web/c",
        "--",
        "sh",
        "-c",
        show,
    )
    assert done.stdout == b"1 x=y /etc /tmp\n"
    assert cli(web, "exec", "web/c", "sh", "-c", show).stdout.startswith(b"  / "), (
        "the options apply to this command only"
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-u", "nobody-of-this-name"], "nobody-of-this-name"),
        (["-u", "5000000000"], "is not in 0..2147483647"),
        (["-e", "=x"], "--env =x: expected NAME=VALUE"),
        (["-e", "NOT_SET_HERE"], "--env NOT_SET_HERE: expected NAME=VALUE"),
        (["-w", "relative"], "cwd"),
    ],
)
def test_wrong_values_are_refused(web: Server, words: list[str], problem: str) -> None:
    command = ["exec", *words, "web/c", "id"]
    done = subprocess.run(
        command_line(web, *command), capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode in (1, 2) and problem in done.stderr, done


def test_a_container_cannot_stop_exec_by_its_passwd_file(web: Server) -> None:
    """`exec -u` neither waits for a FIFO at /etc/passwd nor follows a link there out of the
    container."""
    script = "rm -f /etc/passwd; mkfifo /etc/passwd"
    cli(web, "exec", "web/c", "sh", "-c", script)
    show = "grep Uid: /proc/self/status"
    assert cli(web, "exec", "-u", "12", "web/c", *show.split()).stdout.split()[1] == b"12"
    cli(
        web,
        "exec",
        "web/c",
        "sh",
        "-c",
        "rm -f /etc/passwd; ln -s ../../../../etc/passwd /etc/passwd",
    )
    done = subprocess.run(
        command_line(web, "exec", "-u", "daemon", "web/c", "id"),
        capture_output=True,
        cwd=REPOSITORY,
    )
    assert done.returncode != 0, "the host's passwd file is not read"
