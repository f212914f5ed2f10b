"""The pods' network: CNI's configuration and plugins, forwarding, addresses, and firewalls of
others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from cni_plugins.protocol.builtin import MODULES
from cni_plugins.protocol.config import NetworkList
from cri_server.doctor.model import Finding, Host, Level, fine
from cri_server.network.configuration import Configuration, ConfiguredNetwork, builtin_network
from cri_server.network.leases import usage
from pyrunc.errors import Error
from pyrunc.kernel.mountinfo import mount_points

FEW_LEFT = 0.9
NFT_S = 10.0


def network(host: Host) -> ConfiguredNetwork:
    """What pods are attached to, with the machine's paths."""
    given, default = host.config.network, None
    if given.builtin:
        folder = str(host.path(host.config.root / "network" / "leases"))
        try:
            default = builtin_network(
                folder, bridge=given.builtin_bridge, subnets=tuple(given.builtin)
            )
        except Error as error:
            return ConfiguredNetwork(None, "", error.message)
    found = Configuration(str(host.path(given.conf_dir)), default).current()

    def said(text: str) -> str:
        return text.replace(str(host.path(given.conf_dir)), given.conf_dir)

    return ConfiguredNetwork(
        found.network, said(found.source), said(found.problem), tuple(map(said, found.passed_over))
    )


def configuration(host: Host) -> Iterator[Finding]:
    decided = network(host)
    found, folder = decided.network, host.config.network.conf_dir
    if found is None:
        mend = (
            f"mend {decided.source}, or remove it: the first file by name decides, whatever comes after it"
            if decided.source
            else f"install the cluster's network add-on (flannel, Calico, Cilium write to {folder}), or without one "
            'set [network] builtin = ["10.85.0.0/16"]'
        )
        yield Finding(
            "cni-config",
            Level.WRONG,
            decided.problem,
            "the node is NetworkReady=false: only pods on the host's network start",
            mend,
        )
        return
    kinds = [str(plugin["type"]) for plugin in found.plugins]
    text = f"{found.name} of {decided.source}: {', '.join(kinds)}"
    if decided.passed_over:
        yield Finding(
            "cni-config",
            Level.WARNING,
            "; ".join((text, *decided.passed_over)),
            f"pods get the network of {decided.source}, which may not be the one that was meant",
            f"write a network configuration into it, or remove it from {folder}",
        )
    else:
        yield fine("cni-config", text)
    yield _plugins(host, found, kinds)
    yield from _addresses(host, found)


def _plugins(host: Host, found: NetworkList, kinds: list[str]) -> Finding:
    ipams = [str(p["ipam"].get("type")) for p in found.plugins if isinstance(p.get("ipam"), dict)]
    folders = [folder for folder in host.config.network.bin_dir.split(":") if folder]
    missing = [kind for kind in dict.fromkeys([*kinds, *filter(None, ipams)]) if not _is_there(host, kind, folders)]  # fmt: skip
    if not missing:
        return fine("cni-plugins", "all are there")
    return Finding(
        "cni-plugins",
        Level.WRONG,
        f"no plugin {', '.join(missing)} in {', '.join(folders)}",
        "no pod gets a network",
        f"install what {found.name} comes from again, or put the executables into {folders[0] if folders else 'network.bin_dir'}",
    )


def _is_there(host: Host, kind: str, folders: list[str]) -> bool:
    return kind in MODULES or any(
        os.access(host.path(f"{folder}/{kind}"), os.X_OK) for folder in folders
    )


def _addresses(host: Host, found: NetworkList) -> Iterator[Finding]:
    for each in usage(found) if host.top == Path("/") else ():
        text = (
            f"{each.taken} of {each.size} IPv{each.version} addresses of {each.network} are taken"
        )
        if each.taken < FEW_LEFT * each.size:
            yield fine("addresses", text)
        else:
            yield Finding(
                "addresses",
                Level.WARNING,
                text,
                "pods fail to start when there is none",
                "give the network more ranges, or lower kubelet's maxPods; addresses of pods that are gone go back by themselves in 10 s",
            )


def names(host: Host) -> Iterator[Finding]:
    """Whether add-ons' pods, which mount the folder of names, see the network namespaces of pods
    that start later."""
    if host.top != Path("/"):
        return
    folder = host.config.network.netns_dir
    real = os.path.realpath(folder)
    around = [m for m in mount_points() if m.path == "/" or f"{real}/".startswith(f"{m.path}/")]
    if "shared" in max(around, key=lambda m: len(m.path)).propagation:
        yield fine("netns-dir", f"{folder} is on a shared mount")
        return
    yield Finding(
        "netns-dir",
        Level.NOTE,
        f"{folder} is not on a shared mount",
        "add-ons whose pods mount it (Cilium, Istio, multus, Antrea) do not start, or do not see new pods; systemd shares all mounts",
        "mount --make-rshared /",
    )


def forwarding(host: Host) -> Iterator[Finding]:
    if host.number("/proc/sys/net/ipv4/ip_forward") == 1:
        yield fine("ip-forward", "on")
        return
    found = network(host).network
    ours = found is not None and any(plugin["type"] == "bridge" for plugin in found.plugins)
    yield Finding(
        "ip-forward",
        Level.NOTE if ours else Level.WARNING,
        "net.ipv4.ip_forward is 0",
        "the plugin bridge turns it on with the first pod; kubeadm wants it before"
        if ours
        else "pods reach nothing outside the node, unless their plugin turns it on; kubeadm refuses the node",
        "sysctl -w net.ipv4.ip_forward=1 && echo net.ipv4.ip_forward=1 > /etc/sysctl.d/90-forward.conf",
    )


def firewall(host: Host) -> Iterator[Finding]:
    """Asks nft for chains that drop what is forwarded; needs root."""
    import subprocess  # which a server that starts can do without

    program = host.program("nft")
    if not program or os.geteuid():
        return
    try:
        done = subprocess.run(
            [program, "-j", "list", "chains"], capture_output=True, timeout=NFT_S, check=False
        )
        listed = json.loads(done.stdout or "{}").get("nftables", [])
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        yield Finding(
            "firewall", Level.WARNING, f"{program}: {error}", "host ports and masquerade need it"
        )
        return
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip().splitlines()
        yield Finding(
            "firewall",
            Level.WRONG,
            f"nft fails: {text[0] if text else f'exit code {done.returncode}'}",
            "masquerade and host ports cannot be set up",
            "modprobe nf_tables, or boot a kernel with CONFIG_NF_TABLES and CONFIG_NF_TABLES_INET",
        )
        return
    chains = [item["chain"] for item in listed if "chain" in item]
    dropping = [c for c in chains if c.get("hook") == "forward" and c.get("policy") == "drop"]
    if dropping:
        names = ", ".join(f"{c['family']} {c['table']} {c['name']}" for c in dropping)
        yield Finding(
            "firewall",
            Level.WARNING,
            f"what is forwarded is dropped unless a rule accepts it: {names}",
            "pods may reach neither each other nor the world (Docker and firewalld do this)",
            "accept the pods' bridge there, for Docker: iptables -I DOCKER-USER -i pods0 -j ACCEPT; iptables -I DOCKER-USER -o pods0 -j ACCEPT",
        )
    else:
        yield fine("firewall", "nft works, and nothing drops what is forwarded")
