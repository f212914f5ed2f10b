"""Tests the values of the CNI specification: versions, requests, configurations, and results of
every version, parsed and written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cni_plugins.protocol import version
from cni_plugins.protocol.call import CniCall, format_arguments, parse_arguments
from cni_plugins.protocol.config import (
    NetworkList,
    PluginConfig,
    decode_object,
    parse_list_object,
    plugin_input,
)
from cni_plugins.protocol.errors import CniError, from_json
from cni_plugins.protocol.result import Result
from tests.unit.cni.peer_results import PEER_RESULTS, PeerResult

FULL: dict[str, Any] = {
    "cniVersion": "1.1.0",
    "interfaces": [
        {"name": "cni0", "mac": "00:11:22:33:44:55", "mtu": 1500},
        {
            "name": "eth0",
            "mac": "99:88:77:66:55:44",
            "sandbox": "/run/netns/x",
            "mtu": 1400,
            "pciID": "0000:00:1f.6",
        },
    ],
    "ips": [
        {"interface": 1, "address": "10.1.0.5/16", "gateway": "10.1.0.1"},
        {"interface": 1, "address": "fd00::5/64"},
    ],
    "routes": [
        {"dst": "0.0.0.0/0"},
        {"dst": "10.2.0.0/16", "gw": "10.1.0.9", "mtu": 1300, "table": 7},
    ],
    "dns": {
        "nameservers": ["10.1.0.1"],
        "domain": "example.org",
        "search": ["a.example.org"],
        "options": ["ndots:5"],
    },
}


def parse_list(content: bytes) -> NetworkList:
    return parse_list_object(decode_object(content, "the configuration"))


def as_object(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


# results


def test_the_newest_form_comes_back_unchanged() -> None:
    assert Result.from_json(FULL, default_version="1.1.0").to_json("1.1.0") == FULL


@pytest.mark.parametrize("old", ["0.3.0", "0.3.1", "0.4.0"])
def test_old_forms_name_the_family_and_lack_route_numbers(old: str) -> None:
    value = Result.from_json(FULL, default_version="1.1.0").to_json(old)
    assert [ip["version"] for ip in value["ips"]] == ["4", "6"]
    assert value["routes"][1] == {"dst": "10.2.0.0/16", "gw": "10.1.0.9"}
    assert set(value["interfaces"][1]) == {"name", "mac", "sandbox"}
    assert value["cniVersion"] == old


LISTS = [v for v in version.SUPPORTED if version.at_least(v, "0.3.0")]


@pytest.mark.parametrize("one", LISTS)
@pytest.mark.parametrize("other", LISTS)
def test_a_conversion_and_back_keeps_common_fields(one: str, other: str) -> None:
    there = Result.from_json(
        Result.from_json(FULL, default_version="1.1.0").to_json(one), default_version=one
    )
    back = Result.from_json(there.to_json(other), default_version=other)
    assert back.to_json("0.3.1") == Result.from_json(FULL, default_version="1.1.0").to_json("0.3.1")


@pytest.mark.parametrize("oldest", ["0.1.0", "0.2.0"])
def test_the_oldest_result_format_has_an_address_per_family(oldest: str) -> None:
    value = Result.from_json(FULL, default_version="1.1.0").to_json(oldest)
    assert value == {
        "cniVersion": oldest,
        "ip4": {
            "ip": "10.1.0.5/16",
            "gateway": "10.1.0.1",
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.2.0.0/16", "gw": "10.1.0.9"}],
        },
        "ip6": {"ip": "fd00::5/64"},
        "dns": FULL["dns"],
    }
    back = Result.from_json(value, default_version=oldest)
    assert [str(a.address) for a in back.addresses_of("eth0", "/run/netns/x")] == [
        "10.1.0.5/16",
        "fd00::5/64",
    ]
    assert back.to_json("0.3.1")["routes"] == [
        {"dst": "0.0.0.0/0"},
        {"dst": "10.2.0.0/16", "gw": "10.1.0.9"},
    ]


def test_a_result_without_version_has_that_of_the_configuration() -> None:
    assert Result.from_json({"ips": []}, default_version="0.4.0") == Result()
    assert (
        Result.from_json({"cniVersion": ""}, default_version="0.2.0").to_json("0.2.0")["cniVersion"]
        == "0.2.0"
    )
    with pytest.raises(CniError) as refused:
        Result.from_json({"ips": []}, default_version="0.9.0")
    assert refused.value.code == 1


# results of others


@pytest.mark.parametrize("peer", PEER_RESULTS, ids=lambda peer: peer.name)
def test_an_add_ons_result_gives_the_pod_its_addresses_and_is_carried_through(
    peer: PeerResult,
) -> None:
    answer = peer.answer_in("/run/netns/x")
    result = Result.from_json(answer, default_version=peer.cni_version)
    assert tuple(str(a.address.ip) for a in result.addresses_of("eth0", "/run/netns/x")) == peer.ips
    answer_version = answer.get("cniVersion") or peer.cni_version
    assert result.to_json(answer_version) == {**answer, "cniVersion": answer_version}
    later = Result.from_json(result.to_json(peer.cni_version), default_version=peer.cni_version)
    assert tuple(str(a.address.ip) for a in later.addresses_of("eth0", "/run/netns/x")) == peer.ips
    macs = [i.mac for i in result.interfaces]
    assert not result.interfaces or [i.mac for i in later.interfaces] == macs


def test_a_result_for_a_moved_namespace_is_passed_on_unchanged_otherwise() -> None:
    aws = PEER_RESULTS[0]
    moved = Result.from_json(aws.answer_in("/proc/7/fd/9"), default_version="0.4.0").with_path(
        "/proc/7/fd/9", "/proc/8/fd/9"
    )
    assert moved.to_json("0.4.0") == aws.answer_in("/proc/8/fd/9")


def test_only_the_pods_addresses_must_parse() -> None:
    interfaces = [{"name": "cni0"}, {"name": "eth0", "sandbox": "/x"}]
    ips = [{"interface": 0, "address": "later"}, {"interface": 1, "address": "10.0.0.1/8"}]
    result = Result.from_json({"interfaces": interfaces, "ips": ips}, default_version="1.0.0")
    assert [str(a.address) for a in result.addresses_of("eth0", "/x")] == ["10.0.0.1/8"]
    for entry in ({"interface": 1, "address": "later"}, {"address": "later"}):
        bad = Result.from_json(
            {"interfaces": interfaces, "ips": [*ips, entry]}, default_version="1.0.0"
        )
        with pytest.raises(CniError, match=r"ips\[2\]\.address"):
            bad.addresses_of("eth0", "/x")


HOSTILE: list[tuple[str, Any]] = [
    ("interfaces type", {"interfaces": {"name": "eth0"}}),
    ("interfaces many", {"interfaces": [{"name": "eth0"}] * 65}),
    ("address", {"ips": [{"address": "10.0.0.1"}]}),
    ("address", {"ips": [{"address": "10.0.0.300/8"}]}),
    ("address", {"ips": [{"address": "10.0.0.1/33"}]}),
    ("address", {"ips": [{"address": "fe80::1%eth0/64"}]}),
    ("address", {"ips": [{"address": 167772161}]}),
    ("address", {"ips": [{"address": None}]}),
    ("address", {"ips": ["10.0.0.1/8"]}),
    ("ips many", {"ips": [{"address": "10.0.0.1/8"}] * 300}),
    ("gateway", {"ips": [{"address": "10.0.0.1/8", "gateway": "router"}]}),
    ("interface index", {"ips": [{"address": "10.0.0.1/8", "interface": 0}]}),
    (
        "interface index",
        {"interfaces": [{"name": "eth0"}], "ips": [{"address": "10.0.0.1/8", "interface": -1}]},
    ),
    (
        "interface index",
        {"interfaces": [{"name": "eth0"}], "ips": [{"address": "10.0.0.1/8", "interface": True}]},
    ),
    (
        "interface index",
        {"interfaces": [{"name": "eth0"}], "ips": [{"address": "10.0.0.1/8", "interface": "0"}]},
    ),
    ("routes", {"routes": [{"dst": "nowhere"}]}),
    ("routes", {"routes": [{"gw": "10.0.0.1"}]}),
    ("routes many", {"routes": [{"dst": "0.0.0.0/0"}] * 513}),
    ("route number", {"routes": [{"dst": "0.0.0.0/0", "table": -1}]}),
    ("route number", {"routes": [{"dst": "0.0.0.0/0", "scope": 256}]}),
    ("dns", {"dns": {"nameservers": ["8.8.8.8\nsearch evil"]}}),
    ("dns", {"dns": {"nameservers": ["resolver"]}}),
    ("dns", {"dns": {"search": ["a\nnameserver 6.6.6.6"]}}),
    ("dns", {"dns": {"search": ["a b"]}}),
    ("dns", {"dns": {"domain": "a\rb"}}),
    ("dns", {"dns": {"options": ["ndots:5\n"]}}),
    ("dns", {"dns": {"options": [""]}}),
    ("dns many", {"dns": {"search": ["a"] * 65}}),
    ("dns type", {"dns": []}),
    ("version", {"cniVersion": "9.9.9"}),
    ("version", {"cniVersion": 1}),
    ("result type", []),
    ("result type", "10.0.0.1"),
    ("result type", None),
]


@pytest.mark.parametrize(
    "value",
    [value for _, value in HOSTILE],
    ids=[f"{n}-{what}" for n, (what, _) in enumerate(HOSTILE)],
)
def test_a_plugin_refuses_a_hostile_previous_result(value: Any) -> None:
    with pytest.raises(CniError):
        Result.from_json(value, default_version="1.0.0", strict=True)


STRUCTURE = (
    "interfaces type",
    "interfaces many",
    "ips many",
    "interface index",
    "version",
    "result type",
)


@pytest.mark.parametrize(
    ("what", "value"), HOSTILE, ids=[f"{n}-{w}" for n, (w, _) in enumerate(HOSTILE)]
)
def test_the_runtime_refuses_used_fields_of_a_hostile_result(what: str, value: Any) -> None:
    try:
        result = Result.from_json(value, default_version="1.0.0")
        result.addresses_of("eth0", "/x")
    except CniError:
        assert what in STRUCTURE or what == "address"
    else:
        assert what in (
            "gateway",
            "routes",
            "routes many",
            "route number",
            "dns",
            "dns many",
            "dns type",
        )
        assert result.to_json("1.0.0") == {**value, "cniVersion": "1.0.0"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=10,
)
shaped = st.fixed_dictionaries(
    {},
    optional={
        "cniVersion": st.sampled_from(version.SUPPORTED) | json_values,
        "interfaces": (
            st.lists(
                st.fixed_dictionaries(
                    {"name": st.text(max_size=20)},
                    optional={"mac": st.text(), "sandbox": st.text(), "mtu": json_values},
                ),
                max_size=3,
            )
            | json_values
        ),
        "ips": (
            st.lists(
                st.fixed_dictionaries(
                    {
                        "address": (
                            st.ip_addresses().map(lambda a: f"{a}/{a.max_prefixlen}")
                            | st.text(max_size=60)
                        )
                    },
                    optional={
                        "gateway": st.ip_addresses().map(str) | json_values,
                        "interface": st.integers(-2, 4) | json_values,
                    },
                ),
                max_size=3,
            )
            | json_values
        ),
        "routes": (
            st.lists(
                st.dictionaries(st.sampled_from(["dst", "gw", "mtu"]), json_values), max_size=3
            )
            | json_values
        ),
        "dns": (
            st.dictionaries(
                st.sampled_from(["nameservers", "domain", "search", "options"]),
                st.text() | st.lists(st.text(), max_size=3),
            )
            | json_values
        ),
    },
)


@given(shaped | json_values)
def test_any_result_is_refused_or_safe(value: Any) -> None:
    try:
        result = Result.from_json(value, default_version="1.1.0")
    except CniError:
        return
    words = [*result.dns.nameservers, *result.dns.search, *result.dns.options, result.dns.domain]
    assert all(word.isprintable() and " " not in word for word in words)
    assert Result.from_json(result.to_json("1.1.0"), default_version="1.1.0") == result
    for form in version.SUPPORTED:
        Result.from_json(result.to_json(form), default_version=form)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("fe80::1%eth0/64", "'fe80::1%eth0/64' is not an address with a prefix length"),
        ("10.1.0.5", "'10.1.0.5' is not an address with a prefix length"),
        (None, "None is not an address with a prefix length"),
    ],
)
def test_an_error_quotes_the_address_that_is_wrong(address: object, message: str) -> None:
    result = Result.from_json(
        {**FULL, "ips": [{"interface": 1, "address": address}]}, default_version="1.1.0"
    )
    with pytest.raises(CniError, match=message):
        result.addresses_of("eth0", "/run/netns/x")


def test_addresses_belong_to_the_pods_interface_in_its_sandbox() -> None:
    result = Result.from_json(FULL, default_version="1.1.0")
    assert len(result.addresses_of("eth0", "/run/netns/x")) == 2
    assert len(result.addresses_of("eth0", "")) == 2
    assert result.addresses_of("cni0", "/run/netns/other") == ()
    host = {**FULL, "ips": [{"interface": 0, "address": "10.1.0.1/16"}]}
    assert (
        Result.from_json(host, default_version="1.1.0").addresses_of("eth0", "/run/netns/x") == ()
    )


# errors


@given(json_values)
def test_any_error_object_becomes_an_error(value: Any) -> None:
    error = from_json({"code": value, "msg": value, "details": value})
    assert isinstance(error.code, int) and error.message and "\n" not in error.message


def test_an_error_object_has_the_fields_of_the_specification() -> None:
    assert CniError(7, "wrong", "very").to_json("1.0.0") == {
        "cniVersion": "1.0.0",
        "code": 7,
        "msg": "wrong",
        "details": "very",
    }


# requests

ENVIRONMENT = {
    "CNI_COMMAND": "ADD",
    "CNI_CONTAINERID": "abc",
    "CNI_NETNS": "/proc/1/fd/9",
    "CNI_IFNAME": "eth0",
    "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAME=a",
    "CNI_PATH": "/opt/cni/bin:/usr/lib/cni",
}


def test_a_request_is_encoded_and_parsed_unchanged() -> None:
    call = CniCall.from_environment(ENVIRONMENT)
    assert call.path == ("/opt/cni/bin", "/usr/lib/cni") and call.argument("K8S_POD_NAME") == "a"
    assert call.environment() == ENVIRONMENT


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("ADD", {"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"}),
        ("CHECK", {"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"}),
        ("DEL", {"CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"}),
        ("GC", {"CNI_PATH"}),
        ("STATUS", set()),
        ("VERSION", set()),
    ],
)
def test_each_command_requires_its_variables(command: str, needed: set[str]) -> None:
    for name in ENVIRONMENT.keys() - {"CNI_COMMAND"}:
        given_ = {k: v for k, v in ENVIRONMENT.items() if k != name} | {"CNI_COMMAND": command}
        if name in needed:
            with pytest.raises(CniError, match=name) as refused:
                CniCall.from_environment(given_)
            assert refused.value.code == 4
        else:
            assert CniCall.from_environment(given_).command == command


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CNI_COMMAND", "FROB"),
        ("CNI_CONTAINERID", "../x"),
        ("CNI_CONTAINERID", "-x"),
        ("CNI_CONTAINERID", "x" * 300),
        ("CNI_CONTAINERID", "a b"),
        ("CNI_IFNAME", "e/0"),
        ("CNI_IFNAME", "e:0"),
        ("CNI_IFNAME", ".."),
        ("CNI_IFNAME", "e" * 16),
        ("CNI_IFNAME", "e 0"),
        ("CNI_ARGS", "no equals"),
        ("CNI_ARGS", "A=1;;B=2"),
    ],
)
def test_an_invalid_request_is_refused(name: str, value: str) -> None:
    with pytest.raises(CniError) as refused:
        CniCall.from_environment({**ENVIRONMENT, name: value})
    assert refused.value.code == 4


@given(st.lists(st.tuples(st.text(max_size=12), st.text(max_size=30)), max_size=5))
def test_arguments_are_read_back_unchanged_or_refused(pairs: list[tuple[str, str]]) -> None:
    """Otherwise a pod's name could add arguments to CNI_ARGS."""
    try:
        text = format_arguments(tuple(pairs))
    except CniError:
        return
    assert parse_arguments(text) == tuple(pairs)
    assert "\n" not in text and "\0" not in text


