"""Derives the nftables elements on the host that masquerade an attachment's packets."""

from __future__ import annotations

from collections.abc import Iterable

from cni_plugins.bridge.settings import parse
from cni_plugins.net import host_rules
from cni_plugins.net.nfnetlink import Element
from cni_plugins.protocol.addresses import Network
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.result import AssignedAddress, Result


def elements(addresses: Iterable[AssignedAddress], tag: str) -> list[Element]:
    """Return the nftables elements that masquerade a pod's addresses. Each element gets the comment
    `tag`."""
    return [host_rules.masquerade_element(a.address.ip, a.address.network, tag) for a in addresses]


def expected(
    call: CniCall, config: PluginConfig, previous: Result
) -> tuple[list[Element], set[Network]]:
    """Return the masquerade elements that belong to ADD's result `previous`, and the subnets whose
    nftables chains these elements use. Both are empty without ipMasq."""
    if not parse(config, call).ip_masq:
        return [], set()
    addresses = previous.addresses_of(call.ifname, call.netns)
    tag = host_rules.tag_of(call, config)
    return elements(addresses, tag), {a.address.network for a in addresses}
