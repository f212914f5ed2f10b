"""Tests which proxy the environment sets, by Go's rules (golang.org/x/net/http/httpproxy)."""

from __future__ import annotations

import base64

import pytest

from cri_server.images.registry.proxy import proxy_for
from pyrunc.errors import InvalidSpec

PROXY = "http://proxy.example:3128"


def bypassed(no_proxy: str, url: str) -> bool:
    """Return whether requests for `url` bypass the proxy."""
    return proxy_for(url, {"HTTPS_PROXY": PROXY, "HTTP_PROXY": PROXY, "NO_PROXY": no_proxy}) is None


@pytest.mark.parametrize(
    ("no_proxy", "direct", "proxied"),
    [
        (
            "10.0.0.0/8",
            ["https://10.1.2.3:5000", "https://[::ffff:10.1.2.3]"],
            ["https://11.1.2.3", "https://r10.example"],
        ),
        ("fd00::/8", ["https://[fd12::1]:5000"], ["https://[fe80::1]", "https://10.0.0.1"]),
        ("10.1.2.3", ["https://10.1.2.3", "http://10.1.2.3:80"], ["https://10.1.2.30"]),
        ("10.1.2.3:5000", ["https://10.1.2.3:5000"], ["https://10.1.2.3", "https://10.1.2.3:50"]),
        ("[fd12::1]:443", ["https://[fd12::1]", "https://[FD12:0::1]"], ["https://[fd12::1]:444"]),
        ("fd12::1", ["https://[fd12::1]:5"], ["https://[fd12::2]"]),
        (
            "example.com",
            ["https://example.com", "https://a.Example.com:5"],
            ["https://anexample.com", "https://example.com.org"],
        ),
        (
            ".example.com",
            ["https://a.example.com", "https://a.b.example.com"],
            ["https://example.com"],
        ),
        (
            "*.example.com",
            ["https://a.example.com"],
            ["https://example.com", "https://aexample.com"],
        ),
        (
            "EXAMPLE.com:443",
            ["https://example.com", "https://a.example.com:443"],
            ["https://example.com:5000", "http://example.com"],
        ),
        (
            "a.example , , b.example",
            ["https://b.example", "https://a.example"],
            ["https://c.example"],
        ),
        ("*", ["https://anything.example", "https://10.0.0.1"], []),
        ("x, *", ["https://anything.example"], []),
        ("", ["https://localhost:5", "https://127.0.0.9", "https://[::1]"], ["https://a.example"]),
        ("10.0.0.0/99,:80,/8,*x", [], ["https://10.0.0.1", "https://a.example"]),
    ],
)
def test_hosts_in_no_proxy_bypass_the_proxy(
    no_proxy: str, direct: list[str], proxied: list[str]
) -> None:
    assert [u for u in (*direct, *proxied) if bypassed(no_proxy, u)] == direct


@pytest.mark.parametrize(
    ("environment", "url", "proxy"),
    [
        ({}, "https://a.example", None),
        ({"HTTPS_PROXY": PROXY}, "https://a.example", PROXY),
        ({"HTTPS_PROXY": PROXY}, "http://a.example", None),
        ({"http_proxy": PROXY}, "http://a.example", PROXY),
        ({"http_proxy": "http://lower.example", "HTTP_PROXY": PROXY}, "http://a.example", PROXY),
        ({"HTTPS_PROXY": "", "https_proxy": PROXY}, "https://a.example", PROXY),
        ({"HTTPS_PROXY": "proxy.example:3128"}, "https://a.example", PROXY),
        ({"HTTPS_PROXY": PROXY, "no_proxy": "a.example"}, "https://a.example", None),
        ({"all_proxy": PROXY}, "https://a.example", None),
    ],
)
def test_the_proxy_of_a_request_follows_the_environment(
    environment: dict[str, str], url: str, proxy: str | None
) -> None:
    chosen = proxy_for(url, environment)
    assert (chosen.url if chosen else None) == proxy


def test_a_proxy_may_have_a_login() -> None:
    proxy = proxy_for("https://a.example", {"HTTPS_PROXY": "http://me:p%40ss@proxy.example:3128"})
    assert proxy is not None and proxy.url == PROXY and "ss" not in repr(proxy)
    assert proxy.headers == {
        "proxy-authorization": "Basic " + base64.b64encode(b"me:p@ss").decode()
    }


@pytest.mark.parametrize("scheme", ["socks5", "socks5h"])
def test_a_socks_proxy_is_accepted(scheme: str) -> None:
    proxy = proxy_for("https://a.example", {"HTTPS_PROXY": f"{scheme}://me:p%40ss@proxy.example"})
    assert proxy is not None and proxy.is_socks and proxy.url == f"{scheme}://proxy.example"
    assert proxy.login == ("me", "p@ss") and not proxy.headers and "p@ss" not in repr(proxy)


@pytest.mark.parametrize(
    "value", ["socks4://u:secret@proxy.example:1080", "http://", "http://p:port/", "http://["]
)
def test_an_error_names_an_unusable_proxy(value: str) -> None:
    with pytest.raises(InvalidSpec, match=r"^HTTPS_PROXY") as caught:
        proxy_for("https://a.example", {"HTTPS_PROXY": value})
    assert "secret" not in caught.value.message
