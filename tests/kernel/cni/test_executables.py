"""The executables of pyrunc's plugins, run as any runtime runs them, and compared with the
reference plugins (Go)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cni_plugins.install import install
from cni_plugins.net import netns
from cni_plugins.protocol.builtin import HEAD_BYTES, is_builtin_script
from tests.kernel.cni.harness import (
    CLIENT,
    HOST_OUTER,
    Host,
    Pod,
    addresses_of,
    all_elements,
    link_names,
    listen,
    reach,
)
from tests.support import toolchain

pytestmark = pytest.mark.timeout(600)  # the first use builds the reference's plugins
NAMES = ("bridge", "host-local", "loopback", "portmap")


@pytest.fixture
def ours(tmp_path: Path) -> str:
    install(str(tmp_path / "bin"))
    return str(tmp_path / "bin")


@pytest.fixture(params=["ours", "reference"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "ours":
        install(str(tmp_path / "bin"))
        return str(tmp_path / "bin")
    return reference()


def reference() -> str:
    """Return the folder of the reference plugins, built once into the cache."""
    return str(toolchain.reference_plugins())


def run(
    folder: str,
    name: str,
    command: str,
    pod: Pod | None,
    config: dict[str, Any],
    path: str = "",
    **environment: str,
) -> tuple[int, Any]:
    """Run a plugin like a runtime, from another folder and with a hostile environment."""
    hostile = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": "/tmp",
        "PYTHONSTARTUP": "/nowhere",
        "CNI_COMMAND": command,
        "CNI_PATH": path or folder,
        "CNI_IFNAME": "eth0",
        **({"CNI_CONTAINERID": pod.id, "CNI_NETNS": pod.path} if pod else {}),
        **environment,
    }
    done = subprocess.run(
        [f"{folder}/{name}"],
        input=json.dumps(config),
        env=hostile,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else None


def chain(
    folder: str, host: Host, pod: Pod, *, cni_version: str = "1.0.0", path: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run ADD of bridge, then portmap; return the input of each for DEL and CHECK."""
    bridge = host.bridge_config(
        cniVersion=cni_version, hairpinMode=True, ipam=host.ipam("10.88.0.0/16")
    )
    code, result = run(folder, "bridge", "ADD", pod, bridge, path)
    assert code == 0, result
    portmap = {
        "cniVersion": cni_version,
        "name": "net",
        "type": "portmap",
        "backend": "nftables",
        "runtimeConfig": {
            "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
        },
        "prevResult": result,
    }
    code, answer = run(folder, "portmap", "ADD", pod, portmap, path)
    assert code == 0, answer
    return {**bridge, "prevResult": answer}, {**portmap, "prevResult": answer}


@pytest.mark.parametrize("name", NAMES)
def test_an_executable_answers_version(either: str, name: str) -> None:
    code, value = run(either, name, "VERSION", None, {"cniVersion": "1.0.0"})
    assert code == 0 and {"0.3.1", "0.4.0", "1.0.0", "1.1.0"} <= set(value["supportedVersions"])


def test_builtin_plugins_are_recognised(ours: str) -> None:
    for name in NAMES:
        assert is_builtin_script(Path(f"{ours}/{name}").read_bytes()[:HEAD_BYTES])
    assert (
        not is_builtin_script(b"#!/bin/sh\necho\n")
        and not is_builtin_script(b"\x7fELF")
        and not is_builtin_script(b"")
    )


@pytest.mark.parametrize("cni_version", ["0.3.1", "0.4.0", "1.0.0", "1.1.0"])
def test_plugins_add_check_and_delete_an_attachment(
    either: str, host: Host, cni_version: str
) -> None:
    host.connect_outside()
    pod = host.pod()
    loopback = {"cniVersion": cni_version, "name": "lo", "type": "loopback"}
    assert run(either, "loopback", "ADD", pod, loopback, CNI_IFNAME="lo")[0] == 0
    bridge, portmap = chain(either, host, pod, cni_version=cni_version)
    result = bridge["prevResult"]
    assert addresses_of(result) == ["10.88.0.2"]
    assert ("version" in result["ips"][0]) == (cni_version in ("0.3.1", "0.4.0"))
    with listen(pod.fd, "0.0.0.0", 80) as server:
        assert reach(host.outside, HOST_OUTER, 8080, server) == CLIENT
        assert reach(None, "127.0.0.1", 8080, server) == "10.88.0.1"
    if cni_version != "0.3.1":
        assert run(either, "bridge", "CHECK", pod, bridge) == (0, None)
        assert run(either, "portmap", "CHECK", pod, portmap) == (0, None)
    for _ in range(2):
        assert run(either, "portmap", "DEL", pod, portmap)[0] == 0
        assert run(either, "bridge", "DEL", pod, bridge)[0] == 0
    assert not [name for name in link_names() if name.startswith("veth")]
    with netns.entered(pod.fd):
        assert "eth0" not in link_names()