# configurations

LIST = {
    "cniVersion": "1.0.0",
    "name": "net",
    "plugins": [
        {"type": "bridge", "bridge": "br7", "ipam": {"type": "host-local"}},
        {"type": "portmap", "capabilities": {"portMappings": True, "mac": False}},
    ],
}


def test_a_plugin_gets_name_version_result_and_its_declared_capabilities() -> None:
    network = parse_list(as_object(LIST))
    previous = Result.from_json(FULL, default_version="1.1.0")
    offered = {"portMappings": [{"hostPort": 80}], "mac": "00:11:22:33:44:55", "dns": {}}
    bridge = plugin_input(network, network.plugins[0], capabilities=offered)
    assert bridge == {**LIST["plugins"][0], "name": "net", "cniVersion": "1.0.0"}  # type: ignore[index]
    portmap = plugin_input(network, network.plugins[1], capabilities=offered, previous=previous)
    assert portmap["runtimeConfig"] == {"portMappings": [{"hostPort": 80}]}
    assert portmap["prevResult"] == previous.to_json("1.0.0") and "capabilities" not in portmap
    config = PluginConfig.parse(as_object(portmap))
    assert (
        config.capability("portMappings") == [{"hostPort": 80}] and config.capability("mac") is None
    )
    assert config.previous_result() == Result.from_json(
        previous.to_json("1.0.0"), default_version="1.0.0"
    )


