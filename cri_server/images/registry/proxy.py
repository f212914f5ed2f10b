"""Chooses the proxy for a URL from environment variables, by Go's rules.

HTTPS_PROXY (for https URLs) or HTTP_PROXY names the proxy; if it is unset, https_proxy or
http_proxy does. A URL of this machine, or of a host in NO_PROXY, gets no proxy. NO_PROXY is a list
of elements, separated by commas:

- `*`: all hosts
- an address, or a network such as `10.0.0.0/8`
- `example.com`: the domain and its subdomains
- `.example.com` or `*.example.com`: only the subdomains

An address or domain may end with `:PORT`. Source: golang.org/x/net/http/httpproxy.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from urllib3.util import make_headers

from cri_server.images.formats.reference import is_loopback
from pyrunc.errors import InvalidSpec

PORTS = {"http": 80, "https": 443}
SOCKS = ("socks5", "socks5h")  # in Go both have the proxy resolve names
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy's URL and the login that the proxy requires. `headers`: the Proxy-Authorization
    header with the login for an HTTP proxy. `login`: user and password for a SOCKS proxy. The repr
    shows no login."""

    url: str
    headers: dict[str, str] = field(default_factory=dict, repr=False, hash=False)
    login: tuple[str, str] | None = field(default=None, repr=False)

    @property
    def is_socks(self) -> bool:
        """Return whether the proxy uses SOCKS 5 (RFC 1928)."""
        return urlsplit(self.url).scheme in SOCKS


def proxy_for(url: str, environment: Mapping[str, str] = os.environ) -> Proxy | None:
    """Return the proxy for `url`; None to connect directly. Raises InvalidSpec naming the malformed
    variable."""
    parts = urlsplit(url)
    name = f"{parts.scheme.upper()}_PROXY"
    value = _variable(name, environment)
    if not value or _bypasses(_variable("NO_PROXY", environment), parts):
        return None
    return parse(name, value)


def _variable(name: str, environment: Mapping[str, str]) -> str:
    return environment.get(name) or environment.get(name.lower()) or ""


def parse(name: str, value: str) -> Proxy:
    """Parse `value`, the proxy in the variable or setting `name`. Raises InvalidSpec naming the
    setting."""
    try:
        # Go's httpproxy takes a proxy without a scheme for one on http, too.
        parts = urlsplit(value if "://" in value else f"http://{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in (*PORTS, *SOCKS):
        raise InvalidSpec(
            name, "not the address of an HTTP or SOCKS 5 proxy, such as http://proxy.example:3128"
        )
    login = (unquote(parts.username or ""), unquote(parts.password or ""))
    netloc = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    url = f"{parts.scheme}://{netloc}"
    if not any(login):
        return Proxy(url)
    if parts.scheme in SOCKS:
        return Proxy(url, login=login)
    return Proxy(url, make_headers(proxy_basic_auth=":".join(login)))


def _bypasses(no_proxy: str, parts: SplitResult) -> bool:
    host, port = (parts.hostname or "").lower(), str(parts.port or PORTS[parts.scheme])
    address = _address(host)
    return is_loopback(host) or any(
        _matches(entry.strip().lower(), host, address, port) for entry in no_proxy.split(",")
    )


def _matches(entry: str, host: str, address: Address | None, port: str) -> bool:
    """Return whether `entry`, an element of NO_PROXY, covers this host and port."""
    if entry == "*":
        return True
    if "/" in entry:
        return address is not None and _is_in(address, entry)
    name, only_port = _split(entry)
    if not name or only_port not in ("", port):
        return False
    named = _address(name)
    if named is not None:
        return named == address
    # An address has no subdomains: `.1` must not cover 10.0.0.1.
    if address is not None:
        return False
    name = name.removeprefix("*") if name.startswith("*.") else name
    return host.endswith(name) if name.startswith(".") else f".{host}".endswith(f".{name}")


def _split(entry: str) -> tuple[str, str]:
    """Split `host:port`, `[address]:port` or a host alone into host and port. A missing port is
    ""."""
    if entry.startswith("["):
        host, _, rest = entry[1:].partition("]")
        return host, rest.removeprefix(":")
    host, colon, port = entry.rpartition(":")
    return (host, port) if colon and ":" not in host else (entry, "")


def _address(text: str) -> Address | None:
    """Parse an address; an IPv4 address in IPv6 notation becomes IPv4."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_in(address: Address, network: str) -> bool:
    try:
        return address in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
