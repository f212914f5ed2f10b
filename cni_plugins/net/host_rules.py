"""The nftables table on the host: masquerade for pods, and forwarding of host ports to pods.

The rules never change. Pods are elements of maps:

    masquerade4/6  pod address                       -> jump into the chain of its subnet
    ports4/6       protocol . port                   -> pod address . port
    ports4/6_on    protocol . host address . port    -> pod address . port
    near4/6(_on)   the same keys                     -> jump into a chain that marks clients

The maps `near…` match packets of clients in the pod's subnet and on loopback, and set bit 13 of
their packet mark, as the reference plugin portmap does. Packets with this bit are masqueraded.
Without masquerade a pod would answer a client in its subnet directly instead of through the host.

A subnet's chains are created with its first pod. An element's comment is its owner's tag. If adding
an element fails with ENOENT, `nft` writes all rules again. So if the ruleset was flushed, the ADD
of the next pod restores the rules.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterable

from cni_plugins.net.netlink import NetlinkSocket
from cni_plugins.net.nfnetlink import (
    Element,
    change_elements,
    count_rules,
    elements,
    filter_socket,
    find_element,
)
from cni_plugins.protocol.addresses import Address, Network
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig
from pyrunc import ipc
from pyrunc.errors import AlreadyExists, DeadlineExceeded, KernelError, PeerError, Unsupported
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.process import wait_child

TABLE = "pyrunc_cni"
PORT_SETS = ("ports4", "ports6", "ports4_on", "ports6_on", "near4", "near6", "near4_on", "near6_on")
MASQUERADE_SETS = ("masquerade4", "masquerade6")
PROTOCOLS = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP, "sctp": socket.IPPROTO_SCTP}
NFT_TIMEOUT_S = 20.0
# Not PATH: a systemd unit's or a user's may lack sbin, and root must not run a program from a
# folder of other users.
_NFT_FOLDERS = ("/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/sbin")
# Counting rules through the socket is a single dump; comparing their text would need `nft`, which
# takes 3 to 12 ms.
_EXPECTED_RULES = {
    "guard": 1,
    "prerouting": 1,
    "output": 1,
    "to_pod": 10,
    "postrouting": 4,
    "from_pod": 2,
}

# `guard` runs before conntrack and dnat (priority -300), because after dnat the destination is no
# longer in 127.0.0.0/8. `fib daddr type != local` keeps the maps away from packets that pass
# through.
_RULES = """
table inet TABLE {
  map masquerade4 { type ipv4_addr : verdict; }
  map masquerade6 { type ipv6_addr : verdict; }
  map ports4 { type inet_proto . inet_service : ipv4_addr . inet_service; }
  map ports6 { type inet_proto . inet_service : ipv6_addr . inet_service; }
  map ports4_on { type inet_proto . ipv4_addr . inet_service : ipv4_addr . inet_service; }
  map ports6_on { type inet_proto . ipv6_addr . inet_service : ipv6_addr . inet_service; }
  map near4 { type inet_proto . inet_service : verdict; }
  map near6 { type inet_proto . inet_service : verdict; }
  map near4_on { type inet_proto . ipv4_addr . inet_service : verdict; }
  map near6_on { type inet_proto . ipv6_addr . inet_service : verdict; }
  chain guard { type filter hook prerouting priority -300; }
  chain prerouting { type nat hook prerouting priority -100; }
  chain output { type nat hook output priority -100; }
  chain postrouting { type nat hook postrouting priority 100; }
  chain to_pod { }
  chain from_pod { }
}
flush chain inet TABLE guard
flush chain inet TABLE prerouting
flush chain inet TABLE output
flush chain inet TABLE postrouting
flush chain inet TABLE to_pod
flush chain inet TABLE from_pod
table inet TABLE {
  chain guard {
    iifname != "lo" ip daddr 127.0.0.0/8 drop comment "route_localnet is for this host only"
  }
  chain prerouting { jump to_pod; }
  chain output { jump to_pod; }
  chain to_pod {
    fib daddr type != local return
    ip6 daddr ::1 return comment "answers to ::1 cannot come back from a pod"
    meta nfproto ipv4 meta l4proto . ip daddr . th dport vmap @near4_on
    meta nfproto ipv4 meta l4proto . th dport vmap @near4
    meta nfproto ipv6 meta l4proto . ip6 daddr . th dport vmap @near6_on
    meta nfproto ipv6 meta l4proto . th dport vmap @near6
    dnat ip to meta l4proto . ip daddr . th dport map @ports4_on
    dnat ip to meta l4proto . th dport map @ports4
    dnat ip6 to meta l4proto . ip6 daddr . th dport map @ports6_on
    dnat ip6 to meta l4proto . th dport map @ports6
  }
  chain postrouting {
    meta mark & 0x2000 == 0 jump from_pod
    meta mark & 0x2000 == 0 return
    meta mark set meta mark & 0xffffdfff
    ct status dnat masquerade
  }
  chain from_pod {
    ip saddr vmap @masquerade4
    ip6 saddr vmap @masquerade6
  }
}
""".replace("TABLE", TABLE)


def owner_tag(network: str, container_id: str, ifname: str, scope: str = "") -> str:
    """Return the owner tag of an attachment, NETWORK/CONTAINER_ID/IFNAME, with /SCOPE if `scope` is
    not empty. The attachment's nftables elements have the tag as comment, its link has it as alias.
    `scope`: the runtime's name (`PluginConfig.scope`).

    A tag has at most 128 characters, nft's limit for a comment. Network and container id are hashed
    if they are too long.
    """
    tag = f"{network}/{container_id}/{ifname}"
    # 110 characters leave room for the slash and a scope of 16.
    if len(tag) > 110:
        tag = f"{_network_tag(network)}/{_digest(container_id, 32)}/{ifname}"
    return f"{tag}/{scope}" if scope else tag


def belongs_to(tag: str, network: str, scope: str = "") -> bool:
    """Return whether the owner tag `tag` (NETWORK/CONTAINER_ID/IFNAME/SCOPE) has this network and,
    unless `scope` is empty, this scope."""
    parts = tag.split("/")
    return parts[0] in (network, _network_tag(network)) and (not scope or parts[3:] == [scope])


def tag_of(call: CniCall, config: PluginConfig) -> str:
    """Return the owner tag of the attachment that a call is about."""
    return owner_tag(config.name, call.container_id, call.ifname, config.scope())


def stale_tags(config: PluginConfig) -> Callable[[str], bool]:
    """Return a function that tells GC whether an owner tag is stale. A tag is stale if it has the
    network and scope of `config`, and the runtime does not list its attachment as valid. Raises
    CniError INVALID_CONFIG if the list of valid attachments is missing or invalid."""
    scope = config.scope()
    valid = {owner_tag(config.name, *pair, scope) for pair in config.valid_attachments()}
    return lambda tag: belongs_to(tag, config.name, scope) and tag not in valid


def masquerade_element(address: Address, subnet: Network, tag: str) -> Element:
    """Return the element that masquerades a pod's packets, except those to `subnet` and to
    multicast."""
    return Element(
        f"masquerade{address.version}", address.packed, chain=_masquerade_chain(subnet), comment=tag
    )


def port_elements(
    protocol: str,
    host_port: int,
    host_address: Address | None,
    pod: Address,
    pod_port: int,
    near: Network | None,
    tag: str,
) -> tuple[Element, ...]:
    """Return the map elements that forward a host port to a pod.

    - `host_address`: None forwards the port of all host addresses.
    - `near`: the subnet whose clients are masqueraded. Clients on loopback are masqueraded, too.
      None: no client is masqueraded."""
    packed_protocol, port = struct.pack("B3x", PROTOCOLS[protocol]), _port(host_port)
    target = pod.packed + _port(pod_port)
    if host_address is None:
        elements = [
            Element(f"ports{pod.version}", packed_protocol + port, data=target, comment=tag)
        ]
    else:
        key = packed_protocol + host_address.packed + port
        elements = [Element(f"ports{pod.version}_on", key, data=target, comment=tag)]
    if near is not None:
        marks = elements[0].set_name.replace("ports", "near")
        elements.append(Element(marks, elements[0].key, chain=_near_chain(near), comment=tag))
    return tuple(elements)


def add_elements(new: Iterable[Element], subnets: Iterable[Network]) -> None:
    """Add nftables elements in one transaction. Creates the table and the chains of `subnets` if
    they are missing.

    Replaces an existing masquerade element of the same address, because the address has a new
    lease. Raises:

    - AlreadyExists if a host port is taken; the error message names the owner
    - KernelError
    - PeerError if nft failed
    - Unsupported without nft
    """
    added = tuple(new)
    if not added:
        return
    with filter_socket() as netfilter:
        try:
            change_elements(netfilter, TABLE, add=added)
        except KernelError as error:
            if error.errno == errno.ENOENT:
                # The table, or the chains of a new subnet, are missing: nft runs once, not for each
                # pod.
                install(subnets)
            elif error.errno != errno.EEXIST:
                raise
            try:
                # An existing masquerade's address has a new lease, so the pod that had it is gone.
                # A late DEL of that pod spares the new element, because it compares the comment.
                change_elements(netfilter, TABLE, add=added, remove=_existing_masquerades(added))
            except KernelError as second:
                raise _conflict(added) if second.errno == errno.EEXIST else second from None


def _existing_masquerades(requested: tuple[Element, ...]) -> tuple[Element, ...]:
    masquerades = [e for e in requested if e.set_name in MASQUERADE_SETS]
    return tuple(existing for existing in lookup(masquerades) if existing is not None)


def remove_elements(elements: Iterable[Element]) -> None:
    """Remove nftables elements. Missing elements are no error. Raises KernelError."""
    removed = tuple(elements)
    if not removed:
        return
    with filter_socket() as netfilter:
        try:
            change_elements(netfilter, TABLE, remove=removed)
        except KernelError as error:
            if error.errno != errno.ENOENT:
                raise
            # ENOENT of one element aborts the whole transaction: a DEL that is called again must
            # still remove the rest.
            for element in removed:
                _remove_one(netfilter, element)


def all_elements(sets: Iterable[str], tag: str | None = None) -> list[Element]:
    """Return the elements of the nftables sets `sets`; with `tag`, only those with this comment.
    Raises KernelError."""
    with filter_socket() as netfilter:
        return [e for name in sets for e in elements(netfilter, TABLE, name, tag)]


def lookup(expected: Iterable[Element]) -> list[Element | None]:
    """Return, for each element of `expected`, the kernel's element with the same set and key, or
    None."""
    with filter_socket() as netfilter:
        return [find_element(netfilter, TABLE, e.set_name, e.key) for e in expected]


def is_intact() -> bool:
    """Return whether every fixed rule of the table exists."""
    with filter_socket() as netfilter:
        counts = count_rules(netfilter, TABLE)
    return all(counts.get(chain) == number for chain, number in _EXPECTED_RULES.items())


def restore(expected: list[Element], subnets: Iterable[Network]) -> int:
    """Add the missing rules and the missing elements of `expected`, and return how many elements
    were missing. An existing element is kept even if it has another owner."""
    if expected and not is_intact():
        install(subnets)
    missing = [
        e for e, existing in zip(expected, lookup(expected), strict=True) if existing is None
    ]
    add_elements(missing, subnets)
    return len(missing)


def install(subnets: Iterable[Network]) -> None:
    """Write the fixed rules and the chains of `subnets` in one transaction. Keeps the elements of
    an existing table."""
    run_nft(_RULES + "".join(_subnet_chains(subnet) for subnet in subnets))


def nft_program() -> str:
    """Return the path of the executable `nft`; empty if it is not installed."""
    return next((p for folder in _NFT_FOLDERS if os.access(p := f"{folder}/nft", os.X_OK)), "")


def run_nft(script: str) -> None:
    """Run `nft -f -` with `script` on stdin. Raises Unsupported without nft, PeerError with nft's
    message if it fails, DeadlineExceeded after NFT_TIMEOUT_S."""
    program = nft_program()
    if not program:
        raise Unsupported("host ports and masquerade need the command nft (package nftables)")
    with (
        closing_fd(ipc.open_memory("stdin", script.encode())) as stdin,
        closing_fd(ipc.open_memory("stderr", b"")) as stderr,
    ):
        code = wait_child(_spawn_nft(program, stdin, stderr), NFT_TIMEOUT_S)
        message = ipc.read_memory(stderr).decode("utf-8", "replace")
    if code is None:
        raise DeadlineExceeded(f"{program} did not end in {NFT_TIMEOUT_S:g} s")
    if code:
        raise PeerError(f"nft failed: {' '.join(message.split())[:400]}")


def _spawn_nft(program: str, stdin: int, stderr: int) -> int:
    # Not by the module subprocess: a worker of the server would keep 1 MiB for it.
    return os.posix_spawn(
        program,
        [program, "-f", "-"],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, stdin, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, stderr, 2),
        ],
        setsigdef=[signal.SIGPIPE],
    )


def _subnet_chains(subnet: Network) -> str:
    family, multicast = ("ip", "224.0.0.0/4") if subnet.version == 4 else ("ip6", "ff00::/8")
    clients = f"{subnet}, 127.0.0.0/8" if subnet.version == 4 else str(subnet)
    near, masquerade = _near_chain(subnet), _masquerade_chain(subnet)
    whole = subnet.prefixlen == 0
    source = "" if whole else f"{family} saddr {{ {clients} }} "
    return f"""
