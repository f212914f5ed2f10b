"""Tests host-local without a network: arithmetic on ranges, and leases as files in a folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cni_plugins.host_local import leases, settings
from cni_plugins.host_local.ranges import Range, RangeSet
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import CniError


def sets_of(*subnets: str) -> tuple[RangeSet, ...]:
    return tuple(RangeSet.parse([{"subnet": subnet}], "ranges") for subnet in subnets)


@contextmanager
def store(
    folder: Path, links: set[str] | None = None, boot: str = "this"
) -> Iterator[leases.NetworkLeases]:
    with leases.open_leases(
        str(folder / "net"), (links or set()).__contains__, boot=boot
    ) as opened:
        yield opened


def take(
    folder: Path,
    owner: str,
    sets: tuple[RangeSet, ...],
    *requested: str,
    link: str = "",
    links: set[str] | None = None,
) -> list[str]:
    with store(folder, links) as opened:
        return [
            str(x.address)
            for x in opened.take(owner, sets, tuple(ip_address(r) for r in requested), link=link)
        ]


# ranges


def test_a_range_is_the_subnet_without_its_ends_and_gateway() -> None:
    each = Range.parse({"subnet": "10.0.0.0/29"}, "x")
    assert (str(each.first), str(each.last), str(each.gateway)) == (
        "10.0.0.1",
        "10.0.0.6",
        "10.0.0.1",
    )
    addresses = [str(a) for a, _ in RangeSet((each,)).after(None)]
    assert addresses == [f"10.0.0.{n}" for n in range(2, 7)]


def test_ipv6_has_no_broadcast_address() -> None:
    assert str(Range.parse({"subnet": "fd00::/120"}, "x").last) == "fd00::ff"


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"subnet": "10.0.0.1/24"},
        {"subnet": "10.0.0.0/31"},
        {"subnet": "10.0.0.0/24", "rangeStart": "10.0.1.1"},
        {"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.9", "rangeEnd": "10.0.0.5"},
        {"subnet": "10.0.0.0/24", "gateway": "fd00::1"},
        {"subnet": "10.0.0.0/24", "gateway": "here"},
        {"subnet": 10},
        "10.0.0.0/24",
    ],
)
def test_an_invalid_range_is_refused(value: Any) -> None:
    with pytest.raises(CniError):
        Range.parse(value, "x")


def test_overlapping_ranges_are_refused() -> None:
    with pytest.raises(CniError, match="overlap"):
        RangeSet.parse([{"subnet": "10.0.0.0/16"}, {"subnet": "10.0.1.0/24"}], "x")
    with pytest.raises(CniError, match="mixes"):
        RangeSet.parse([{"subnet": "10.0.0.0/16"}, {"subnet": "fd00::/64"}], "x")


@given(st.integers(0, 3), st.integers(0, 300))
def test_iterating_from_any_address_yields_every_address_once(offset: int, start: int) -> None:
    ranges = RangeSet.parse(
        [{"subnet": "10.0.0.0/28"}, {"subnet": "10.9.0.0/27", "gateway": "10.9.0.7"}], "x"
    )
    last = ip_address("10.0.0.0") + start if start < 20 else ip_address("10.9.0.0") + (start % 40)
    visited = [a for a, _ in ranges.after(last)]
    assert len(visited) == len(set(visited))
    assert {str(a) for a in visited} == {str(a) for a, _ in ranges.after(None)}
    assert last not in visited[:-1]


# leases


def test_addresses_are_assigned_round_robin(tmp_path: Path) -> None:
    sets = sets_of("10.0.0.0/29")
    assert take(tmp_path, "a", sets) == ["10.0.0.2"]
    assert take(tmp_path, "b", sets) == ["10.0.0.3"]
    with store(tmp_path) as opened:
        assert opened.release("a") == ["10.0.0.2"]
    assert take(tmp_path, "c", sets) == ["10.0.0.4"]
    assert [take(tmp_path, owner, sets)[0] for owner in "def"] == [
        "10.0.0.5",
        "10.0.0.6",
        "10.0.0.2",
    ]
    with pytest.raises(CniError, match="no address left") as refused:
        take(tmp_path, "g", sets)
    assert refused.value.code == 110


def test_a_pod_gets_an_address_of_each_set_or_an_error(tmp_path: Path) -> None:
    sets = sets_of("10.0.0.0/24", "fd00::/126")
    assert take(tmp_path, "a", sets) == ["10.0.0.2", "fd00::2"]
    assert take(tmp_path, "b", sets) == ["10.0.0.3", "fd00::3"]
    with pytest.raises(CniError):
        take(tmp_path, "c", sets)
    with store(tmp_path) as opened:
        assert opened.addresses_of("c") == []
        assert opened.owner_of("10.0.0.4") == ""


def test_a_requested_address_is_given(tmp_path: Path) -> None:
    sets = sets_of("10.0.0.0/24", "fd00::/64")
    assert take(tmp_path, "a", sets, "fd00::99") == ["10.0.0.2", "fd00::99"]
    with pytest.raises(CniError, match="is taken"):
        take(tmp_path, "b", sets, "fd00::99")
    with pytest.raises(CniError, match="gateway"):
        take(tmp_path, "b", sets, "10.0.0.1")


def test_an_owner_with_addresses_gets_no_more(tmp_path: Path) -> None:
    sets = sets_of("10.0.0.0/24")
    take(tmp_path, "a", sets)
    with pytest.raises(CniError, match="already"):
        take(tmp_path, "a", sets)


def test_release_frees_only_the_owners_addresses_and_may_be_repeated(tmp_path: Path) -> None:
    sets = sets_of("10.0.0.0/24")
    take(tmp_path, "a", sets)
    with store(tmp_path) as opened:
        assert opened.release("b") == []
        assert opened.owner_of("10.0.0.2") == "a"
        assert opened.release("a") == ["10.0.0.2"]
        assert opened.release("a") == []
    assert not (tmp_path / "net/10.0.0.2").exists()


@pytest.mark.parametrize("content", ["", "\0" * 80, '{"owner": "a"', '{"owner": "a"}'])
def test_a_power_cut_that_empties_an_owners_record_leaks_no_address(
    tmp_path: Path, content: str
) -> None:
    sets = sets_of("10.0.0.0/30")
    assert take(tmp_path, "a/eth0", sets) == ["10.0.0.2"]
    # ext4(5), delayed allocation: after a power cut a file may have its name, but no content.
    (tmp_path / "net" / "owners" / "a@eth0").write_text(content)
    assert take(tmp_path, "b/eth0", sets) == ["10.0.0.2"]
    (tmp_path / "net" / "owners" / "b@eth0").write_text(content)
    with store(tmp_path) as opened:
        assert opened.collect(lambda owner: True, scope="ours") == ["a@eth0", "b@eth0"]
    assert not (tmp_path / "net" / "10.0.0.2").exists()


def test_leases_of_another_boot_are_void(tmp_path: Path) -> None:
    sets = sets_of("10.0.0.0/29")
    for owner in "abcde":
        take(tmp_path, owner, sets)
    with store(tmp_path, boot="next") as opened:
        assert opened.addresses_of("a") == []
        assert [str(x.address) for x in opened.take("z", sets, ())] == ["10.0.0.2"]
        assert opened.release("a") == []  # the DEL of a pod that died with the old boot
        assert opened.owner_of("10.0.0.2") == "z"


def test_release_frees_leases_of_another_boot(tmp_path: Path) -> None:
    sets = sets_of("10.0.0.0/29")
    for owner in "abcde":
        take(tmp_path, owner, sets)
    with store(tmp_path, boot="next") as opened:
        assert opened.release("a") == ["10.0.0.2"]
        assert [len(opened.release(owner)) for owner in "bcde"] == [1, 1, 1, 1]
    assert not [n for n in os.listdir(tmp_path / "net") if n[0].isdigit()]


@pytest.mark.requirement("3.2.4")
def test_an_address_is_not_reused_before_its_link_is_gone(tmp_path: Path) -> None:
    sets, links = sets_of("10.0.0.0/29"), {"veth1"}
    for owner in "abcde":
        take(tmp_path, owner, sets, link="veth1" if owner == "c" else "", links=links)
    with store(tmp_path, links) as opened:
        opened.release("c")
    with pytest.raises(CniError, match="previous interface") as refused:
        take(tmp_path, "f", sets, links=links)
    assert refused.value.code == 11
    assert take(tmp_path, "f", sets, links=set()) == ["10.0.0.4"]
    assert os.listdir(tmp_path / "net/leaving") == []


def test_collect_keeps_only_addresses_of_valid_attachments(tmp_path: Path) -> None:
    sets = sets_of("10.0.0.0/24")
    for owner in ("a/eth0", "b/eth0", "c/eth0"):
        take(tmp_path, owner, sets)
    (tmp_path / "net/10.0.0.77").write_text("ghost\r\neth0")
    (tmp_path / "net/10.0.0.78").write_text("")
    with store(tmp_path) as opened:
        assert opened.collect({"b/eth0"}.__contains__) == ["a/eth0", "c/eth0"]
        assert opened.owner_of("10.0.0.3") == "b/eth0"
    left = {n for n in os.listdir(tmp_path / "net") if n[0].isdigit()}
    assert left == {"10.0.0.3"}


def test_collect_with_a_scope_keeps_addresses_of_other_scopes(tmp_path: Path) -> None:
    sets = sets_of("10.0.0.0/24")
    with store(tmp_path) as opened:
        for owner, scope in (
            ("a/eth0", "mine"),
            ("b/eth0", "mine"),
            ("c/eth0", "theirs"),
            ("d/eth0", ""),
        ):
            opened.take(owner, sets, (), scope=scope)
    (tmp_path / "net/10.0.0.77").write_text("ghost\r\neth0")
    with store(tmp_path) as opened:
        assert opened.collect({"b/eth0"}.__contains__, scope="mine") == ["a/eth0"]
        assert [opened.owner_of(f"10.0.0.{n}") for n in (2, 3, 4, 5, 77)] == [
            "",
            "b/eth0",
            "c/eth0",
            "d/eth0",
            "ghost/eth0",
        ]


def test_leases_of_the_reference_plugin_are_respected_and_released(tmp_path: Path) -> None:
    sets = sets_of("10.0.0.0/24")
    (tmp_path / "net").mkdir()
    (tmp_path / "net/10.0.0.2").write_text("podx\r\neth0")
    (tmp_path / "net/last_reserved_ip.0").write_text("10.0.0.1")
    assert take(tmp_path, "a/eth0", sets) == ["10.0.0.3"]
    assert (tmp_path / "net/10.0.0.3").read_bytes() == b"a\r\neth0"
    with store(tmp_path) as opened:
        assert opened.release("podx/eth0") == ["10.0.0.2"]
        assert opened.owner_of("10.0.0.2") == ""


@pytest.mark.parametrize("cut", range(6))
def test_a_kill_while_taking_or_releasing_leaves_nothing_that_release_cannot_find(
    tmp_path: Path, cut: int
) -> None:
    """After a kill at any write or removal, the next release of the same owner frees everything."""
    sets = sets_of("10.0.0.0/24", "fd00::/64")

    class Killed(BaseException):
        pass

    class Dying(leases.NetworkLeases):
        budget = cut

        def _spend(self) -> None:
            if self.budget == 0:
                raise Killed
            self.budget -= 1

        def _write(self, name: str, text: str) -> None:
            self._spend()
            super()._write(name, text)

    with store(tmp_path):
        dying = Dying(str(tmp_path / "net"), "this", set().__contains__)
    try:
        dying.take("a", sets, ())
    except Killed:
        pass
    with store(tmp_path) as opened:
        opened.release("a")
    assert [n for n in os.listdir(tmp_path / "net") if n[0].isdigit() or ":" in n] == []
    assert not os.path.isdir(tmp_path / "net/owners") or os.listdir(tmp_path / "net/owners") == []


def _take_many(folder: str, worker: int, count: int) -> None:
    for number in range(count):
        take(Path(folder), f"{worker}-{number}", sets_of("10.0.0.0/16"))


def test_parallel_takers_never_share_an_address(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_take_many, args=(str(tmp_path), n, 25)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    owners = {}
    with store(tmp_path) as opened:
        for worker_number in range(4):
            for number in range(25):
                owner = f"{worker_number}-{number}"
                (address,) = opened.addresses_of(owner)
                assert opened.owner_of(address) == owner
                owners[address] = owner
    assert len(owners) == 100


class LeaseMachine(RuleBasedStateMachine):
    """Takes, releases and collects addresses in any order, while network devices vanish. Each
    address has one owner, and is not given out again while its earlier owner's device exists."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.sets = sets_of("10.0.0.0/28", "fd00::/124")
        self.owned: dict[str, list[str]] = {}
        self.links: set[str] = set()
        self.leaving: dict[str, str] = {}
        self.number = 0

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule()
    def take_one(self) -> None:
        self.number += 1
        owner, link = f"o{self.number}", f"veth{self.number}"
        self.links.add(link)
        try:
            lease_list = take(self.path, owner, self.sets, link=link, links=self.links)
        except CniError as error:
            in_use = sum(1 for addresses in self.owned.values() for a in addresses if "." in a)
            left = sum(1 for a in self.leaving if "." in a)
            assert error.code in (110, 11) and in_use + left >= 13
            self.links.discard(link)
            return
        flat = [a for addresses in self.owned.values() for a in addresses]
        assert not set(lease_list) & set(flat) and not set(lease_list) & set(self.leaving)
        assert all(
            ip_address(a) in ip_network(s)
            for a, s in zip(lease_list, ("10.0.0.0/28", "fd00::/124"), strict=True)
        )
        self.owned[owner] = lease_list

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release_one(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned)))
        with store(self.path, self.links) as opened:
            assert opened.release(owner) == self.owned[owner]
        link = owner.replace("o", "veth")
        for address in self.owned.pop(owner):
            if link in self.links:
                self.leaving[address] = link

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def link_vanishes(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from(sorted(set(self.leaving.values()))))
        self.links.discard(link)
        self.leaving = {a: other for a, other in self.leaving.items() if other != link}

    @rule()
    def collect(self) -> None:
        with store(self.path, self.links) as opened:
            assert opened.collect(self.owned.__contains__) == []

    @invariant()
    def owners_are_as_expected(self) -> None:
        with store(self.path, self.links) as opened:
            for owner, addresses in self.owned.items():
                assert opened.addresses_of(owner) == addresses
                assert all(opened.owner_of(a) == owner for a in addresses)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = __import__("hypothesis").settings(
    max_examples=25, stateful_step_count=30, deadline=None
)


