"""Deletes UDP flows of host ports from the connection tracking table, as `conntrack -D -p udp`
does."""

from __future__ import annotations

import socket
from collections.abc import Collection

_UDP, _ENOENT = 17, 2


def drop_udp_flows(ports: Collection[int]) -> int:
    """Delete every UDP flow whose original destination port is in `ports`. Returns the number of
    deleted flows."""
    from pyroute2.netlink.exceptions import NetlinkError
    from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple, NFCTSocket

    dropped = 0
    for family in (socket.AF_INET, socket.AF_INET6):
        with NFCTSocket(nfgen_family=family) as conntrack:
            for port in ports:
                pattern = NFCTAttrTuple(family=family, proto=_UDP, dport=port)
                for flow in list(conntrack.dump(tuple_orig=pattern)):
                    original = NFCTAttrTuple.from_netlink(family, flow.get_attr("CTA_TUPLE_ORIG"))
                    try:
                        conntrack.entry("del", tuple_orig=original)
                        dropped += 1
                    except NetlinkError as error:
                        if error.code != _ENOENT:
                            raise
    return dropped
