"""A plugin's result: interfaces, addresses, routes and dns, in every version of the specification.

Only the version, the lists, and the addresses of the pod's interface are checked. All else is
passed on unchanged to later plugins, DEL and CHECK, because plugins store private data in it. For
example, the AWS VPC CNI writes "mac": "0", or the VLAN of a branch interface. A plugin that uses
routes, gateways and dns parses the result with `strict`.

A parsed result has the form of the newest version. `to_json` converts it to the form of the
requested version, and drops the fields that this version lacks. If the result was parsed from the
requested form, `to_json` keeps all its fields.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from ipaddress import ip_address as parse_address
from ipaddress import ip_interface as parse_interface
from ipaddress import ip_network as parse_network
from typing import Any

from cni_plugins.protocol import version
from cni_plugins.protocol.addresses import Address, AddressInNetwork, Network
from cni_plugins.protocol.errors import DECODING_FAILURE, CniError

INTERFACES_LIMIT, ADDRESSES_LIMIT, ROUTES_LIMIT, DNS_ENTRIES_LIMIT = 64, 64, 512, 64
_FAMILIES = {"ip4": 4, "ip6": 6}
"""Key in results of versions 0.1.0 and 0.2.0 -> IP version. These results have one address for each
key, and no interfaces."""
_COMPATIBLE_FORMS = {form: {form} for form in version.Form} | {
    version.Form.NEWEST: {version.Form.NEWEST, version.Form.LISTS}
}
"""Form -> the forms whose results are also valid in this form. NEWEST includes LISTS, because
version 1.1.0 only adds keys to 1.0.0."""
# The words go into the pod's resolv.conf: a newline in one would add lines to it.
_DNS_WORD = re.compile(r"[A-Za-z0-9_.:/*-]{1,253}\Z")
_ROUTE_NUMBERS = {
    "mtu": 1 << 31,
    "advmss": 1 << 31,
    "priority": 1 << 32,
    "table": 1 << 32,
    "scope": 256,
}


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that a plugin created or changed. `sandbox`: the path of its network
    namespace, empty for an interface on the host.

    A field whose JSON value has a wrong type is empty here. `Result.raw` keeps the JSON value.
    """

    name: str
    mac: str = ""
    sandbox: str = ""
    mtu: int = 0
    socket_path: str = ""
    pci_id: str = ""


@dataclass(frozen=True, slots=True)
class AssignedAddress:
    """An address with its prefix length. `interface`: index into the result's interfaces; None if
    the address names no interface."""

    address: AddressInNetwork
    gateway: Address | None = None
    interface: int | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """A route. `numbers`: (name, value) for each of mtu, advmss, priority, table and scope that is
    set."""

    destination: Network
    gateway: Address | None = None
    numbers: tuple[tuple[str, int], ...] = ()

    def number(self, name: str) -> int | None:
        return dict(self.numbers).get(name)


