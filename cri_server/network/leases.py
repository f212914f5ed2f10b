"""Counts the leased addresses of a network by the files in host-local's folder, one for each
address. The files of the reference plugin have the same form as those of pyrunc's plugin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address as parse_address
from ipaddress import ip_network as parse_network
from typing import Any

from cni_plugins.protocol.config import NetworkList
from cri_server.store.facts import entries

HOST_LOCAL, DEFAULT_FOLDER = "host-local", "/var/lib/cni/networks"


@dataclass(frozen=True, slots=True)
class LeaseUsage:
    """How many addresses of a network are leased, for one IP version (`version`: 4 or 6): `taken`
    of the `size` addresses in the network's ranges."""

    network: str
    version: int
    taken: int
    size: int


def usage(network: NetworkList) -> list[LeaseUsage]:
    """Count the leases of a network, by IP version. Empty if a plugin other than host-local manages
    the addresses. Reads the disk. Raises OSError."""
    usages = []
    for plugin in network.plugins:
        ipam = plugin.get("ipam")
        if isinstance(ipam, dict) and ipam.get("type") == HOST_LOCAL:
            folder = os.path.join(str(ipam.get("dataDir") or DEFAULT_FOLDER), network.name)
            leased = [version for name in entries(folder) if (version := _version(name))]
            sizes: dict[int, int] = {}
            for version, size in _ranges(ipam):
                sizes[version] = sizes.get(version, 0) + size
            usages += [
                LeaseUsage(network.name, v, leased.count(v), size)
                for v, size in sorted(sizes.items())
            ]
    return usages


def _version(name: str) -> int:
    """Return the IP version of the address `name`, the file name of a lease; 0 if `name` is no
    address."""
    try:
        return parse_address(name).version
    except ValueError:
        return 0


def _ranges(ipam: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield (IP version, number of addresses) of each range in a configuration of host-local. Skip
    invalid ranges: the plugin itself reports them."""
    ranges = [r for group in ipam.get("ranges") or [] if isinstance(group, list) for r in group]
    for address_range in [ipam, *ranges]:
        try:
            subnet = parse_network(address_range["subnet"], strict=False)
            first = parse_address(address_range.get("rangeStart") or subnet[1])
            last = parse_address(address_range.get("rangeEnd") or subnet[-2])
        except (AttributeError, KeyError, TypeError, ValueError, IndexError):
            continue
        yield subnet.version, max(0, int(last) - int(first) + 1)
