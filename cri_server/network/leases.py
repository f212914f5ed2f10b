"""How many of a network's addresses are taken, as host-local keeps them: a file by the address's
name in the network's folder.

Works for ours and for the reference plugin, whose files are the same.
"""

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
class Usage:
    """Addresses of one network and one IP version: `taken` of `size`."""

    network: str
    version: int
    taken: int
    size: int


def usage(network: NetworkList) -> list[Usage]:
    """What is taken; nothing for a network whose addresses another plugin keeps. Touches the disk.
    Raises OSError."""
    found = []
    for plugin in network.plugins:
        ipam = plugin.get("ipam")
        if isinstance(ipam, dict) and ipam.get("type") == HOST_LOCAL:
            folder = os.path.join(str(ipam.get("dataDir") or DEFAULT_FOLDER), network.name)
            taken = [version for name in entries(folder) if (version := _version(name))]
            sizes: dict[int, int] = {}
            for version, size in _ranges(ipam):
                sizes[version] = sizes.get(version, 0) + size
            found += [
                Usage(network.name, v, taken.count(v), size) for v, size in sorted(sizes.items())
            ]
    return found


def _version(name: str) -> int:
    """4 or 6 for the name of a lease, 0 for any other file."""
    try:
        return parse_address(name).version
    except ValueError:
        return 0


def _ranges(ipam: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Version and size of each range; what is no range is the plugin's to complain about."""
    given = [r for group in ipam.get("ranges") or [] if isinstance(group, list) for r in group]
    for each in [ipam, *given]:
        try:
            subnet = parse_network(each["subnet"], strict=False)
            first = parse_address(each["rangeStart"]) if "rangeStart" in each else subnet[1]
            last = parse_address(each["rangeEnd"]) if "rangeEnd" in each else subnet[-2]
        except (KeyError, TypeError, ValueError, IndexError):
            continue
        yield subnet.version, max(0, int(last) - int(first) + 1)
