"""Tests network devices that move into the container, in a network namespace of the test, so that
no device of the machine is touched."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.system.harness import Runtime


@pytest.fixture
def network(runtime: Runtime) -> Iterator[list[str]]:
    """Make a network namespace for the devices, and run the runtime in it. Return the command
    prefix by which a test runs a command there."""
    namespace_process = subprocess.Popen(
        ["unshare", "-n", "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE
    )
    assert namespace_process.stdout
    namespace_process.stdout.readline()
    inside = ["nsenter", f"--net=/proc/{namespace_process.pid}/ns/net"]
    before, runtime.program = runtime.program, [*inside, *runtime.program]
    yield inside
    runtime.program = before
    namespace_process.kill()
    namespace_process.wait()
    namespace_process.stdout.close()


def ip(network: list[str], *words: str) -> str:
    return subprocess.run(
        [*network, "ip", *words], check=True, capture_output=True, text=True
    ).stdout


def cable(network: list[str], name: str) -> None:
    ip(network, "link", "add", name, "type", "veth", "peer", "name", f"x-{name}")
    ip(network, "link", "set", name, "mtu", "1300", "up")


def test_a_link_moves_and_keeps_its_addresses(runtime: Runtime, network: list[str]) -> None:
    cable(network, "d0")
    cable(network, "d1")
    for address in ("192.0.2.5/24", "2001:db8::5/64"):
        ip(network, "address", "add", address, "dev", "d0", *(["nodad"] if ":" in address else []))
    box = runtime.box("sleep", "1000", netDevices={"d0": {"name": "eth0"}, "d1": {}}).up()
    text = box.exec("ip", "address").ok().out
    if runtime.is_pyrunc:  # runc 1.5.2 moves no addresses
        assert " 192.0.2.5/24 " in text and " 2001:db8::5/64 " in text
    assert "eth0" in text and "d1" in text and "mtu 1300" in text
    assert "UP" in next(line for line in text.splitlines() if ": eth0" in line)
    here = [
        line.split(":")[1].split("@")[0].strip() for line in ip(network, "-o", "link").splitlines()
    ]
    assert sorted(here) == ["lo", "x-d0", "x-d1"]


@pytest.mark.parametrize(
    "devices", [{"nowhere": {}}, {"d0": {"name": "lo"}}, {"d0": {"name": "a/b"}}]
)
def test_an_impossible_network_device_is_refused(
    runtime: Runtime, network: list[str], devices: dict[str, dict[str, str]]
) -> None:
    cable(network, "d0")
    box = runtime.box("true", netDevices=devices)
    box.create().fails()
    if runtime.is_pyrunc or devices != {"d0": {"name": "lo"}}:  # runc has moved it by then
        assert "d0" in ip(network, "link")
    assert "does not exist" in runtime("state", box.id).err


def test_a_network_device_needs_a_new_network_namespace(
    runtime: Runtime, network: list[str]
) -> None:
    cable(network, "d0")
    kinds = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
    runtime.box("true", netDevices={"d0": {}}, namespaces=kinds).create().fails()