def test_a_lone_plugin_is_read_as_a_list() -> None:
    network = parse_list(as_object({"cniVersion": "0.4.0", "name": "net", "type": "bridge"}))
    assert [plugin["type"] for plugin in network.plugins] == ["bridge"]


def test_the_newest_version_that_both_know_is_chosen() -> None:
    assert (
        parse_list(as_object({**LIST, "cniVersions": ["0.4.0", "1.1.0", "9.0.0"]})).cni_version
        == "1.1.0"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "a/b"},
        {"name": 7},
        {"plugins": []},
        {"plugins": {}},
        {"plugins": [{}]},
        {"plugins": [{"type": "../bridge"}]},
        {"plugins": [{"type": ".."}]},
        {"plugins": ["bridge"]},
        {"cniVersion": "2.0.0"},
        {"cniVersion": 1},
        {"cniVersions": "1.0.0"},
        {"disableCheck": "perhaps"},
    ],
)
def test_an_invalid_list_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CniError):
        parse_list(as_object({**LIST, **changes}))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"nonsense", b"[" * 100000, b'"' + b"x" * (1 << 20) + b'"', b"\xff\xfe"]
)
def test_a_list_that_is_no_object_is_refused(content: bytes) -> None:
    with pytest.raises(CniError) as refused:
        parse_list(content)
    assert refused.value.code == 6


def test_the_strings_true_and_false_are_flags_as_in_libcni() -> None:
    assert parse_list(as_object({**LIST, "disableCheck": "true"})).disable_check


def test_valid_attachments_are_parsed() -> None:
    value = {
        "name": "n",
        "type": "t",
        "cniVersion": "1.1.0",
        "cni.dev/valid-attachments": [{"containerID": "a", "ifname": "eth0"}],
    }
    assert PluginConfig.parse(as_object(value)).valid_attachments() == {("a", "eth0")}
    other = {k.replace("valid-", ""): v for k, v in value.items()}
    assert PluginConfig.parse(as_object(other)).valid_attachments() == {("a", "eth0")}
    assert (
        PluginConfig.parse(
            as_object({**value, "cni.dev/valid-attachments": None})
        ).valid_attachments()
        == set()
    )
    for wrong in (False, {}, ["a"], [{"containerID": "a"}]):
        with pytest.raises(CniError):
            PluginConfig.parse(
                as_object({**value, "cni.dev/valid-attachments": wrong})
            ).valid_attachments()
