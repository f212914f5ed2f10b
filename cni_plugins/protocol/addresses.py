"""Types of addresses and networks that may be IPv4 or IPv6."""

from __future__ import annotations

from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)

Address = IPv4Address | IPv6Address
AddressInNetwork = IPv4Interface | IPv6Interface
Network = IPv4Network | IPv6Network
ANYWHERE: dict[int, Network] = {4: IPv4Network("0.0.0.0/0"), 6: IPv6Network("::/0")}
"""IP version -> the network of all its addresses."""