@dataclass(frozen=True, slots=True)
class Dns:
    """The DNS settings of a result, by the keywords of resolv.conf(5)."""

    nameservers: tuple[str, ...] = ()
    domain: str = ""
    search: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An invalid item of the list `ips`: the interface that it names, and the error."""

    interface: int | None
    error: CniError


@dataclass(frozen=True, slots=True)
class Result:
    """The result of the plugins that have run so far. `ips` are in the order in which the plugins
    returned them.

    `raw`: the JSON object from which the result was parsed, or None. For a version of the same
    form, `to_json` returns `raw` with this version as cniVersion, so that unknown keys are kept.
    """

    interfaces: tuple[Interface, ...] = ()
    ips: tuple[AssignedAddress, ...] = ()
    routes: tuple[Route, ...] = ()
    dns: Dns = field(default_factory=Dns)
    unreadable: tuple[Unreadable, ...] = field(default=(), compare=False)
    raw: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_json(cls, value: object, *, default_version: str, strict: bool = False) -> Result:
        """Parse a result of any supported version. Raises CniError INCOMPATIBLE_VERSION or
        DECODING_FAILURE.

        - `default_version`: the configuration's version, for a result that names no version, as in
          libcni
        - `strict`: reject invalid addresses, gateways, routes and dns entries. Without `strict`
          they are passed on.
        """
        raw = _object(value, "the result")
        # weave writes no version.
        result_version = raw.get("cniVersion") or default_version
        if not isinstance(result_version, str):
            raise _bad("cniVersion", "not a string")
        version.require_supported(result_version)
        if version.FORMS[result_version] is version.Form.SINGLE_ADDRESSES:
            read = _read_single_addresses(raw, strict)
        else:
            read = _read_lists(raw, strict)
        return replace(read, raw={**raw, "cniVersion": result_version})

    def to_json(self, cni_version: str) -> dict[str, Any]:
        """Encode the result as JSON in the form of `cni_version`. Raises CniError
        INCOMPATIBLE_VERSION for an unsupported version."""
        version.require_supported(cni_version)
        form = version.FORMS[cni_version]
        if (
            self.raw is not None
            and version.FORMS[self.raw["cniVersion"]] in _COMPATIBLE_FORMS[form]
        ):
            # As it was read: plugins find their notes again, in keys that no version defines.
            return {**self.raw, "cniVersion": cni_version}
        value: dict[str, Any] = {"cniVersion": cni_version}
        if form is version.Form.SINGLE_ADDRESSES:
            value.update(_single_addresses_json(self))
        else:
            value.update(_lists_json(self, form))
        if self.dns != Dns():
            value["dns"] = dns_json(self.dns)
        return value

    def with_path(self, before: str, after: str) -> Result:
        """Return a copy in which interfaces with the sandbox path `before` have the path
        `after`."""
        moved = (replace(i, sandbox=after) if i.sandbox == before else i for i in self.interfaces)
        raw = self.raw
        if raw is not None and raw.get("interfaces"):
            changed = [
                {**i, "sandbox": after} if i.get("sandbox") == before else i
                for i in raw["interfaces"]
            ]
            raw = {**raw, "interfaces": changed}
        return replace(self, interfaces=tuple(moved), raw=raw)

    def addresses_of(self, ifname: str, netns: str) -> tuple[AssignedAddress, ...]:
        """Return the addresses of the pod's interface, and the addresses that name no interface.
        Raises CniError DECODING_FAILURE if one of them is invalid.

        The pod's interface is the first of these that has an address:

        - `ifname` in the sandbox `netns`
        - `ifname` in any sandbox, or in none
        - all interfaces in the sandbox `netns`
        """
        # kindnet and OVN name no sandbox, other plugins name the container id as the sandbox, and
        # kube-ovn gives the interface another name. containerd ignores the sandbox, too.
        inside = {
            index
            for index, interface in enumerate(self.interfaces)
            if interface.sandbox and (not netns or interface.sandbox == netns)
        }
        called = {
            index for index, interface in enumerate(self.interfaces) if interface.name == ifname
        }
        owners = {a.interface for a in self.ips} | {u.interface for u in self.unreadable}
        pods = next((group for group in (called & inside, called, inside) if group & owners), set())
        for entry in self.unreadable:
            if entry.interface is None or entry.interface in pods:
                raise entry.error
        return tuple(a for a in self.ips if a.interface is None or a.interface in pods)


def _read_lists(raw: dict[str, Any], strict: bool) -> Result:
    """Parse a result of version 0.3.0 or later, with the lists `interfaces`, `ips` and `routes`.
    `strict`: reject invalid addresses, routes and dns. Raises CniError DECODING_FAILURE."""
    interfaces = tuple(_interface(v, w) for v, w in _items(raw, "interfaces", INTERFACES_LIMIT))
    ips: list[AssignedAddress] = []
    unreadable: list[Unreadable] = []
    for value, where in _items(raw, "ips", ADDRESSES_LIMIT):
        entry = _object(value, where)
        index = _interface_index(entry, where, len(interfaces))
        try:
            ips.append(_assigned(entry, where, index, strict))
        except CniError as error:
            if strict:
                raise
            # Reported only if the entry belongs to the pod's interface: plugins keep notes in the
            # entries of other interfaces.
            unreadable.append(Unreadable(index, error))
    try:
        routes = tuple(route_from_json(v, w) for v, w in _items(raw, "routes", ROUTES_LIMIT))
    except CniError:
        if strict:
            raise
        routes = ()
    return Result(interfaces, tuple(ips), routes, _read_dns(raw, strict), tuple(unreadable))


def _read_single_addresses(raw: dict[str, Any], strict: bool) -> Result:
    """Parse a result of version 0.1.0 or 0.2.0, with `ip4` and `ip6`, each {ip, gateway, routes}.
    `strict`: reject invalid addresses, routes and dns. Raises CniError DECODING_FAILURE."""
    ips: list[AssignedAddress] = []
    routes: list[Route] = []
    unreadable: list[Unreadable] = []
    for key, family in _FAMILIES.items():
        if raw.get(key) is None:
            continue
        entry = _object(raw[key], key)
        try:
            assigned = _assigned(
                {**entry, "address": entry.get("ip")}, key, None, strict, name="ip"
            )
            if assigned.address.version != family:
                raise _bad(f"{key}.ip", f"{assigned.address} is not an IPv{family} address")
            ips.append(assigned)
        except CniError as error:
            if strict:
                raise
            unreadable.append(Unreadable(None, error))
        try:
            routes += [
                route_from_json(v, w) for v, w in _items(entry, "routes", ROUTES_LIMIT, f"{key}.")
            ]
        except CniError:
            if strict:
                raise
    return Result((), tuple(ips), tuple(routes), _read_dns(raw, strict), tuple(unreadable))


def _read_dns(raw: dict[str, Any], strict: bool) -> Dns:
    try:
        return dns_from_json(raw.get("dns"))
    except CniError:
        if strict:
            raise
        return Dns()


def _lists_json(result: Result, form: version.Form) -> dict[str, Any]:
    newest, old = form is version.Form.NEWEST, form is version.Form.VERSIONED_LISTS
    lists = {
        "interfaces": [_interface_json(i, newest) for i in result.interfaces],
        "ips": [_assigned_json(a, old) for a in result.ips],
        "routes": [_route_json(r, newest) for r in result.routes],
    }
    return {key: entries for key, entries in lists.items() if entries}


def _single_addresses_json(result: Result) -> dict[str, Any]:
    """Encode addresses and routes in the form of version 0.2.0. As in libcni, `ip4` and `ip6` have
    the first address of their IP version, and all routes of this version."""
    value: dict[str, Any] = {}
    for key, family in _FAMILIES.items():
        first = next((a for a in result.ips if a.address.version == family), None)
        if first is None:
            continue
        value[key] = {"ip": str(first.address)}
        if first.gateway is not None:
            value[key]["gateway"] = str(first.gateway)
        routes = [_route_json(r, False) for r in result.routes if r.destination.version == family]
        if routes:
            value[key]["routes"] = routes
    return value


def dns_from_json(value: object) -> Dns:
    """Parse a `dns` object. Raises CniError DECODING_FAILURE, also for a word that would break a
    resolv.conf."""
    if value is None:
        return Dns()
    raw = _object(value, "dns")
    domain = _string(raw.get("domain"), "dns.domain")
    if domain and not _DNS_WORD.match(domain):
        raise _bad("dns.domain", f"{domain[:60]!r} is not a domain")
    return Dns(
        nameservers=tuple(
            str(_address(v, w)) for v, w in _items(raw, "nameservers", DNS_ENTRIES_LIMIT, "dns.")
        ),
        domain=domain,
        search=tuple(_dns_word(v, w) for v, w in _items(raw, "search", DNS_ENTRIES_LIMIT, "dns.")),
        options=tuple(
            _dns_word(v, w) for v, w in _items(raw, "options", DNS_ENTRIES_LIMIT, "dns.")
        ),
    )


def dns_json(dns: Dns) -> dict[str, Any]:
    """Encode `dns` as CNI's JSON object. Leaves out empty fields, as the reference implementation
    does."""
    fields = {
        "nameservers": list(dns.nameservers),
        "domain": dns.domain,
        "search": list(dns.search),
        "options": list(dns.options),
    }
    return {key: value for key, value in fields.items() if value}


def _interface(value: object, where: str) -> Interface:
    raw = _object(value, where)
    mtu = raw.get("mtu")
    return Interface(
        name=_text(raw.get("name")),
        mac=_text(raw.get("mac")),
        sandbox=_text(raw.get("sandbox")),
        mtu=mtu if isinstance(mtu, int) and not isinstance(mtu, bool) else 0,
        socket_path=_text(raw.get("socketPath")),
        pci_id=_text(raw.get("pciID")),
    )


def _interface_index(raw: dict[str, Any], where: str, interfaces: int) -> int | None:
    index = raw.get("interface")
    if index is not None and (
        isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < interfaces
    ):
        raise _bad(f"{where}.interface", f"{str(index)[:40]} is not the index of an interface")
    return index


def _assigned(
    raw: dict[str, Any], where: str, index: int | None, strict: bool, name: str = "address"
) -> AssignedAddress:
    text = raw.get("address")
    if not isinstance(text, str) or "/" not in text or "%" in text or len(text) > 80:
        raise _bad(f"{where}.{name}", f"{_excerpt(text)} is not an address with a prefix length")
    try:
        address = parse_interface(text)
    except ValueError:
        raise _bad(
            f"{where}.{name}", f"{_excerpt(text)} is not an address with a prefix length"
        ) from None
    try:
        gateway = _optional_address(raw.get("gateway"), f"{where}.gateway")
    except CniError:
        if strict:
            raise
        gateway = None
    return AssignedAddress(address=address, gateway=gateway, interface=index)


def route_from_json(value: object, where: str) -> Route:
    """Parse a route, `{dst, gw, …}`. Raises CniError DECODING_FAILURE; `where` names the route in
    the error message."""
    raw = _object(value, where)
    text = raw.get("dst")
    try:
        destination = _cached_network(text) if isinstance(text, str) and len(text) < 80 else None
    except ValueError:
        destination = None
    if destination is None:
        raise _bad(f"{where}.dst", f"{str(text)[:60]!r} is not a network")
    gateway = _optional_address(raw.get("gw"), f"{where}.gw")
    numbers = (
        (name, _number(raw.get(name), f"{where}.{name}", limit))
        for name, limit in _ROUTE_NUMBERS.items()
    )
    return Route(
        destination=destination,
        gateway=gateway,
        numbers=tuple((k, n) for k, n in numbers if n is not None),
    )


def _interface_json(interface: Interface, newest: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"mac": interface.mac, "sandbox": interface.sandbox}
    if newest:
        fields |= {
            "mtu": interface.mtu,
            "socketPath": interface.socket_path,
            "pciID": interface.pci_id,
        }
    return {"name": interface.name, **{key: value for key, value in fields.items() if value}}


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


# Gateways and destinations are the same for every pod; parsing them took a third of the time of
# parsing a result.
_cached_address = functools.lru_cache(maxsize=256)(parse_address)


@functools.lru_cache(maxsize=256)
def _cached_network(text: str) -> Network:
    # Plugins in Go write destinations with host bits, which net.ParseCIDR accepts.
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


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object, where: str, limit: int) -> int | None:
    if value is None:
        return None
    # bool is a kind of int in Python: JSON's `true` would be 1.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        raise _bad(where, f"{str(value)[:40]} is not a number below {limit}")
    return value


def _excerpt(value: object) -> str:
    """Return the beginning of a wrong value, for an error message. Strings are quoted."""
    return repr(value[:60]) if isinstance(value, str) else str(value)[:60]


def _address(value: object, where: str) -> Address:
    """Parse an IP address. Rejects zones (`fe80::1%eth0`), which are valid only in the namespace of
    their interface. Raises CniError DECODING_FAILURE."""
    if not isinstance(value, str) or "%" in value or len(value) > 64:
        raise _bad(where, f"{_excerpt(value)} is not an address")
    try:
        return _cached_address(value)
    except ValueError:
        raise _bad(where, f"{_excerpt(value)} is not an address") from None


def _optional_address(value: object, where: str) -> Address | None:
    return None if value is None or value == "" else _address(value, where)


def _dns_word(value: object, where: str) -> str:
    if not isinstance(value, str) or not _DNS_WORD.match(value):
        raise _bad(where, f"{str(value)[:60]!r} is not valid in a resolv.conf")
    return value
