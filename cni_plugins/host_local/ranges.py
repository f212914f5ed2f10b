"""Address ranges and sets of ranges, as written in `ipam.ranges`. Does no I/O.

A range is a subnet with a first, a last and a gateway address. A set is a list of ranges of one IP
version. A pod gets one address of each set.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from ipaddress import ip_address as parse_address
from ipaddress import ip_interface as parse_interface
from ipaddress import ip_network as parse_network

from cni_plugins.protocol.addresses import Address, AddressInNetwork, Network
from cni_plugins.protocol.errors import INVALID_CONFIG, CniError

RANGES_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Range:
    """Addresses `first` to `last` of `subnet`, both included; `gateway` is never assigned."""

    subnet: Network
    first: Address
    last: Address
    gateway: Address

    @classmethod
    def parse(cls, value: object, where: str) -> Range:
        """Parse `{subnet, rangeStart, rangeEnd, gateway}`. `where` names the value in errors.
        Raises CniError INVALID_CONFIG."""
        if not isinstance(value, dict):
            raise CniError(INVALID_CONFIG, f"{where}: not an object")
        subnet = _subnet(value.get("subnet"), f"{where}.subnet")
        # The first address names the subnet; in IPv6 it is every router's (anycast, RFC 4291,
        # 2.6.1). Only IPv4 has a broadcast address.
        lowest = subnet.network_address + 1
        highest = subnet.broadcast_address - (1 if subnet.version == 4 else 0)
        first = _address_in(value.get("rangeStart"), subnet, f"{where}.rangeStart") or lowest
        last = _address_in(value.get("rangeEnd"), subnet, f"{where}.rangeEnd") or highest
        # The reference plugin's default, too; the bridge gets this address.
        gateway = _address(value.get("gateway"), f"{where}.gateway") or lowest
        if gateway.version != subnet.version:
            raise CniError(
                INVALID_CONFIG, f"{where}.gateway: {gateway} is not of the family of {subnet}"
            )
        first, last = _clamp(first, lowest, highest), _clamp(last, lowest, highest)
        if int(first) > int(last):
            raise CniError(INVALID_CONFIG, f"{where}: rangeStart {first} is after rangeEnd {last}")
        return cls(subnet=subnet, first=first, last=last, gateway=gateway)

    def __contains__(self, address: Address) -> bool:
        return address.version == self.subnet.version and int(self.first) <= int(address) <= int(
            self.last
        )

    def interface(self, address: Address) -> AddressInNetwork:
        """Return `address` with the subnet's prefix length."""
        return parse_interface((address, self.subnet.prefixlen))


@dataclass(frozen=True, slots=True)
class RangeSet:
    """Ranges of one IP version that do not overlap. A pod gets one address from the set."""

    ranges: tuple[Range, ...]

    @classmethod
    def parse(cls, value: object, where: str) -> RangeSet:
        """Parse a list of ranges. `where` names the value in errors. Raises CniError
        INVALID_CONFIG."""
        if not isinstance(value, list) or not 0 < len(value) <= RANGES_LIMIT:
            raise CniError(INVALID_CONFIG, f"{where}: not a list of 1 to {RANGES_LIMIT} ranges")
        ranges = tuple(Range.parse(item, f"{where}[{index}]") for index, item in enumerate(value))
        if len({r.subnet.version for r in ranges}) > 1:
            raise CniError(INVALID_CONFIG, f"{where}: mixes IPv4 and IPv6")
        ordered = sorted(ranges, key=lambda r: int(r.first))
        for left, right in itertools.pairwise(ordered):
            if int(left.last) >= int(right.first):
                raise CniError(INVALID_CONFIG, f"{where}: {left.subnet} and {right.subnet} overlap")
        return cls(ranges)

    def __contains__(self, address: Address) -> bool:
        return any(address in r for r in self.ranges)

    def range_of(self, address: Address) -> Range | None:
        return next((r for r in self.ranges if address in r), None)

    @property
    def size(self) -> int:
        """Return the number of addresses in the set, gateways included."""
        return sum(int(r.last) - int(r.first) + 1 for r in self.ranges)

    def after(self, last: Address | None) -> Iterator[tuple[Address, Range]]:
        """Yield each address of the set once, except gateways, with its range. Starts after `last`
        and wraps around."""
        start = next((i for i, r in enumerate(self.ranges) if last is not None and last in r), None)
        if start is None or last is None:
            for each in self.ranges:
                yield from _walk(each, int(each.first), int(each.last))
            return
        current, count = self.ranges[start], len(self.ranges)
        yield from _walk(current, int(last) + 1, int(current.last))
        for offset in range(1, count):
            each = self.ranges[(start + offset) % count]
            yield from _walk(each, int(each.first), int(each.last))
        yield from _walk(current, int(current.first), int(last))


def check_disjoint(sets: tuple[RangeSet, ...], where: str) -> None:
    """Raise CniError INVALID_CONFIG if an address is in two sets. `where`: the sets' name in the
    error message."""
    ordered = sorted(
        (r.subnet.version, int(r.first), int(r.last), i)
        for i, s in enumerate(sets)
        for r in s.ranges
    )
    for left, right in itertools.pairwise(ordered):
        if left[0] == right[0] and left[2] >= right[1]:
            raise CniError(INVALID_CONFIG, f"{where}: range sets {left[3]} and {right[3]} overlap")


def _walk(each: Range, first: int, last: int) -> Iterator[tuple[Address, Range]]:
    make = IPv4Address if each.subnet.version == 4 else IPv6Address
    gateway = int(each.gateway)
    for number in range(first, last + 1):
        if number != gateway:
            yield make(number), each


def _subnet(value: object, where: str) -> Network:
    try:
        subnet = parse_network(value) if isinstance(value, str) else None
    except ValueError as error:
        raise CniError(INVALID_CONFIG, f"{where}: {error}") from None
    if subnet is None:
        raise CniError(INVALID_CONFIG, f"{where}: missing or not a string")
    # As in the reference plugin (range.go, Canonicalize), which also refuses host bits.
    if subnet.max_prefixlen - subnet.prefixlen < 2:
        raise CniError(INVALID_CONFIG, f"{where}: {subnet} is too small to assign addresses from")
    return subnet


def _address(value: object, where: str) -> Address | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise CniError(INVALID_CONFIG, f"{where}: not a string")
    try:
        return parse_address(value)
    except ValueError as error:
        raise CniError(INVALID_CONFIG, f"{where}: {error}") from None


def _address_in(value: object, subnet: Network, where: str) -> Address | None:
    address = _address(value, where)
    if address is not None and address not in subnet:
        raise CniError(INVALID_CONFIG, f"{where}: {address} is not in {subnet}")
    return address


def _clamp(address: Address, lowest: Address, highest: Address) -> Address:
    if int(address) < int(lowest):
        return lowest
    return highest if int(address) > int(highest) else address
