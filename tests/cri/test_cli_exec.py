"""`exec` as kubectl, crictl and nerdctl have it: namespaces and containers, `--`, a terminal that is none, a time limit."""

from __future__ import annotations

import pytest

from tests.cri.client_verbs import call, cli
from tests.cri.server_harness import Server
from tests.support.processes import wait_until


@pytest.fixture
def web(server: Server) -> Server:
    """Pod `web` of two containers, `c` and `d`."""
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


def test_two_dashes_within_the_command_are_the_commands(web: Server) -> None:
    done = cli(web, "exec", "web/c", "sh", "-c", 'echo "$@"', "--", "-c", "--", "x")
    assert done.stdout == b"-c -- x\n"


def test_what_is_piped_into_a_terminal_ends(web: Server) -> None:
    """As with kubectl the command gets no terminal then: one whose stdin never ends would hang."""
    done = cli(web, "exec", "-it", "web/c", "cat", stdin=b"line\n")
    assert done.stdout == b"line\n" and b"stdin is not a terminal: -t is ignored" in done.stderr
    assert cli(web, "exec", "-it", "web/c", "cat").stdout == b""


def test_a_command_that_takes_too_long_is_ended(web: Server) -> None:
    done = cli(web, "exec", "--timeout", "0.5", "web/c", "sleep", "3600", code=1)
    assert done.stderr == b"pyrunc-cri: the command took longer than 0.5 s\n"
    (c,) = (c.id for c in web.containers() if c.metadata.name == "c")
    assert wait_until(lambda: web.output(c, "ps").count("sleep 3600") == 1, 60), "its own process is left"


@pytest.mark.parametrize("option", ["-u", "-e", "-w"])
def test_what_cri_has_no_field_for_is_refused_with_a_way(web: Server, option: str) -> None:
    said = call(web, "exec", option, "x", "web/c", "id")
    assert said.code == 2 and "CRI's exec has no such field; use " in said.err
