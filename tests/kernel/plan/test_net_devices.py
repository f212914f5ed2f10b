"""Tests network devices of the host that move into a container: renamed, up, with their permanent
addresses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable

import pytest

from pyrunc.errors import Error, InvalidSpec, KernelError
from pyrunc.kernel import namespace
from tests.kernel.box import Box

CLONE_NEWNET = 0x40000000


def in_network(work: Callable[[], None]) -> None:
    """Run the check in a child with its own network namespace, so that no network device of the
    machine is touched."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            namespace.unshare(CLONE_NEWNET)
            work()
            code = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            ctypes.CDLL(None).fflush(None)
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def add(name: str, *addresses: str) -> None:
    """Add a veth device with these addresses; its other end `x-NAME` stays here."""
    ip("link", "add", name, "type", "veth", "peer", "name", f"x-{name}")
    ip("link", "set", name, "mtu", "1400", "up")
    for address in addresses:
        ip("address", "add", address, "dev", name, *(["nodad"] if ":" in address else []))


def test_a_link_moves_with_its_addresses(box: Box) -> None:
    def check() -> None:
        add("d0", "192.0.2.7/25", "198.51.100.1/32", "2001:db8::7/64")
        ip(
            "address",
            "add",
            "192.0.2.8/25",
            "dev",
            "d0",
            "valid_lft",
            "1000",
            "preferred_lft",
            "1000",
        )
        ip("address", "add", "203.0.113.1/24", "dev", "d0", "scope", "link")
        box.linux["netDevices"] = {"d0": {"name": "eth0"}}
        text = box.run("ip link show eth0; ip address show eth0")
        assert "UP" in text and "mtu 1400" in text
        for address in ("192.0.2.7/25", "198.51.100.1/32", "2001:db8::7/64"):
            assert text.count(f" {address} ") == 1, text
        assert "192.0.2.8/" not in text, "has a lifetime"
        assert "203.0.113.1" not in text, "is of the link alone"
        deadline = time.monotonic() + 30
        while "d0" in ip("link"):  # it ends with the namespace, and its peer with it
            assert time.monotonic() < deadline
            time.sleep(0.05)

    in_network(check)


def test_a_device_without_a_new_name_keeps_its_name(box: Box) -> None:
    def check() -> None:
        add("keep0")
        add("other0")
        box.linux["netDevices"] = {"keep0": {}, "other0": {"name": "keep%d"}}
        box.process["user"] = {"uid": 1000, "gid": 1000}
        assert "keep0" in (text := box.run("ip -o link | cut -d: -f2 | cut -d@ -f1"))
        assert sorted(text.split()) == ["keep0", "keep1", "lo"]

    in_network(check)


def test_a_link_moves_into_a_user_namespace(box: Box) -> None:
    def check() -> None:
        add("d0", "192.0.2.7/24")
        box.linux["namespaces"].append({"type": "user"})
        box.linux["uidMappings"] = box.linux["gidMappings"] = [
            {"containerID": 0, "hostID": 100000, "size": 65536}
        ]
        box.linux["netDevices"] = {"d0": {}}
        assert " 192.0.2.7/24 " in box.run("ip address show d0")

    in_network(check)


def test_a_failed_move_leaves_the_link_on_the_host(box: Box) -> None:
    def check() -> None:
        add("d0", "192.0.2.7/24")
        for devices, kind, words in (
            ({"d0": {"name": "lo"}}, KernelError, "link 'lo' of the container: EEXIST"),
            ({"nowhere": {}}, KernelError, "link 'nowhere': ENODEV"),
        ):
            box.linux["netDevices"] = devices
            with pytest.raises(kind, match=words):
                box.run("true")
        assert "192.0.2.7/24" in ip("address", "show", "d0")
        assert "UP" in ip("link", "show", "d0")

    in_network(check)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "a:b", "sixteen-letters-"])
def test_invalid_names_of_links_are_refused(box: Box, name: str) -> None:
    box.linux["netDevices"] = {name: {}}
    with pytest.raises(InvalidSpec, match=r"linux\.netDevices\."):
        box.request("true")


def test_links_are_not_moved_into_the_hosts_network_namespace(box: Box) -> None:
    box.linux["netDevices"] = {"d0": {}}
    entries = [e for e in box.linux["namespaces"] if e["type"] != "network"]
    box.linux["namespaces"] = entries
    with pytest.raises(InvalidSpec, match=r"linux\.netDevices: need a network namespace"):
        box.request("true")
    box.linux["namespaces"] = [*entries, {"type": "network", "path": "/proc/self/ns/net"}]
    with pytest.raises(
        Error, match=r"linux\.netDevices: needs a network namespace other than the host's"
    ):
        box.run("true")
