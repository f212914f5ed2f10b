"""dnsConfig of a manifest: what it adds to the host's resolver, as kubelet merges it, or with
dnsPolicy None all there is."""

from __future__ import annotations

from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.cli.manifest import pod_model
from cri_server.cli.manifest.check import NAMESERVERS_LIMIT

HOST = Path("/etc/resolv.conf")


def config(asked: pod_model.Dns, *, own: bool) -> api.DNSConfig:
    """`own`: without the host's. A resolver takes three servers (resolv.conf(5)), the host's first.
    Raises OSError."""
    servers, searches, options = ([], [], {}) if own else host(HOST.read_text())
    options |= {option.name: option.value for option in asked.options}
    return api.DNSConfig(
        servers=list(dict.fromkeys([*servers, *asked.nameservers]))[:NAMESERVERS_LIMIT],
        searches=list(dict.fromkeys([*searches, *asked.searches])),
        options=[f"{name}:{value}" if value else name for name, value in options.items()],
    )


def host(text: str) -> tuple[list[str], list[str], dict[str, str]]:
    """Servers, searches and options of a resolv.conf(5); of several `search` lines the last counts."""
    servers: list[str] = []
    searches: list[str] = []
    options: dict[str, str] = {}
    for line in text.splitlines():
        keyword, *words = line.split() or [""]
        if keyword == "nameserver":
            servers += words[:1]
        elif keyword in ("search", "domain"):
            searches = words
        elif keyword == "options":
            options |= {name: value for name, _, value in (word.partition(":") for word in words)}
    return servers, searches, options
