"""Tests the table of host rules: elements as nft shows them, transactions, and lists that change
during the reading."""

from __future__ import annotations

import os
import signal
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from cni_plugins.net import host_rules
from cni_plugins.net.nfnetlink import Element
from pyrunc.errors import AlreadyExists, DeadlineExceeded
from tests.kernel.cni.harness import Host, all_elements, nft

POD, SUBNET = ip_address("10.88.0.5"), ip_network("10.88.0.0/16")
POD6, SUBNET6 = ip_address("fd88::5"), ip_network("fd88::/64")


def ports(first: int, count: int, tag: str, pod: Any = POD, subnet: Any = SUBNET) -> list[Element]:
    return [
        e
        for n in range(count)
        for e in host_rules.port_elements("tcp", first + n, None, pod, 80, subnet, tag)
    ]


def test_nft_shows_the_added_elements(host: Host) -> None:
    elements = [
        host_rules.masquerade_element(POD, SUBNET, "net/a/eth0"),
        *host_rules.port_elements(
            "udp", 53, ip_address("192.0.2.1"), POD, 5353, SUBNET, "net/a/eth0"
        ),
        *host_rules.port_elements("sctp", 8080, None, POD6, 80, None, "net/a/eth0"),
    ]
    host_rules.add_elements(elements, [SUBNET, SUBNET6])
    listing = " ".join(nft("list", "table", "inet", host_rules.TABLE).split())
    for text in (
        '10.88.0.5 comment "net/a/eth0" : jump masquerade_10.88.0.0_16',
        'udp . 192.0.2.1 . 53 comment "net/a/eth0" : 10.88.0.5 . 5353',
        'udp . 192.0.2.1 . 53 comment "net/a/eth0" : jump near_10.88.0.0_16',
        'sctp . 8080 comment "net/a/eth0" : fd88::5 . 80',
    ):
        assert text in listing
    assert set(all_elements()) == set(elements)
    assert host_rules.lookup(elements) == elements
    host_rules.remove_elements(elements)
    host_rules.remove_elements(elements)
    assert all_elements() == []


def test_a_taken_key_fails_the_whole_request(host: Host) -> None:
    host_rules.add_elements(ports(8000, 3, "net/a/eth0"), [SUBNET])
    before = set(all_elements())
    with pytest.raises(AlreadyExists, match="8002/tcp is already taken by net/a/eth0"):
        host_rules.add_elements(ports(8002, 250, "net/b/eth0"), [SUBNET])
    assert set(all_elements()) == before


def test_installing_again_keeps_the_elements_and_doubles_no_rule(host: Host) -> None:
    host_rules.add_elements(ports(8000, 3, "net/a/eth0"), [SUBNET])
    before = set(all_elements())
    for _ in range(2):
        host_rules.install([SUBNET, SUBNET6])
    assert set(all_elements()) == before and host_rules.is_intact()


def test_removing_elements_that_are_gone_removes_the_others(host: Host) -> None:
    elements = ports(8000, 3, "net/a/eth0")
    host_rules.add_elements(elements, [SUBNET])
    nft("delete", "element", "inet", host_rules.TABLE, "ports4", "{ tcp . 8001 }")
    host_rules.remove_elements(elements)
    assert all_elements() == []


def test_a_transaction_may_be_larger_than_the_sockets_buffers(host: Host) -> None:
    # By default the kernel refuses a message above net.core.wmem_default and drops answers above
    # net.core.rmem_default.
    elements = [
        *ports(1, 8000, "net/a/eth0"),
        *ports(1, 8000, "net/a/eth0", pod=POD6, subnet=SUBNET6),
    ]
    assert host_rules.restore(elements, [SUBNET, SUBNET6]) == len(elements)
    assert set(all_elements()) == set(elements)
    nft("flush", "ruleset")
    assert host_rules.restore(elements, [SUBNET, SUBNET6]) == len(elements)
    host_rules.remove_elements(elements)
    assert all_elements() == []


def test_a_list_is_complete_while_others_change_the_table(host: Host) -> None:
    # A list of hundreds of elements takes several packets. The kernel says when a list is not
    # consistent.
    mine = ports(10000, 800, "net/mine/eth0")
    host_rules.add_elements(mine, [SUBNET])
    busy = os.fork()
    if busy == 0:
        while True:
            other = ports(9000, 1, "net/other/eth0")
            host_rules.add_elements(other, [SUBNET])
            host_rules.remove_elements(other)
    try:
        for _ in range(40):
            assert set(host_rules.all_elements(host_rules.PORT_SETS, "net/mine/eth0")) == set(mine)
    finally:
        os.kill(busy, signal.SIGKILL)
        os.waitpid(busy, 0)


@pytest.mark.parametrize(
    ("network", "container", "scope"),
    [
        ("net", "a" * 64, ""),
        ("net", "a" * 64, "abcd1234"),
        ("n" * 200, "a" * 64, "abcd1234"),
        ("net", "a" * 250, "s"),
    ],
)
def test_tags_fit_into_comments_and_distinguish_networks_and_scopes(
    host: Host, network: str, container: str, scope: str
) -> None:
    tag = host_rules.owner_tag(network, container, "eth0", scope)
    host_rules.add_elements(ports(8000, 1, tag), [SUBNET])
    assert {e.comment for e in all_elements()} == {tag}
    assert tag in nft("list", "map", "inet", host_rules.TABLE, "ports4")
    assert host_rules.belongs_to(tag, network) and host_rules.belongs_to(tag, network, scope)
    assert not host_rules.belongs_to(tag, "other") and not host_rules.belongs_to(
        tag, network, "other"
    )


def test_the_error_of_an_nft_that_does_not_end_names_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nft"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setattr(host_rules, "nft_program", lambda: str(program))
    monkeypatch.setattr(host_rules, "NFT_TIMEOUT_S", 0.1)
    with pytest.raises(DeadlineExceeded, match=f"{program} did not end in 0.1 s"):
        host_rules.run_nft("")
