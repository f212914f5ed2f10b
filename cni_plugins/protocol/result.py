"""What a plugin answers: interfaces, addresses, routes and dns, in every version of the specification.

A result comes from another program, so it is judged as hostile input: sizes and counts are bounded, names and addresses
must parse, what goes into a resolv.conf cannot hold a newline. Inside there is one form, the newest; `to_json` writes the
form of a version, leaving out what that version does not know.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from ipaddress import ip_address as parse_address
from ipaddress import ip_interface as parse_interface
from ipaddress import ip_network as parse_network
from typing import Any

from cni_plugins.protocol import version
from cni_plugins.protocol.errors import DECODING_FAILURE, CniError

Address = IPv4Address | IPv6Address
AddressInNetwork = IPv4Interface | IPv6Interface
Network = IPv4Network | IPv6Network

MOST_INTERFACES, MOST_ADDRESSES, MOST_ROUTES, MOST_DNS_ENTRIES = 64, 64, 512, 64
_INTERFACE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,14}\Z")
_MAC = re.compile(r"[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5,19}\Z")
_DNS_WORD = re.compile(r"[A-Za-z0-9_.:/*-]{1,253}\Z")
_ROUTE_NUMBERS = {"mtu": 1 << 31, "advmss": 1 << 31, "priority": 1 << 32, "table": 1 << 32, "scope": 256}


@dataclass(frozen=True, slots=True)
class Interface:
    """A link that a plugin made or changed; `sandbox` is empty for one on the host."""

    name: str
    mac: str = ""
    sandbox: str = ""
    mtu: int = 0
    socket_path: str = ""
    pci_id: str = ""


@dataclass(frozen=True, slots=True)
class AssignedAddress:
    """An address with its prefix length; `interface` is an index into the result's interfaces."""

    address: AddressInNetwork
    gateway: Address | None = None
    interface: int | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """A route; `numbers` holds those of mtu, advmss, priority, table and scope that were given."""

    destination: Network
    gateway: Address | None = None
    numbers: tuple[tuple[str, int], ...] = ()

    def number(self, name: str) -> int | None:
        return dict(self.numbers).get(name)


@dataclass(frozen=True, slots=True)
class Dns:
    """Resolver configuration."""

    nameservers: tuple[str, ...] = ()
    domain: str = ""
    search: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What a chain of plugins has done so far. Addresses are in the plugins' order."""

    interfaces: tuple[Interface, ...] = ()
    ips: tuple[AssignedAddress, ...] = ()
    routes: tuple[Route, ...] = ()
    dns: Dns = field(default_factory=Dns)

    @classmethod
    def from_json(cls, value: object, *, default_version: str) -> Result:
        """A result of any version that we speak. Raises CniError 1 or 6."""
        raw = _object(value, "the result")
        found = raw.get("cniVersion", default_version)
        if not isinstance(found, str):
            raise _bad("cniVersion", "not a string")
        version.require_supported(found)
        interfaces = tuple(_interface(v, w) for v, w in _items(raw, "interfaces", MOST_INTERFACES))
        ips = tuple(_assigned(v, w, len(interfaces)) for v, w in _items(raw, "ips", MOST_ADDRESSES))
        routes = tuple(_route(v, w) for v, w in _items(raw, "routes", MOST_ROUTES))
        return cls(interfaces=interfaces, ips=ips, routes=routes, dns=dns_from_json(raw.get("dns")))

    def to_json(self, cni_version: str) -> dict[str, Any]:
        """The object in the form of `cni_version`. Raises CniError 1."""
        version.require_supported(cni_version)
        newest, old = version.at_least(cni_version, "1.1.0"), not version.at_least(cni_version, "1.0.0")
        value: dict[str, Any] = {"cniVersion": cni_version}
        if self.interfaces:
            value["interfaces"] = [_interface_json(i, newest) for i in self.interfaces]
        if self.ips:
            value["ips"] = [_assigned_json(a, old) for a in self.ips]
        if self.routes:
            value["routes"] = [_route_json(r, newest) for r in self.routes]
        if self.dns != Dns():
            value["dns"] = dns_json(self.dns)
        return value

    def with_interfaces(self, interfaces: tuple[Interface, ...], index: int) -> Result:
        """The same with other interfaces, every address belonging to number `index` of them."""
        return replace(self, interfaces=interfaces, ips=tuple(replace(a, interface=index) for a in self.ips))

    def moved(self, before: str, after: str) -> Result:
        """The same after the pod's namespace, which was found at the path `before`, is at another one."""
        moved = (replace(i, sandbox=after) if i.sandbox == before else i for i in self.interfaces)
        return replace(self, interfaces=tuple(moved))

    def addresses_of(self, ifname: str, netns: str) -> tuple[AssignedAddress, ...]:
        """The addresses of one interface inside the pod, or those that name no interface."""
        return tuple(a for a in self.ips if self._belongs(a, ifname, netns))

    def _belongs(self, assigned: AssignedAddress, ifname: str, netns: str) -> bool:
        if assigned.interface is None:
            return True
        interface = self.interfaces[assigned.interface]
        return (
            interface.name == ifname and bool(interface.sandbox) and (not netns or interface.sandbox == netns)
        )