# settings


def parse(ipam: Any, *, cni_args: str = "", **changes: Any) -> settings.HostLocalSettings:
    config = {"cniVersion": "1.0.0", "name": "net", "type": "bridge", "ipam": ipam, **changes}
    environment = {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "a",
        "CNI_NETNS": "/x",
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/x",
        "CNI_ARGS": cni_args,
    }
    return settings.parse(
        PluginConfig.parse(json.dumps(config).encode()), CniCall.from_environment(environment)
    )


def test_ranges_of_the_runtime_come_first_and_the_old_form_is_known() -> None:
    options = parse(
        {"subnet": "10.1.0.0/16", "ranges": [[{"subnet": "10.2.0.0/16"}]]},
        runtimeConfig={"ipRanges": [[{"subnet": "10.0.0.0/16"}]]},
    )
    assert [str(s.ranges[0].subnet) for s in options.sets] == [
        "10.0.0.0/16",
        "10.1.0.0/16",
        "10.2.0.0/16",
    ]


@pytest.mark.parametrize(
    ("changes", "args"),
    [
        ({"runtimeConfig": {"ips": ["10.1.0.9"]}}, ""),
        ({"args": {"cni": {"ips": ["10.1.0.9/16"]}}}, ""),
        ({}, "IP=10.1.0.9"),
        ({"runtimeConfig": {"ips": ["10.1.0.9"]}}, "IP=10.1.0.9"),
    ],
)
def test_requested_addresses_come_from_three_places(changes: dict[str, Any], args: str) -> None:
    assert [
        str(a) for a in parse({"subnet": "10.1.0.0/16"}, cni_args=args, **changes).requested
    ] == ["10.1.0.9"]


