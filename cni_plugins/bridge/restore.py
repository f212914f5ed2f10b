"""Derives the masquerades of an attachment from its recorded configuration and result."""

from __future__ import annotations

from cni_plugins.bridge.settings import parse
from cni_plugins.net import host_rules
from cni_plugins.net.nfnetlink import Element
from cni_plugins.protocol.addresses import Network
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.result import Result


def elements(
    call: CniCall, config: PluginConfig, previous: Result
) -> tuple[list[Element], set[Network]]:
    """The elements, and the subnets whose chains they jump into; empty without ipMasq."""
    if not parse(config, call).ip_masq:
        return [], set()
    tag = host_rules.owner_tag(config.name, call.container_id, call.ifname, config.scope())
    addresses = previous.addresses_of(call.ifname, call.netns)
    masquerades = [
        host_rules.masquerade_element(a.address.ip, a.address.network, tag) for a in addresses
    ]
    return masquerades, {a.address.network for a in addresses}