def dns_from_json(value: object) -> Dns:
    """A `dns` object, safe to write into a resolv.conf. Raises CniError 6."""
    if value is None:
        return Dns()
    raw = _object(value, "dns")
    domain = _string(raw.get("domain"), "dns.domain")
    if domain and not _DNS_WORD.match(domain):
        raise _bad("dns.domain", f"{domain[:60]!r} is not a domain")
    return Dns(
        nameservers=tuple(
            str(_address(v, w)) for v, w in _items(raw, "nameservers", MOST_DNS_ENTRIES, "dns.")
        ),
        domain=domain,
        search=tuple(_dns_word(v, w) for v, w in _items(raw, "search", MOST_DNS_ENTRIES, "dns.")),
        options=tuple(_dns_word(v, w) for v, w in _items(raw, "options", MOST_DNS_ENTRIES, "dns.")),
    )


def dns_json(dns: Dns) -> dict[str, Any]:
    """The object without its empty keys, as the reference writes it."""
    value: dict[str, Any] = {}
    if dns.nameservers:
        value["nameservers"] = list(dns.nameservers)
    if dns.domain:
        value["domain"] = dns.domain
    if dns.search:
        value["search"] = list(dns.search)
    if dns.options:
        value["options"] = list(dns.options)
    return value


def route_from_json(value: object, where: str) -> Route:
    """One `{dst, gw, …}`. Raises CniError 6."""
    return _route(value, where)


def _interface(value: object, where: str) -> Interface:
    raw = _object(value, where)
    name, mac = _string(raw.get("name"), f"{where}.name"), _string(raw.get("mac"), f"{where}.mac")
    if not _INTERFACE_NAME.match(name):
        raise _bad(f"{where}.name", f"{name[:60]!r} is not the name of an interface")
    if mac and not _MAC.match(mac):
        raise _bad(f"{where}.mac", f"{mac[:60]!r} is not a hardware address")
    return Interface(
        name=name,
        mac=mac.lower().replace("-", ":"),
        sandbox=_path(raw.get("sandbox"), f"{where}.sandbox"),
        mtu=_number(raw.get("mtu"), f"{where}.mtu", 1 << 31) or 0,
        socket_path=_path(raw.get("socketPath"), f"{where}.socketPath"),
        pci_id=_path(raw.get("pciID"), f"{where}.pciID"),
    )


def _assigned(value: object, where: str, interfaces: int) -> AssignedAddress:
    raw = _object(value, where)
    text = raw.get("address")
    if not isinstance(text, str) or "/" not in text or "%" in text or len(text) > 80:
        raise _bad(f"{where}.address", "not an address with a prefix length")
    try:
        address = parse_interface(text)
    except ValueError:
        raise _bad(f"{where}.address", f"{text[:60]!r} is not an address with a prefix length") from None
    index = raw.get("interface")
    if index is not None and (
        isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < interfaces
    ):
        raise _bad(f"{where}.interface", f"{str(index)[:40]} is not the index of an interface")
    return AssignedAddress(
        address=address, gateway=_optional_address(raw.get("gateway"), f"{where}.gateway"), interface=index
    )