def test_the_same_request_has_the_same_result(ours: str, host: Host) -> None:
    """pyrunc's bridge plugin and the reference plugin return the same result, except for the names
    and hardware addresses of network devices, which each generates."""
    results = []
    for folder in (ours, reference()):
        pod = host.pod()
        config = host.bridge_config(
            name=f"net{len(results)}",
            bridge=f"cni{len(results)}",
            cniVersion="1.0.0",
            ipam=host.ipam(
                f"10.{88 + len(results)}.0.0/16",
                f"fd8{len(results)}::/64",
                routes=[{"dst": "10.1.0.0/16"}, {"dst": "0.0.0.0/0"}],
            ),
        )
        code, value = run(folder, "bridge", "ADD", pod, config)
        assert code == 0, value
        for interface in value["interfaces"]:
            interface.pop("mac")
            interface["name"] = (
                "veth" if interface["name"].startswith("veth") else interface["name"]
            )
        text = (
            json.dumps(value)
            .replace(pod.path, "NETNS")
            .replace("10.89.", "10.88.")
            .replace("fd81:", "fd80:")
        )
        results.append(json.loads(text.replace("cni1", "cni0")))
    assert sorted(map(str, results[0].pop("routes"))) == sorted(map(str, results[1].pop("routes")))
    assert results[0] == results[1]


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK", "GC", "STATUS"])
@pytest.mark.parametrize(
    ("config", "environment"),
    [
        ({"cniVersion": "9.0.0", "name": "net", "type": "bridge"}, {}),
        ({"cniVersion": "1.1.0", "name": "net", "type": "bridge"}, {"CNI_COMMAND": "FROB"}),
    ],
)
def test_refusals_have_the_codes_of_the_reference(
    ours: str, host: Host, command: str, config: dict[str, Any], environment: dict[str, str]
) -> None:
    answers = [
        run(folder, "bridge", command, host.pod(), config, **environment)
        for folder in (ours, reference())
    ]
    assert answers[0][0] == answers[1][0] == 1
    assert answers[0][1]["code"] == answers[1][1]["code"]


def test_their_bridge_runs_our_host_local(ours: str, host: Host, tmp_path: Path) -> None:
    pod = host.pod()
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "host-local").symlink_to(f"{ours}/host-local")
    config = host.bridge_config(cniVersion="1.0.0", ipam=host.ipam("10.88.0.0/16"))
    code, value = run(reference(), "bridge", "ADD", pod, config, str(mixed))
    assert code == 0 and addresses_of(value) == ["10.88.0.2"]
    assert (
        run(reference(), "bridge", "DEL", pod, {**config, "prevResult": value}, str(mixed))[0] == 0
    )
    assert not (Path(host.folder) / "leases/net/10.88.0.2").exists()


def test_our_bridge_runs_their_host_local(ours: str, host: Host) -> None:
    pod = host.pod()
    config = host.bridge_config(cniVersion="1.0.0", ipam=host.ipam("10.88.0.0/16"))
    code, value = run(ours, "bridge", "ADD", pod, config, reference())
    assert code == 0 and addresses_of(value) == ["10.88.0.2"]
    lease = Path(host.folder) / "leases/net/10.88.0.2"
    assert lease.read_text().split() == [pod.id, "eth0"]
    assert run(ours, "bridge", "DEL", pod, {**config, "prevResult": value}, reference())[0] == 0
    assert not lease.exists()


def test_our_bridge_removes_an_interface_of_the_reference_bridge(ours: str, host: Host) -> None:
    """DEL of pyrunc's bridge plugin accepts the reference plugin's result of ADD, because a node
    may change its plugins while pods run."""
    pod = host.pod()
    config = host.bridge_config(cniVersion="1.0.0", ipam=host.ipam("10.88.0.0/16"))
    code, value = run(reference(), "bridge", "ADD", pod, config)
    assert code == 0
    assert run(ours, "bridge", "DEL", pod, {**config, "prevResult": value}, reference())[0] == 0
    assert not [name for name in link_names() if name.startswith("veth")] and all_elements() == []


def test_either_host_local_respects_and_releases_the_others_leases(ours: str, host: Host) -> None:
    folder = Path(host.folder) / "leases/net"
    config = {
        "cniVersion": "1.0.0",
        "name": "net",
        "type": "bridge",
        "ipam": host.ipam("10.88.0.0/16"),
    }
    one, two = host.pod(), host.pod()
    for pod, adding in ((one, reference()), (two, ours)):
        code, value = run(adding, "host-local", "ADD", pod, config)
        assert code == 0, value
    assert {p.name: p.read_bytes().decode().split() for p in folder.glob("10.*")} == {
        "10.88.0.2": ["pod0", "eth0"],
        "10.88.0.3": ["pod1", "eth0"],
    }
    assert run(ours, "host-local", "DEL", one, config)[0] == 0
    assert run(reference(), "host-local", "DEL", two, config)[0] == 0
    assert not list(folder.glob("10.*"))
    # its own record is still there, its address is not
    code, value = run(ours, "host-local", "ADD", two, config)
    assert code == 0, value