@pytest.mark.parametrize(
    ("ipam", "changes", "words"),
    [
        (
            {"subnet": "10.1.0.0/16"},
            {"runtimeConfig": {"ips": ["10.2.0.9"]}},
            "is not in any range",
        ),
        (
            {"subnet": "10.1.0.0/16"},
            {"runtimeConfig": {"ips": ["10.1.0.9", "10.1.0.8"]}},
            "two requested",
        ),
        ({"subnet": "10.1.0.0/16"}, {"runtimeConfig": {"ips": ["x"]}}, "not an address"),
        ({"subnet": "10.1.0.0/16"}, {"runtimeConfig": {"ips": "10.1.0.9"}}, "not a list"),
        ({}, {}, "needs ranges or a subnet"),
        ([], {}, "not an object"),
        ({"subnet": "10.1.0.0/16", "dataDir": "relative"}, {}, "absolute"),
        ({"subnet": "10.1.0.0/16", "routes": {}}, {}, "not a list"),
        ({"subnet": "10.1.0.0/16", "routes": [{"dst": "x"}]}, {}, "not a network"),
        ({"subnet": "10.1.0.0/16", "resolvConf": "/nowhere"}, {}, "No such file"),
        ({"ranges": [[{"subnet": "10.1.0.0/16"}], [{"subnet": "10.1.2.0/24"}]]}, {}, "overlap"),
    ],
)
def test_invalid_settings_are_refused(ipam: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CniError, match=words):
        parse(ipam, **changes)


def test_resolver_settings_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text(
        "# comment\nnameserver 10.0.0.1\nnameserver fd00::1\nsearch a.b c.d\noptions ndots:5"
        " rotate\ndomain a.b\n"
    )
    dns = parse({"subnet": "10.1.0.0/16", "resolvConf": str(path)}).dns
    assert dns.nameservers == ("10.0.0.1", "fd00::1") and dns.search == ("a.b", "c.d")
    assert dns.options == ("ndots:5", "rotate") and dns.domain == "a.b"
