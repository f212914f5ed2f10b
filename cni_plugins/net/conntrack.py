"""Forget UDP flows of the host's ports, through pyroute2 (conntrack(8) -D -p udp --dport …)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

_UDP = 17


def drop_udp_flows(ports: Collection[int]) -> int:
    """Drop every UDP flow whose first packet went to one of `ports`; returns how many. Flows that end meanwhile are fine."""
    from pyroute2.netlink.exceptions import NetlinkError
    from pyroute2.netlink.nfnetlink.nfctsocket import NFCTSocket

    dropped = 0
    with NFCTSocket() as conntrack:
        for family in (2, 10):
            for entry in list(conntrack.dump(nfgen_family=family)):
                original = entry.get_attr("CTA_TUPLE_ORIG")
                if not original or _udp_port(original) not in ports:
                    continue
                try:
                    conntrack.entry(
                        "del", nfgen_family=family, attrs=[["CTA_TUPLE_ORIG", {"attrs": original["attrs"]}]]
                    )
                    dropped += 1
                except NetlinkError as error:
                    if error.code != 2:
                        raise
    return dropped


def _udp_port(tuple_of_flow: Any) -> int:
    protocol = tuple_of_flow.get_attr("CTA_TUPLE_PROTO")
    if not protocol or protocol.get_attr("CTA_PROTO_NUM") != _UDP:
        return -1
    return int(protocol.get_attr("CTA_PROTO_DST_PORT") or -1)
