"""Translates dnsConfig of a manifest as kubelet does: adds it to the host's resolver settings, or
uses it alone with dnsPolicy None."""

from __future__ import annotations

from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.cli.manifest import pod_model
from cri_server.cli.manifest.check import NAMESERVERS_LIMIT

HOST = Path("/etc/resolv.conf")


def config(dns: pod_model.PodDnsManifest, *, own: bool) -> api.DNSConfig:
    """Return the pod's DNS configuration: the host's /etc/resolv.conf with `dns` added, or only
    `dns` if `own` is set. Keeps the first three servers, since resolvers use no more. Raises
    OSError."""
    servers, searches, options = ([], [], {}) if own else host(HOST.read_text())
    options |= {option.name: option.value for option in dns.options}
    return api.DNSConfig(
        servers=list(dict.fromkeys([*servers, *dns.nameservers]))[:NAMESERVERS_LIMIT],
        searches=list(dict.fromkeys([*searches, *dns.searches])),
        options=[f"{name}:{value}" if value else name for name, value in options.items()],
    )


def host(text: str) -> tuple[list[str], list[str], dict[str, str]]:
    """Parse a resolv.conf(5). Returns servers, search domains and options; only the last `search`
    line counts."""
    servers: list[str] = []
    searches: list[str] = []
    options: dict[str, str] = {}
    for line in text.splitlines():
        keyword, *values = line.split() or [""]
        if keyword == "nameserver":
            servers += values[:1]
        elif keyword in ("search", "domain"):
            searches = values
        elif keyword == "options":
            options |= {name: value for name, _, value in (word.partition(":") for word in values)}
    return servers, searches, options
