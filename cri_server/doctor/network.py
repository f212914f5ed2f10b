"""Checks of the pods' network: CNI configuration and plugins, forwarding, addresses, and firewalls
of other software."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from cni_plugins.protocol.builtin import MODULES
from cni_plugins.protocol.config import NetworkList
from cri_server.doctor.model import CheckResult, Level, Machine, fine, note, warning, wrong
from cri_server.network.configuration import Configuration, ConfiguredNetwork, builtin_network
from cri_server.network.leases import usage
from pyrunc.errors import Error
from pyrunc.kernel.mountinfo import mount_points

FEW_LEFT = 0.9  # doctor warns when this share of the addresses is taken
NFT_S = 10.0


def network(host: Machine) -> ConfiguredNetwork:
    """Return the CNI network that pods get, as the server would choose it. The paths in the result
    lack the prefix `host.top`."""
    settings, default = host.config.network, None
    if settings.builtin:
        folder = str(host.path(host.config.root / "network" / "leases"))
        try:
            default = builtin_network(
                folder, bridge=settings.builtin_bridge, subnets=tuple(settings.builtin)
            )
        except Error as error:
            return ConfiguredNetwork(None, "", error.message)
    decision = Configuration(str(host.path(settings.conf_dir)), default).current()

    def on_machine(text: str) -> str:
        return text.replace(str(host.path(settings.conf_dir)), settings.conf_dir)

    return ConfiguredNetwork(
        decision.network,
        on_machine(decision.source),
        on_machine(decision.problem),
        tuple(map(on_machine, decision.skipped)),
    )


def configuration(host: Machine) -> Iterator[CheckResult]:
    """Check the CNI configuration, its plugins and the free addresses."""
    decided = network(host)
    pods_network = decided.network
    folder = host.config.network.conf_dir
    if pods_network is None:
        remedy = (
            f"correct {decided.source}, or remove it: only the first file by name is used"
            if decided.source
            else f"install the cluster's network add-on, such as flannel, which writes to {folder},"
            ' or without one set [network] builtin = ["10.85.0.0/16"]'
        )
        yield wrong(
            "cni-config",
            decided.problem,
            "the node is NetworkReady=false: only pods with host networking start",
            remedy,
        )
        return
    kinds = [str(plugin["type"]) for plugin in pods_network.plugins]
    text = f"{pods_network.name} of {decided.source}: {', '.join(kinds)}"
    if decided.skipped:
        yield warning(
            "cni-config",
            "; ".join((text, *decided.skipped)),
            f"pods get the network of {decided.source}, because the other file has none",
            f"write a network configuration into the other file, or remove it from {folder}",
        )
    else:
        yield fine("cni-config", text)
    yield _plugins(host, pods_network, kinds)
    yield from _addresses(host, pods_network)


def _plugins(host: Machine, network: NetworkList, kinds: list[str]) -> CheckResult:
    ipams = [str(p["ipam"].get("type")) for p in network.plugins if isinstance(p.get("ipam"), dict)]
    folders = [folder for folder in host.config.network.bin_dir.split(":") if folder]
    needed = dict.fromkeys([*kinds, *filter(None, ipams)])
    missing = [kind for kind in needed if not _is_installed(host, kind, folders)]
    if not missing:
        return fine("cni-plugins", "all plugins are installed")
    return wrong(
        "cni-plugins",
        f"no plugin {', '.join(missing)} in {', '.join(folders)}",
        "no pod gets a network",
        f"reinstall the add-on that wrote {network.name}, or put the executables into"
        f" {folders[0] if folders else 'network.bin_dir'}",
    )


def _is_installed(host: Machine, kind: str, folders: list[str]) -> bool:
    return kind in MODULES or any(
        os.access(host.path(f"{folder}/{kind}"), os.X_OK) for folder in folders
    )


def _addresses(host: Machine, network: NetworkList) -> Iterator[CheckResult]:
    for each in usage(network) if host.top == Path("/") else ():
        text = (
            f"{each.taken} of {each.size} IPv{each.version} addresses of {each.network} are taken"
        )
        if each.taken < FEW_LEFT * each.size:
            yield fine("addresses", text)
        else:
            yield warning(
                "addresses",
                text,
                "pods cannot start when all are taken",
                "add ranges to the network, or lower kubelet's maxPods; addresses of removed pods"
                " are released within 10 s",
            )


def names(host: Machine) -> Iterator[CheckResult]:
    """Check that `netns_dir` is on a shared mount. Otherwise add-ons whose pods mount this folder
    do not see the network namespaces of pods that start later."""
    if host.top != Path("/"):
        return
    folder = host.config.network.netns_dir
    real = os.path.realpath(folder)
    around = [m for m in mount_points() if m.path == "/" or f"{real}/".startswith(f"{m.path}/")]
    # The innermost mount decides: a new mount propagates to the peers of the one that it lies on.
    if "shared" in max(around, key=lambda m: len(m.path)).propagation:
        yield fine("netns-dir", f"{folder} is on a shared mount")
        return
    yield note(
        "netns-dir",
        f"{folder} is not on a shared mount",
        "add-ons whose pods mount the folder (Cilium, Istio, multus, Antrea) do not start, or do"
        " not see new pods; systemd shares all mounts",
        "mount --make-rshared /",
    )


def forwarding(host: Machine) -> Iterator[CheckResult]:
    """Check that the kernel forwards packets."""
    if host.number("/proc/sys/net/ipv4/ip_forward") == 1:
        yield fine("ip-forward", "on")
        return
    decided = network(host).network
    ours = decided is not None and any(plugin["type"] == "bridge" for plugin in decided.plugins)
    yield CheckResult(
        "ip-forward",
        Level.NOTE if ours else Level.WARNING,
        "net.ipv4.ip_forward is 0",
        "the plugin bridge turns it on with the first pod, but kubeadm requires it before"
        if ours
        else "pods cannot reach addresses outside the node, unless their plugin turns it on, and"
        " kubeadm refuses the node",
        "sysctl -w net.ipv4.ip_forward=1 &&"
        " echo net.ipv4.ip_forward=1 > /etc/sysctl.d/90-forward.conf",
    )


def firewall(host: Machine) -> Iterator[CheckResult]:
    """Run nft to find chains that drop forwarded packets by default, and check that nft works.
    Needs root."""
    import subprocess  # not for a starting server, which skips this check

    program = host.program("nft")
    if not program or os.geteuid():
        return
    try:
        result = subprocess.run(
            [program, "-j", "list", "chains"], capture_output=True, timeout=NFT_S, check=False
        )
        listed = json.loads(result.stdout or "{}").get("nftables", [])
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        yield warning(
            "firewall", f"{program}: {error}", f"masquerading and host ports need {program}"
        )
        return
    if result.returncode:
        text = result.stderr.decode(errors="replace").strip().splitlines()
        yield wrong(
            "firewall",
            f"nft fails: {text[0] if text else f'exit code {result.returncode}'}",
            "masquerading and host ports cannot be set up",
            "modprobe nf_tables, or boot a kernel with CONFIG_NF_TABLES and CONFIG_NF_TABLES_INET",
        )
        return
    chains = [item["chain"] for item in listed if "chain" in item]
    dropping = [c for c in chains if c.get("hook") == "forward" and c.get("policy") == "drop"]
    if dropping:
        names = ", ".join(f"{c['family']} {c['table']} {c['name']}" for c in dropping)
        yield warning(
            "firewall",
            f"the default policy of these chains drops forwarded packets: {names}",
            "packets of pods may be dropped (Docker and firewalld set such policies)",
            "add rules for the pods' bridge there, for Docker:"
            " iptables -I DOCKER-USER -i pods0 -j ACCEPT;"
            " iptables -I DOCKER-USER -o pods0 -j ACCEPT",
        )
    else:
        yield fine("firewall", "nft works, and no chain drops forwarded packets by default")
