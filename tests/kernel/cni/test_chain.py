"""Tests several plugins in one request, as the server's workers run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cni_plugins import jobs
from cni_plugins.net import netns
from cni_plugins.protocol.worker import Answer, Chain
from pyrunc.errors import InvalidArgument
from tests.kernel.cni.harness import (
    Host,
    Pod,
    addresses_of,
    all_elements,
    call,
    link_names,
    listen,
    new_host,
    portmap_config,
    reach,
)

PORT = {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}


@pytest.fixture
def host(tmp_path: Any) -> Iterator[Host]:
    with new_host(str(tmp_path)) as throwaway:
        yield throwaway


def ask(
    command: str, pod: Pod, *inputs: dict[str, Any], previous: dict[str, Any] | None = None
) -> Answer:
    """Send a request to a worker's function and return the answer."""
    environment = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": pod.id,
        "CNI_NETNS": pod.path,
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/nowhere",
    }
    return jobs.answer(Chain(environment, list(inputs), command == "ADD", previous).to_message())


def added(
    pod: Pod, *inputs: dict[str, Any], previous: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the result of an ADD."""
    answer = ask("ADD", pod, *inputs, previous=previous)
    assert answer.error is None and answer.result is not None
    return answer.result


def ports(**changes: Any) -> dict[str, Any]:
    config = portmap_config(None, PORT, **changes)
    del config["prevResult"]
    return config


def test_a_chain_visits_the_namespace_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    visits = []
    syscall = netns.syscall

    def counted(name: str, *arguments: Any) -> Any:
        visits.append(name)
        return syscall(name, *arguments)

    pod, bridge = host.pod(), host.bridge_config(ipMasq=True)
    with monkeypatch.context() as patch:
        patch.setattr(netns, "syscall", counted)
        result = added(pod, bridge, ports())
    assert visits == ["setns", "setns"]
    assert addresses_of(result) == ["10.88.0.2", "fd88::2"]
    with listen(pod.fd, "127.0.0.1", 80) as server:
        assert reach(pod.fd, "127.0.0.1", 80, server)
    previous = {"prevResult": result}
    assert call(jobs.PLUGINS["bridge"], "CHECK", pod, bridge | previous) is None
    assert ask("DEL", pod, ports(**previous), bridge | previous) == Answer()
    assert not all_elements() and not [n for n in link_names() if n.startswith("veth")]


def test_loopback_is_up_also_without_a_plugin_that_enters_the_namespace(host: Host) -> None:
    pod = host.pod()
    assert ask("ADD", pod) == Answer()
    with listen(pod.fd, "127.0.0.1", 80) as server:
        assert reach(pod.fd, "127.0.0.1", 80, server)


def test_a_later_plugin_gets_the_result_of_the_previous_plugin(host: Host) -> None:
    """The first of pyrunc's plugins gets the result of a foreign plugin before it."""
    pod = host.pod()
    result = added(pod, host.bridge_config())
    assert added(pod, ports(), previous=result) == result
    error = ask("ADD", host.pod(), ports()).error
    assert error and error.plugin == "portmap" and "must follow" in error.error["msg"]


def test_del_without_port_mappings_searches_no_elements(host: Host) -> None:
    """DEL by pyrunc's server searches nftables elements only if the ADD had port mappings. For
    another caller, DEL searches all elements."""
    pod, bridge = host.pod(), host.bridge_config()
    scope = {"args": {"cni": {"scope": "mine"}}}
    result = added(pod, bridge, ports(**scope))
    silent = {**ports(prevResult=result), "runtimeConfig": {}}
    ask("DEL", pod, silent | scope)
    assert all_elements()
    ask("DEL", pod, ports(prevResult=result, **scope))
    assert not all_elements()
    ask("ADD", pod, ports(), previous=result)
    ask("DEL", pod, silent)
    assert not all_elements()


def test_an_unknown_request_is_refused_by_name() -> None:
    for request, problem in (
        ({"call": "chain", "environment": {}}, "chain: inputs is missing"),
        (
            {"call": "restore", "attachments": [{"environment": {}}]},
            "restore: attachments.*inputs is missing",
        ),
        ({"call": "brew"}, "unknown call 'brew' to a CNI worker"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            jobs.answer(request)