add chain inet {TABLE} {near}
add chain inet {TABLE} {masquerade}
flush chain inet {TABLE} {near}
flush chain inet {TABLE} {masquerade}
add rule inet {TABLE} {near} {source}meta mark set meta mark | 0x2000
add rule inet {TABLE} {masquerade} {family} daddr {{ {subnet}, {multicast} }} return
add rule inet {TABLE} {masquerade} masquerade
"""


def _conflict(requested: tuple[Element, ...]) -> AlreadyExists:
    for element, existing in zip(requested, lookup(requested), strict=True):
        if existing is not None:
            return AlreadyExists(
                f"{describe(element)} is already taken by"
                f" {existing.comment or 'an element without a comment'}"
            )
    return AlreadyExists(f"{describe(requested[0])} occurs twice in this request")


def describe(element: Element) -> str:
    """Return an nftables element as text for an error message: its host port, or else its set and
    key."""
    if element.set_name in PORT_SETS:
        return f"host port {port_of(element)}/{protocol_of(element)}"
    return f"{element.set_name} {element.key.hex()}"


def port_of(element: Element) -> int:
    """Return the host port that an element of PORT_SETS forwards."""
    return int.from_bytes(element.key[-4:-2], "big")


def protocol_of(element: Element) -> str:
    """Return the protocol (tcp, udp or sctp) that an element of PORT_SETS forwards."""
    return next((name for name, number in PROTOCOLS.items() if number == element.key[0]), "?")


def _remove_one(netfilter: NetlinkSocket, element: Element) -> None:
    try:
        change_elements(netfilter, TABLE, remove=(element,))
    except KernelError as error:
        if error.errno != errno.ENOENT:
            raise


def _masquerade_chain(subnet: Network) -> str:
    return f"masquerade_{_chain_suffix(subnet)}"


def _near_chain(subnet: Network) -> str:
    return f"near_{_chain_suffix(subnet)}"


def _chain_suffix(subnet: Network) -> str:
    return f"{subnet.network_address.exploded.replace(':', '_')}_{subnet.prefixlen}"


def _port(number: int) -> bytes:
    return struct.pack(">H2x", number)


def _network_tag(network: str) -> str:
    return f"sha256_{_digest(network, 16)}"


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]
