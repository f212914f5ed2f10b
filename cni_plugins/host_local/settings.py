"""Parses host-local's options and the addresses that a pod requests.

The range sets come from `runtimeConfig.ipRanges`, from `ipam` itself (the old form, with `subnet`)
and from `ipam.ranges`, in this order. Requested addresses come from `runtimeConfig.ips`,
`args.cni.ips` and `IP=` in CNI_ARGS.
"""

from __future__ import annotations

import functools
import marshal
import os
from dataclasses import dataclass
from ipaddress import ip_address as parse_address
from typing import Any

from cni_plugins.host_local.ranges import RangeSet, check_disjoint
from cni_plugins.protocol.addresses import Address
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import INVALID_CONFIG, INVALID_ENVIRONMENT, CniError
from cni_plugins.protocol.result import Dns, Route, dns_from_json, route_from_json

DEFAULT_DATA_DIR = "/var/lib/cni/networks"
_RESOLV_CONF_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class HostLocalSettings:
    """The options of host-local. `folder`: the folder with the network's leases, below
    `dataDir`."""

    folder: str
    sets: tuple[RangeSet, ...]
    routes: tuple[Route, ...]
    dns: Dns
    requested: tuple[Address, ...]


def parse(config: PluginConfig, call: CniCall) -> HostLocalSettings:
    """Parse the options. Raises CniError INVALID_ENVIRONMENT if a requested address is no IP
    address. Raises CniError INVALID_CONFIG if an option is invalid or the requested addresses do
    not fit the range sets."""
    ipam = config.raw.get("ipam")
    if not isinstance(ipam, dict):
        raise CniError(INVALID_CONFIG, "ipam: missing or not an object")
    sets, routes = _ranges_and_routes(marshal.dumps((ipam, config.capability("ipRanges"))))
    requested = _requested(config, call)
    _check_requests(requested, sets)
    return HostLocalSettings(
        folder=folder_of(config),
        sets=sets,
        routes=routes,
        dns=_resolver(ipam.get("resolvConf")),
        requested=requested,
    )


def folder_of(config: PluginConfig) -> str:
    """Return the folder with the network's leases. DEL and GC need only the folder, so this parses
    no ranges. Raises CniError INVALID_CONFIG."""
    ipam = config.raw.get("ipam")
    data_dir = (ipam.get("dataDir") if isinstance(ipam, dict) else None) or DEFAULT_DATA_DIR
    if not isinstance(data_dir, str) or not os.path.isabs(data_dir):
        raise CniError(INVALID_CONFIG, "ipam.dataDir: not an absolute path")
    return os.path.join(data_dir, config.name)


@functools.lru_cache(maxsize=16)
def _ranges_and_routes(marshalled: bytes) -> tuple[tuple[RangeSet, ...], tuple[Route, ...]]:
    """Parse the range sets and routes of `ipam` and `runtimeConfig.ipRanges`. `marshalled`: both
    JSON objects as bytes, so that the result can be cached."""
    ipam, capability_ranges = marshal.loads(marshalled)
    routes = ipam.get("routes")
    routes = [] if routes is None else routes
    if not isinstance(routes, list):
        raise CniError(INVALID_CONFIG, "ipam.routes: not a list")
    parsed_routes = (
        route_from_json(item, f"ipam.routes[{index}]") for index, item in enumerate(routes)
    )
    return _range_sets(ipam, capability_ranges or []), tuple(parsed_routes)


def _range_sets(ipam: dict[str, Any], capability_ranges: Any) -> tuple[RangeSet, ...]:
    if not isinstance(capability_ranges, list):
        raise CniError(INVALID_CONFIG, "runtimeConfig.ipRanges: not a list")
    sets = [
        RangeSet.parse(item, f"runtimeConfig.ipRanges[{index}]")
        for index, item in enumerate(capability_ranges)
    ]
    # The order of the reference plugin: ranges of the runtime first, then the old form. The
    # order decides which address is the pod's first.
    if "subnet" in ipam:
        sets.append(RangeSet.parse([ipam], "ipam"))
    configured = ipam.get("ranges") or []
    if not isinstance(configured, list):
        raise CniError(INVALID_CONFIG, "ipam.ranges: not a list")
    sets += [RangeSet.parse(item, f"ipam.ranges[{index}]") for index, item in enumerate(configured)]
    if not sets:
        raise CniError(INVALID_CONFIG, "ipam: needs ranges or a subnet")
    check_disjoint(tuple(sets), "ipam.ranges")
    return tuple(sets)


def _requested(config: PluginConfig, call: CniCall) -> tuple[Address, ...]:
    requests: list[tuple[object, str]] = []
    for value, where in (
        (config.capability("ips"), "runtimeConfig.ips"),
        (config.cni_argument("ips"), "args.cni.ips"),
    ):
        if value is not None and not isinstance(value, list):
            raise CniError(INVALID_CONFIG, f"{where}: not a list")
        requests += [(item, f"{where}[{index}]") for index, item in enumerate(value or [])]
    if single := call.argument("IP"):
        requests.append((single, "CNI_ARGS IP"))
    return tuple(dict.fromkeys(_requested_address(value, where) for value, where in requests))


def _requested_address(value: object, where: str) -> Address:
    """Parse a requested address. Ignores a prefix length, because the range determines it. Raises
    CniError INVALID_ENVIRONMENT; `where` names the value in the error message."""
    try:
        return parse_address(str(value).split("/", 1)[0])
    except ValueError:
        raise CniError(
            INVALID_ENVIRONMENT, f"{where}: {str(value)[:60]!r} is not an address"
        ) from None


def _check_requests(requested: tuple[Address, ...], sets: tuple[RangeSet, ...]) -> None:
    """Raise CniError INVALID_CONFIG if a requested address is in no range set, or two are in the
    same set."""
    used: set[int] = set()
    for address in requested:
        index = next((i for i, s in enumerate(sets) if address in s), None)
        if index is None:
            raise CniError(INVALID_CONFIG, f"the requested address {address} is not in any range")
        # A pod gets one address of each set, so the second one could not be assigned.
        if index in used:
            raise CniError(
                INVALID_CONFIG, f"two requested addresses are in the same range set, number {index}"
            )
        used.add(index)


def _resolver(path: object) -> Dns:
    """Return the DNS settings of the resolv.conf(5) file at `path`; empty settings without a
    path."""
    if not path:
        return Dns()
    if not isinstance(path, str):
        raise CniError(INVALID_CONFIG, "ipam.resolvConf: not a string")
    try:
        with open(path, "rb") as file:
            lines = file.read(_RESOLV_CONF_LIMIT_BYTES).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise CniError(INVALID_CONFIG, f"ipam.resolvConf: {path}: {error.strerror}") from None
    fields: dict[str, Any] = {"nameservers": [], "search": [], "options": []}
    for words in (line.split() for line in lines):
        if len(words) < 2 or words[0][0] in "#;":
            continue
        if words[0] == "nameserver":
            fields["nameservers"].append(words[1])
        elif words[0] == "domain":
            fields["domain"] = words[1]
        # resolv.conf(5): the last `search` counts, while name servers and options add up.
        elif words[0] == "search":
            fields["search"] = words[1:]
        elif words[0] == "options":
            fields["options"] += words[1:]
    return dns_from_json(fields)
