"""Adds, removes and lists elements of nftables sets and maps with nfnetlink messages
(include/uapi/linux/netfilter/nf_tables.h).

The program `nft` writes only the rules, once per boot, because running it takes 3 to 12 ms. Adding
an element here takes 0.02 ms.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

from cni_plugins.net.netlink import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    HostSocket,
    NetlinkRequest,
    NetlinkSocket,
    attribute,
    attributes,
    each_attribute,
    nested,
    text,
)
from pyrunc.errors import KernelError

_NETLINK_NETFILTER = 12
_INET = 1
_SUBSYSTEM = 10
_GETRULE, _NEWSETELEM, _GETSETELEM, _DELSETELEM = (_SUBSYSTEM << 8 | n for n in (7, 12, 13, 14))
_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS, _LIST_ELEMENT = 1, 2, 3, 1
_KEY, _DATA, _USERDATA, _VALUE, _VERDICT = 1, 2, 6, 1, 2
_VERDICT_CODE, _VERDICT_CHAIN, _JUMP = 1, 2, -3
_RULE_TABLE, _RULE_CHAIN = 1, 2
_COMMENT = 0
_ELEMENTS_PER_REQUEST = 100
_AGREE_ATTEMPTS = 50


@dataclass(frozen=True, slots=True)
class Element:
    """An element of the nftables set or map `set_name`.

    - `key`: numbers are in network order; in a concatenation each field is padded to four bytes
    - `data`: the key's value in a map, in the same form
    - `chain`: the chain to which the element jumps, in a verdict map
    - `comment`: a text that `nft` shows
    """

    set_name: str
    key: bytes
    data: bytes = b""
    chain: str = ""
    comment: str = ""


# Closing a netfilter socket waits until the kernel has destroyed removed elements, 6 to 20 ms
# (nft_rcv_nl_event, net/netfilter/nf_tables_api.c), so a worker keeps it open.
filter_socket = HostSocket(_NETLINK_NETFILTER)


def change_elements(
    netfilter: NetlinkSocket,
    table: str,
    *,
    add: tuple[Element, ...] = (),
    remove: tuple[Element, ...] = (),
) -> None:
    """Remove and add nftables elements in one transaction.

    Raises KernelError: ENOENT if the table, a set, a chain or a removed element is missing; EEXIST
    if an added key exists already."""
    # Removals first: the kernel handles a batch in order, so an element can be replaced in it.
    # Without NLM_F_EXCL an equal element would keep the comment of its previous owner, and the DEL
    # of that owner would remove it.
    requests = _requests(_DELSETELEM, table, remove, NLM_F_ACK)
    requests += _requests(_NEWSETELEM, table, add, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL)
    if not requests:
        return
    frame = struct.pack(">BBH", 0, 0, _SUBSYSTEM)
    failures = [f for f in netfilter.send_batch(frame, tuple(requests), frame) if f is not None]
    if failures:
        raise failures[0]


def elements(
    netfilter: NetlinkSocket, table: str, set_name: str, comment: str | None = None
) -> list[Element]:
    """Return the elements of a set; with `comment`, only those with this comment. Empty if the
    table or the set does not exist. Raises KernelError, with EINTR if the set changes during every
    attempt."""
    request = NetlinkRequest(_GETSETELEM, _address(table, set_name), "NFT_MSG_GETSETELEM", set_name)
    # A set is a hash table that grows in the background. If it grows between two packets of a
    # listing, elements move past the reader without NLM_F_DUMP_INTR (rhashtable_walk_next() starts
    # over, nf_tables skips by count). So a listing of several packets must equal the next one.
    previous: set[Element] | None = None
    for _ in range(_AGREE_ATTEMPTS):
        answers = netfilter.dump(request, errno.ENOENT)
        listed = [element for answer in answers for element in _elements(set_name, answer)]
        matching = [element for element in listed if comment is None or element.comment == comment]
        # Seen once: a list without one of 800 host ports, which DEL would have left behind.
        if len(answers) <= 1 or set(matching) == previous:
            return matching
        previous = set(matching)
    raise KernelError(request.name, set_name, errno.EINTR, "the list changed during each attempt")


def find_element(netfilter: NetlinkSocket, table: str, set_name: str, key: bytes) -> Element | None:
    """Return the element with this key; None if the element, the set or the table does not
    exist."""
    body = _address(table, set_name) + nested(
        _LIST_ELEMENTS, nested(_LIST_ELEMENT, nested(_KEY, attribute(_VALUE, key)))
    )
    request = NetlinkRequest(_GETSETELEM, body, "NFT_MSG_GETSETELEM", set_name)
    answers = netfilter.try_call(request, errno.ENOENT) or []
    matches = [element for answer in answers for element in _elements(set_name, answer)]
    return matches[0] if matches else None


def count_rules(netfilter: NetlinkSocket, table: str) -> dict[str, int]:
    """Return the number of rules in each chain of the table; empty if the table does not exist."""
    body = struct.pack(">BBH", _INET, 0, 0) + attribute(_RULE_TABLE, table)
    request = NetlinkRequest(_GETRULE, body, "NFT_MSG_GETRULE", table)
    counts: dict[str, int] = {}
    for answer in netfilter.dump(request, errno.ENOENT):
        rule = attributes(answer, 4)
        if text(rule.get(_RULE_TABLE)) == table:
            chain = text(rule.get(_RULE_CHAIN))
            counts[chain] = counts.get(chain, 0) + 1
    return counts


def _requests(
    kind: int, table: str, members_to_send: tuple[Element, ...], flags: int
) -> list[NetlinkRequest]:
    """Encode elements as requests of `kind` (NFT_MSG_NEWSETELEM or NFT_MSG_DELSETELEM). A request
    has at most a hundred elements, all of one set. `flags`: the netlink flags of each request."""
    by_set: dict[str, list[Element]] = {}
    for element in members_to_send:
        by_set.setdefault(element.set_name, []).append(element)
    name = "NFT_MSG_NEWSETELEM" if kind == _NEWSETELEM else "NFT_MSG_DELSETELEM"
    requests = []
    for set_name, members in by_set.items():
        # A nested list is at most 64 KiB (16 bits of length), and an answer for each element would
        # overflow the socket's buffer.
        for start in range(0, len(members), _ELEMENTS_PER_REQUEST):
            part = members[start : start + _ELEMENTS_PER_REQUEST]
            listed = nested(
                _LIST_ELEMENTS, *(_encode(e, with_data=kind == _NEWSETELEM) for e in part)
            )
            requests.append(
                NetlinkRequest(
                    kind,
                    _address(table, set_name) + listed,
                    name,
                    f"{set_name} {part[0].key.hex()}",
                    flags,
                )
            )
    return requests


def _encode(element: Element, *, with_data: bool) -> bytes:
    inner = nested(_KEY, attribute(_VALUE, element.key))
    if with_data and element.chain:
        verdict = attribute(_VERDICT_CODE, struct.pack(">i", _JUMP)) + attribute(
            _VERDICT_CHAIN, element.chain
        )
        inner += nested(_DATA, nested(_VERDICT, verdict))
    elif with_data and element.data:
        inner += nested(_DATA, attribute(_VALUE, element.data))
    if with_data and element.comment:
        comment = element.comment.encode() + b"\0"
        # The kernel does not read user data; type, length, value is libnftnl's form (nftnl_udata).
        inner += attribute(_USERDATA, bytes([_COMMENT, len(comment)]) + comment)
    return nested(_LIST_ELEMENT, inner)


def _address(table: str, set_name: str) -> bytes:
    return (
        struct.pack(">BBH", _INET, 0, 0)
        + attribute(_LIST_TABLE, table)
        + attribute(_LIST_SET, set_name)
    )


def _elements(set_name: str, answer: bytes) -> list[Element]:
    members = []
    for _, item in each_attribute(attributes(answer, 4).get(_LIST_ELEMENTS, b"")):
        parts = attributes(item)
        data = attributes(parts.get(_DATA, b""))
        verdict = attributes(data.get(_VERDICT, b""))
        members.append(
            Element(
                set_name=set_name,
                key=attributes(parts.get(_KEY, b"")).get(_VALUE, b""),
                data=data.get(_VALUE, b""),
                chain=text(verdict.get(_VERDICT_CHAIN)),
                comment=_read_comment(parts.get(_USERDATA, b"")),
            )
        )
    return members


def _read_comment(userdata: bytes) -> str:
    offset = 0
    while offset + 2 <= len(userdata):
        kind, length = userdata[offset], userdata[offset + 1]
        if kind == _COMMENT:
            return text(userdata[offset + 2 : offset + 2 + length])
        offset += 2 + length
    return ""
