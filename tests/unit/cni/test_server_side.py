"""Tests the server's side of CNI without a kernel: the configuration folder, capability arguments,
records of attachments."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cni_plugins.protocol.config import parse_list_object
from cni_plugins.protocol.result import Result
from cri_server.api import api_pb2 as api
from cri_server.network.attachments import Attachment, Attachments
from cri_server.network.capabilities import bandwidth_of, capability_arguments, cni_arguments
from cri_server.network.configuration import Configuration, builtin_network
from cri_server.network.model import PodNetwork, PortMapping
from cri_server.sandboxes.run import pod_network
from cri_server.store.model import Sandbox
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import InvalidArgument

NETWORK = {"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "bridge"}]}


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def pod(**changes: Any) -> PodNetwork:
    return PodNetwork(
        **{
            "sandbox_id": "s1",
            "name": "web",
            "namespace": "default",
            "uid": "u",
            "netns_path": "/x",
            **changes,
        }
    )


# the folder


def test_the_first_file_by_name_is_the_network(tmp_path: Path) -> None:
    configuration = Configuration(str(tmp_path), None)
    assert (
        configuration.current().network is None and str(tmp_path) in configuration.current().problem
    )
    write(tmp_path, "00-notes.txt", NETWORK)
    write(tmp_path, "20-b.json", {**NETWORK, "name": "b"})
    write(tmp_path, "30-c.conf", {"cniVersion": "0.4.0", "name": "c", "type": "bridge"})
    assert configuration.current().network.name == "b"  # type: ignore[union-attr]
    (tmp_path / "20-b.json").unlink()
    assert configuration.current().network.name == "c"  # type: ignore[union-attr]


FAULTY: list[tuple[Any, str]] = [
    ({**NETWORK, "cniVersion": "0.9.0"}, "'0.9.0' is not supported (supported are 0.1.0,"),
    ({**NETWORK, "cniVersion": "2.0.0"}, "'2.0.0' is not supported"),
    ({**NETWORK, "cniVersion": 1}, "cniVersion: not a string"),
    ({**NETWORK, "name": ""}, "name: missing or not a string"),
    ({**NETWORK, "name": "a b"}, "name: 'a b'"),
    ({**NETWORK, "plugins": []}, "plugins: missing, not a list or empty"),
    ({"cniVersion": "1.0.0", "name": "net"}, "plugins: missing"),
    ({**NETWORK, "plugins": [{"name": "a"}]}, "plugins[0].type: missing"),
    ({**NETWORK, "disableCheck": "no"}, "disableCheck: not a boolean"),
    ("{", "not JSON"),
    ('{"cniVersion": "1.0.0", "name": "net", "plug', "not JSON"),
    ("  \n{ // a comment\n}", "not JSON"),
    ("{" + " " * (1 << 20), "more than 1048576 bytes"),
]


@pytest.mark.parametrize(("content", "problem"), FAULTY, ids=[problem for _, problem in FAULTY])
def test_a_file_that_is_wrong_decides_and_the_next_file_is_not_used(
    tmp_path: Path, content: Any, problem: str
) -> None:
    """Neither the next file nor the built-in network is used: pods would get addresses that the
    cluster does not know."""
    write(tmp_path, "10-first.conflist", content)
    write(tmp_path, "20-next.conflist", NETWORK)
    current = Configuration(str(tmp_path), builtin_network("/leases")).current()
    assert current.network is None and current.source == f"{tmp_path}/10-first.conflist"
    assert current.problem.startswith(current.source) and problem in current.problem
    assert current.skipped == ()


def test_a_file_that_cannot_be_read_decides(tmp_path: Path) -> None:
    (tmp_path / "10-first.conflist").symlink_to("/nowhere")
    write(tmp_path, "20-next.conflist", NETWORK)
    configuration = Configuration(str(tmp_path), None)
    assert configuration.current().problem == f"{tmp_path}/10-first.conflist is a dangling link"
    (tmp_path / "10-first.conflist").unlink()
    assert configuration.current().network is not None


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("#!/bin/sh\n", "is not a JSON object"),
        ("name: net\n", "is not a JSON object"),
        ("[]", "is not a JSON object"),
    ],
)
def test_files_that_are_not_json_objects_are_skipped_and_reported(
    tmp_path: Path, content: str, what: str
) -> None:
    write(tmp_path, "10-first.conflist", content)
    configuration = Configuration(str(tmp_path), None)
    message = f"{tmp_path}/10-first.conflist is skipped: it {what}"
    assert message in configuration.current().problem
    write(tmp_path, "20-next.conflist", NETWORK)
    assert configuration.current().network.name == "net"  # type: ignore[union-attr]
    assert configuration.current().problem == "" and configuration.current().skipped == (message,)


@pytest.mark.parametrize("old", ["0.1.0", "0.2.0", "", None])
def test_a_list_of_the_first_versions_or_without_a_version_is_used(
    tmp_path: Path, old: str | None
) -> None:
    version = {} if old is None else {"cniVersion": old}
    write(
        tmp_path, "10-first.conflist", {"name": "old", "plugins": [{"type": "bridge"}], **version}
    )
    write(tmp_path, "20-next.conflist", NETWORK)
    network = Configuration(str(tmp_path), None).current().network
    # libcni reads an empty and a missing version as 0.1.0.
    assert network is not None and (network.name, network.cni_version) == ("old", old or "0.1.0")


def test_the_folder_is_parsed_again_only_after_a_change(tmp_path: Path) -> None:
    write(tmp_path, "10-a.conflist", NETWORK)
    configuration = Configuration(str(tmp_path), None)
    assert configuration.current() is configuration.current()


def kinds(configuration: Configuration) -> list[str]:
    network = configuration.current().network
    assert network is not None, configuration.current().problem
    return [str(plugin["type"]) for plugin in network.plugins]


def test_plugins_in_the_networks_folder_are_appended(tmp_path: Path) -> None:
    """Since CNI 1.1.0 the folder with a network's name may hold the network's plugins. A change in
    this folder changes the network."""
    write(tmp_path, "10-a.conflist", NETWORK)
    configuration = Configuration(str(tmp_path), None)
    assert kinds(configuration) == ["bridge"]
    (tmp_path / "net").mkdir()
    (tmp_path / "other").mkdir()
    write(tmp_path, "other/1.conf", {"type": "wrong"})
    write(tmp_path, "net/20-b.conf", {"type": "portmap"})
    write(tmp_path, "net/10-a.conf", {"type": "tuning"})
    write(tmp_path, "net/05-a.conflist", {"type": "wrong"})
    assert kinds(configuration) == ["bridge", "tuning", "portmap"]
    write(tmp_path, "10-a.conflist", {**NETWORK, "loadOnlyInlinedPlugins": True})
    assert kinds(configuration) == ["bridge"]
    write(tmp_path, "10-a.conflist", {"cniVersion": "1.1.0", "name": "net"})
    assert kinds(configuration) == ["tuning", "portmap"]
    write(tmp_path, "10-a.conflist", {"cniVersion": "1.0.0", "name": "net", "type": "lone"})
    assert kinds(configuration) == ["lone"]
    write(tmp_path, "10-a.conflist", NETWORK)
    write(tmp_path, "net/20-b.conf", "{")
    assert (
        configuration.current().network is None and "20-b.conf" in configuration.current().problem
    )
    write(tmp_path, "10-a.conflist", {**NETWORK, "name": "../net"})
    assert configuration.current().network is None and "name" in configuration.current().problem


def test_the_default_network_is_used_while_the_folder_is_empty(tmp_path: Path) -> None:
    configuration = Configuration(str(tmp_path / "missing"), builtin_network("/leases"))
    assert configuration.current().network.name == "pyrunc"  # type: ignore[union-attr]
    assert configuration.current().source == "built in"
    configuration.replace(str(tmp_path / "missing"), None)
    assert configuration.current().network is None


def test_the_built_in_network_has_routes_of_its_families() -> None:
    network = builtin_network("/leases", subnets=("10.1.0.0/24",))
    assert network["plugins"][0]["ipam"]["routes"] == [{"dst": "0.0.0.0/0"}]
    assert parse_list_object(network).cni_version == "1.1.0"


def test_the_built_in_network_needs_valid_subnets() -> None:
    with pytest.raises(InvalidArgument):
        builtin_network("/leases", subnets=("10.1.0.9/24",))


# what pods ask for


def test_unrequested_capabilities_are_left_out() -> None:
    assert capability_arguments(pod(port_mappings=(PortMapping(0, 80),)), ()) == {}


@pytest.mark.requirement("3.1.8")
def test_every_capability_is_passed() -> None:
    network = pod(
        port_mappings=(PortMapping(8080, 80), PortMapping(0, 81)),
        dns={"servers": ["10.0.0.1"], "searches": ["a.b"], "options": ["ndots:5"]},
        annotations={"a": "b", "kubernetes.io/ingress-bandwidth": "1M"},
        cgroup_path="/kubepods/x",
    )
    assert capability_arguments(network, ("10.0.0.0/24",)) == {
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""}],
        "dns": {"servers": ["10.0.0.1"], "searches": ["a.b"], "options": ["ndots:5"]},
        "bandwidth": {
            "ingressRate": 10**6,
            "ingressBurst": (1 << 32) - 1,
            "egressRate": 0,
            "egressBurst": 0,
        },
        "io.kubernetes.cri.pod-annotations": network.annotations,
        "ipRanges": [[{"subnet": "10.0.0.0/24"}]],
        "cgroupPath": "/kubepods/x",
    }


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1M", 10**6),
        ("10k", 10**4),
        ("1Gi", 2**30),
        ("1e6", 10**6),
        ("2.5M", 2_500_000),
        ("1000", 1000),
        ("1P", 10**15),
    ],
)
def test_bandwidth_annotations_are_parsed(text: str, rate: int) -> None:
    assert bandwidth_of({"kubernetes.io/egress-bandwidth": text}) == {
        "ingressRate": 0,
        "ingressBurst": 0,
        "egressRate": rate,
        "egressBurst": (1 << 32) - 1,
    }


@pytest.mark.parametrize("text", ["1", "2P", "-1M", "1MB", "fast", "1e", "9" * 100, " 1M"])
def test_an_invalid_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        bandwidth_of({"kubernetes.io/ingress-bandwidth": text})


@given(st.text(max_size=50))
def test_any_annotation_is_converted_or_refused(text: str) -> None:
    try:
        bandwidth = bandwidth_of({"kubernetes.io/ingress-bandwidth": text})
    except InvalidArgument:
        return
    assert not bandwidth or 1000 <= bandwidth["ingressRate"] <= 10**15


def test_plugins_get_the_arguments_of_kubernetes() -> None:
    assert cni_arguments(pod())[0] == ("IgnoreUnknown", "1")
    assert dict(cni_arguments(pod()))["K8S_POD_INFRA_CONTAINER_ID"] == "s1"
    with pytest.raises(InvalidArgument):
        cni_arguments(pod(uid="u;K8S_POD_NAME=other"))


def test_a_pods_configuration_becomes_its_network() -> None:
    config = api.PodSandboxConfig(
        metadata=api.PodSandboxMetadata(name="web", uid="u", namespace="default"),
        annotations={"kubernetes.io/egress-bandwidth": "1M"},
        dns_config=api.DNSConfig(servers=["10.0.0.1"], options=["ndots:5"]),
        port_mappings=[
            api.PortMapping(
                host_port=80, container_port=8080, protocol=api.SCTP, host_ip="192.0.2.1"
            ),
            api.PortMapping(host_port=0, container_port=81),
        ],
    )
    config.linux.cgroup_parent = "kubepods-podx.slice"
    sandbox = Sandbox(
        "s1", config, "", 1, "boot", "kubepods-podx.slice", "kubepods-podx.slice:cri-pyrunc:s1"
    )
    assert pod_network(sandbox, "/x") == pod(
        port_mappings=(PortMapping(80, 8080, "sctp", "192.0.2.1"),),
        dns={"servers": ["10.0.0.1"], "searches": [], "options": ["ndots:5"]},
        annotations={"kubernetes.io/egress-bandwidth": "1M"},
        cgroup_path="kubepods-podx.slice",
    )


# what is remembered


def attachment(**changes: Any) -> Attachment:
    given_: dict[str, Any] = {
        "sandbox_id": "s1",
        "network": parse_list_object(NETWORK),
        "netns_path": "/proc/1/fd/9",
        "netns_id": "4:77",
        "arguments": (("IgnoreUnknown", "1"),),
        "capabilities": {"dns": {"servers": ["10.0.0.1"]}},
        "result": None,
    }
    return Attachment(**{**given_, **changes})


def test_attachments_are_stored_and_read_unchanged(tmp_path: Path) -> None:
    attachments = Attachments(str(tmp_path / "state"))
    assert attachments.read("s1") is None and attachments.all() == ([], [])
    result = Result.from_json({"ips": [{"address": "10.0.0.2/8"}]}, default_version="1.0.0")
    for value in (attachment(), attachment(result=result)):
        attachments.write(value)
        assert attachments.read("s1") == value and attachments.all() == ([value], [])
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    for _ in range(2):
        attachments.remove("s1")
    assert attachments.read("s1") is None


@pytest.mark.parametrize(
    "content",
    ["\0", "{", "[]", "{}", '{"version": 1}', '{"version": 99}', '{"version":1,"network":{}}'],
)
def test_a_damaged_record_is_reported_and_the_others_are_read(tmp_path: Path, content: str) -> None:
    attachments = Attachments(str(tmp_path))
    attachments.write(attachment())
    write(tmp_path, "s0.json", content)
    readable, damaged = attachments.all()
    assert (
        [a.sandbox_id for a in readable] == ["s1"] and len(damaged) == 1 and "s0.json" in damaged[0]
    )
    with pytest.raises(DamagedRecord):
        attachments.read("s0")
    assert attachments.has("s0")


def test_only_a_new_record_is_renamed_before_its_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, names = os.fsync, list[list[str]]()

    def noted(descriptor: int) -> None:
        names.append(os.listdir(tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    Attachments(str(tmp_path)).write(attachment())
    assert names[0] == ["s1.json"]
    for _ in range(2):
        names.clear()
        Attachments(str(tmp_path)).write(attachment())
        assert len(names[0]) == 2, "the earlier record stays until the new one is synced"


def test_a_record_without_content_is_no_attachment(tmp_path: Path) -> None:
    attachments = Attachments(str(tmp_path))
    for read in (attachments.all, lambda: attachments.read("s0")):
        # As after a power cut.
        write(tmp_path, "s0.json", "")
        assert read() in (([], []), None) and not attachments.has("s0")
