"""Runs pyrunc's plugins under the specification's own runtime library: cnitool, built from libcni's
module."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cni_plugins.install import install
from tests.kernel.cni.harness import Host, all_elements, link_names, listen, reach
from tests.kernel.cni.test_bridge import leases
from tests.support import toolchain

pytestmark = pytest.mark.timeout(600)  # the first use builds cnitool
LIBCNI = "v1.3.0"


def cnitool() -> Path:
    out = toolchain.cache() / "peer" / f"cnitool-{LIBCNI}"
    if not (out / "cnitool").exists():
        module = "github.com/containernetworking/cni"
        toolchain.build_module("cnitool", f"{module}@{LIBCNI}", [f"{module}/cnitool"], out)
    return out / "cnitool"


def in_one_life(folder: Path, *steps: str) -> str:
    """Run shell lines in a mount namespace in which libcni's cache, /var/lib/cni, is a tmpfs;
    return their output."""
    environment = {
        "PATH": os.environ["PATH"],
        "CNI_PATH": str(folder / "bin"),
        "NETCONFPATH": str(folder / "net.d"),
        "CAP_ARGS": json.dumps(
            {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}
        ),
        "CNITOOL": str(cnitool()),
    }
    script = "\n".join(
        ("set -e", "mkdir -p /var/lib/cni", "mount -t tmpfs cache /var/lib/cni", *steps)
    )
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def prepare(host: Host, cni_version: str) -> Path:
    folder = Path(host.folder)
    install(str(folder / "bin"))
    (folder / "net.d").mkdir()
    bridge = {
        k: v
        for k, v in host.bridge_config(ipMasq=True, hairpinMode=True).items()
        if k not in ("cniVersion", "name")
    }
    plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
    content = {"cniVersion": cni_version, "name": "net", "plugins": plugins}
    (folder / "net.d/10-net.conflist").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("cni_version", ["0.4.0", "1.0.0", "1.1.0"])
def test_libcni_calls_add_check_and_del(host: Host, cni_version: str) -> None:
    folder, pod = prepare(host, cni_version), host.pod()
    result = json.loads(in_one_life(folder, f"$CNITOOL add net {pod.path}"))
    assert [ip["address"] for ip in result["ips"]] == ["10.88.0.2/16", "fd88::2/64"]
    with listen(pod.fd, "0.0.0.0", 80) as server:
        assert reach(None, "127.0.0.1", 8080, server) == "10.88.0.1"
    other = host.pod()
    in_one_life(
        folder,
        f"$CNITOOL del net {pod.path}",  # another life: libcni has no cached result for it
        "unset CAP_ARGS",
        f"$CNITOOL add net {other.path} >/dev/null",
        f"$CNITOOL check net {other.path}",
        f"$CNITOOL del net {other.path}",
        f"$CNITOOL del net {other.path}",
    )
    assert (
        not leases(host)
        and not all_elements()
        and not [n for n in link_names() if n.startswith("veth")]
    )


def test_libcni_calls_status_and_gc(host: Host) -> None:
    folder, attached, unknown = prepare(host, "1.1.0"), host.pod(), host.pod()
    in_one_life(
        folder,
        f"$CNITOOL status net {attached.path}",
        f"CAP_ARGS= $CNITOOL add net {unknown.path} >/dev/null",
        "rm -r /var/lib/cni/results",
        f"$CNITOOL add net {attached.path} >/dev/null",
        # cnitool passes no list of valid attachments. libcni detaches the attachments in its own
        # cache; the plugins' GC fails and removes nothing.
        f"! $CNITOOL gc net {attached.path} 2>$NETCONFPATH/said",
    )
    assert "needs a list in cni.dev/valid-attachments" in (folder / "net.d/said").read_text()
    assert (
        leases(host) == {"10.88.0.2", "fd88::2"} and len({e.comment for e in all_elements()}) == 1
    )