def _route(value: object, where: str) -> Route:
    raw = _object(value, where)
    text = raw.get("dst")
    try:
        destination = _known_network(text) if isinstance(text, str) and len(text) < 80 else None
    except ValueError:
        destination = None
    if destination is None:
        raise _bad(f"{where}.dst", f"{str(text)[:60]!r} is not a network")
    gateway = _optional_address(raw.get("gw"), f"{where}.gw")
    numbers = (
        (name, _number(raw.get(name), f"{where}.{name}", limit)) for name, limit in _ROUTE_NUMBERS.items()
    )
    return Route(
        destination=destination, gateway=gateway, numbers=tuple((k, n) for k, n in numbers if n is not None)
    )


def _interface_json(interface: Interface, newest: bool) -> dict[str, Any]:
    value: dict[str, Any] = {"name": interface.name}
    if interface.mac:
        value["mac"] = interface.mac
    if newest and interface.mtu:
        value["mtu"] = interface.mtu
    if interface.sandbox:
        value["sandbox"] = interface.sandbox
    if newest and interface.socket_path:
        value["socketPath"] = interface.socket_path
    if newest and interface.pci_id:
        value["pciID"] = interface.pci_id
    return value


def _assigned_json(assigned: AssignedAddress, old: bool) -> dict[str, Any]:
    value: dict[str, Any] = {"version": str(assigned.address.version)} if old else {}
    if assigned.interface is not None:
        value["interface"] = assigned.interface
    value["address"] = str(assigned.address)
    if assigned.gateway is not None:
        value["gateway"] = str(assigned.gateway)
    return value


def _route_json(route: Route, newest: bool) -> dict[str, Any]:
    value: dict[str, Any] = {"dst": str(route.destination)}
    if route.gateway is not None:
        value["gw"] = str(route.gateway)
    if newest:
        value.update(route.numbers)
    return value


# Gateways and destinations are the same in pod after pod; to parse them took a third of what a result costs.
@functools.lru_cache(maxsize=256)
def _known_address(text: str) -> Address:
    return parse_address(text)


@functools.lru_cache(maxsize=256)
def _known_network(text: str) -> Network:
    return parse_network(text, strict=False)


def _bad(where: str, what: str) -> CniError:
    return CniError(DECODING_FAILURE, f"{where}: {what}")


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(where, "not an object")
    return value


def _items(raw: dict[str, Any], key: str, most: int, prefix: str = "") -> list[tuple[object, str]]:
    value = raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _bad(prefix + key, "not a list")
    if len(value) > most:
        raise _bad(prefix + key, f"{len(value)} entries, more than {most}")
    return [(item, f"{prefix}{key}[{index}]") for index, item in enumerate(value)]


def _string(value: object, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _bad(where, "not a string")
    return value


def _path(value: object, where: str) -> str:
    text = _string(value, where)
    if len(text) > 4096 or not text.isprintable():
        raise _bad(where, "not a path")
    return text


def _number(value: object, where: str, limit: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        raise _bad(where, f"{str(value)[:40]} is not a number below {limit}")
    return value


def _address(value: object, where: str) -> Address:
    """Refuses zones too (`fe80::1%eth0`): they mean nothing outside the namespace that they were written in."""
    if not isinstance(value, str) or "%" in value or len(value) > 64:
        raise _bad(where, "not an address")
    try:
        return _known_address(value)
    except ValueError:
        raise _bad(where, f"{value[:60]!r} is not an address") from None


def _optional_address(value: object, where: str) -> Address | None:
    return None if value is None or value == "" else _address(value, where)


def _dns_word(value: object, where: str) -> str:
    if not isinstance(value, str) or not _DNS_WORD.match(value):
        raise _bad(where, f"{str(value)[:60]!r} does not belong into a resolv.conf")
    return value
