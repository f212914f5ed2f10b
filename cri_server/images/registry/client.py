"""The HTTP client of one pull: its connections can be aborted from other threads, and its redirects
and errors disclose no secret.

It uses urllib3 in threads, and registers every socket, so that `abort` wakes the threads that wait
for a server. A response may send the client to another server (redirect, token server), but not
from https to http. The other server may have a loopback or link-local address (169.254.0.0/16:
cloud metadata) only if the registry's host has one, too. The peer's address is checked after
connecting, before a byte is sent.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import (
    HTTPError,
    NameResolutionError,
    NewConnectionError,
    SSLError,
    TimeoutError,
)
from urllib3.response import BaseHTTPResponse

from cri_server.images.registry.hosts import RegistryHost
from cri_server.images.registry.proxy import Proxy, proxy_for
from cri_server.images.waiting import Abandoned
from pyrunc.errors import InvalidSpec, PeerError

# The administrator has set skip_verify; a warning for each request would not help.
urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)

REDIRECTS_LIMIT = 5
_USER_AGENT = "pyrunc/0.1"
Body = bytes | Iterable[bytes] | None
_REDIRECTS = (301, 302, 303, 307, 308)
_SECRET_HEADERS = ("authorization", "cookie", "proxy-authorization")


class HostUnavailable(PeerError):
    """A host could not be reached, broke the connection, or is overloaded, so that another attempt
    or another host may succeed. `refused`: the host refused the connection. `retry_after_s`: how
    many seconds the host demands to wait."""

    def __init__(
        self, message: str, retry_after_s: float | None = None, *, refused: bool = False
    ) -> None:
        super().__init__(message)
        self.retry_after_s, self.refused = retry_after_s, refused


class Forbidden(PeerError):
    """A server redirected the client to an address that the client refuses."""


class RegistrySession:
    """Holds the connections of one pull. `get`, `send` and `token` may be called from several
    threads."""

    def __init__(self, read_timeout_s: float, touch: Callable[[], None] = lambda: None) -> None:
        self._read_timeout_s = read_timeout_s
        self._touch = touch
        self._lock = threading.Lock()
        self._pools: dict[
            tuple[RegistryHost | None, bool, Proxy | None, bool], urllib3.PoolManager
        ] = {}
        self._sockets: set[socket.socket] = set()
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Shut down all connections; threads that wait for them raise Abandoned. Idempotent. Any
        thread may call it."""
        self._aborted.set()
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            try:
                # close(2) would not wake a thread that waits in recv(2) on Linux.
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed already, or wrapped by TLS
                pass

    def close(self) -> None:
        """Close idle connections now, because urllib3 leaves that to the garbage collector."""
        for manager in self._pools.values():
            for key in manager.pools.keys():  # noqa: SIM118 - it has no iterator, keys() is a copy
                if pool := manager.pools.get(key):
                    pool.close()
            manager.clear()

    def check(self) -> None:
        """Raise Abandoned if `abort` has been called."""
        if self._aborted.is_set():
            raise Abandoned

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`. Raises Abandoned as soon as `abort` is called."""
        if self._aborted.wait(seconds):
            raise Abandoned

    def get(
        self, host: RegistryHost, url: str, headers: dict[str, str], method: str = "GET"
    ) -> tuple[BaseHTTPResponse, str]:
        """Send a GET or HEAD, and follow redirects. Return the response, and the host[:port] of
        another origin that a redirect led to ("" if none did). The caller must not send a secret to
        that origin. The caller reads the response's body, and closes the response.

        Raises HostUnavailable, Forbidden, Abandoned.
        """
        origin, foreign = urlsplit(url), False
        sent = {**{name: ", ".join(values) for name, values in host.headers.items()}, **headers}
        for _ in range(REDIRECTS_LIMIT + 1):
            response = self._send(method, host, url, sent, None, foreign)
            target = self._redirect(url, response)
            if target is None:
                return response, urlsplit(url).netloc if foreign else ""
            url = target.geturl()
            if origin_of(target) != origin_of(origin):
                foreign = True
                # The headers of hosts.toml are left out, too: any of them may hold a token.
                safe_names = {name.lower() for name in headers} - set(_SECRET_HEADERS)
                sent = {name: value for name, value in sent.items() if name.lower() in safe_names}
        raise Forbidden(f"{origin.netloc}: more than {REDIRECTS_LIMIT} redirects")

    def send(
        self, method: str, host: RegistryHost, url: str, headers: dict[str, str], body: Body
    ) -> BaseHTTPResponse:
        """Send a request that pushes content, without following redirects. Raises HostUnavailable,
        Abandoned."""
        sent = {**{name: ", ".join(values) for name, values in host.headers.items()}, **headers}
        return self._send(method, host, url, sent, body, foreign=False)

    def token(
        self, host: RegistryHost, url: str, headers: dict[str, str], body: bytes | None
    ) -> BaseHTTPResponse:
        """Send a request to a token server that `host` named. Redirects are followed only within
        that server, because the request carries the secret; a redirect of a POST with 301, 302 or
        303 becomes a GET (RFC 9110 section 15.4).

        Raises HostUnavailable, Forbidden, Abandoned.
        """
        foreign = origin_of(urlsplit(url)) != origin_of(urlsplit(host.url))
        for _ in range(REDIRECTS_LIMIT + 1):
            response = self._send(
                "GET" if body is None else "POST", host, url, headers, body, foreign
            )
            target = self._redirect(url, response)
            if target is None:
                return response
            here, url = urlsplit(url), target.geturl()
            if not _is_same_server(here, target):
                raise Forbidden(
                    f"{here.netloc}: a redirect of the token server to {target.netloc} is not"
                    " followed"
                )
            if response.status in (301, 302, 303):
                body = None
        raise Forbidden(f"{urlsplit(url).netloc}: more than {REDIRECTS_LIMIT} redirects")

    def read(self, response: BaseHTTPResponse, size: int) -> bytes:
        """Read the available part of the body, at most `size` bytes; empty at the end. Raises
        HostUnavailable, Abandoned."""
        self.check()
        try:
            return response.read1(size, decode_content=False)
        except (HTTPError, OSError, ValueError) as error:
            self.check()
            raise HostUnavailable(describe_error(error, "")) from None

    def _send(
        self,
        method: str,
        host: RegistryHost,
        url: str,
        headers: dict[str, str],
        body: Body,
        foreign: bool,
    ) -> BaseHTTPResponse:
        self.check()
        netloc = urlsplit(url).netloc
        try:
            response = self._pool(host, url, foreign).urlopen(
                method,
                url,
                body=body,
                # A compressed transfer would have bytes that do not match the digest.
                headers={"User-Agent": _USER_AGENT, "Accept-Encoding": "identity", **headers},
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
                timeout=urllib3.Timeout(connect=host.dial_timeout_s, read=self._read_timeout_s),
            )
        except (HTTPError, OSError, ValueError, RecursionError) as error:
            self.check()
            forbidden = _cause(error, Forbidden)
            if isinstance(forbidden, Forbidden):
                raise forbidden from None
            proxy = host.proxy or proxy_for(url)
            through = f" through the proxy {proxy.url}" if proxy else ""
            raise HostUnavailable(
                f"{netloc}{through}: {describe_error(error, urlsplit(url).hostname or '')}",
                refused=isinstance(error, NewConnectionError | NameResolutionError),
            ) from None
        self._touch()
        return response

    def _redirect(self, url: str, response: BaseHTTPResponse) -> SplitResult | None:
        """Return the URL to which the response for `url` redirects, and close the response. For a
        response without a redirect return None and leave it open.

        Raises Forbidden for a target that is malformed, is neither http nor https, has a user name,
        or leads from https to http.
        """
        location = response.headers.get("Location")
        if response.status not in _REDIRECTS or not location:
            return None
        response.close()
        here = urlsplit(url)
        try:
            target = urlsplit(urljoin(url, location))
            origin_of(target)  # raises ValueError for a port that is no number
        except ValueError:
            raise Forbidden(
                f"{here.netloc}: a redirect to a malformed URL is not followed"
            ) from None
        if target.scheme not in ("http", "https") or not target.hostname:
            raise Forbidden(
                f"{here.netloc}: a redirect to a {target.scheme[:20]!r} URL is not followed"
            )
        if here.scheme == "https" and target.scheme == "http":
            raise Forbidden(f"{here.netloc}: a redirect from https to http is not followed")
        if target.username is not None:
            raise Forbidden(f"{here.netloc}: a redirect to a URL with a user name is not followed")
        return target._replace(fragment="")

    def _pool(self, host: RegistryHost, url: str, foreign: bool) -> urllib3.PoolManager:
        """Return the connection pool for `url`. The pool has the TLS settings of `host` if the URL
        leads to `host`, else those of the system. `foreign`: a server chose the URL, so the peer's
        address is checked after connecting."""
        parts, proxy = urlsplit(url), host.proxy or proxy_for(url)
        ours = parts.netloc == host.netloc
        # Reading the system's authorities takes 20 ms, which plain connections need not wait for.
        secure = parts.scheme == "https" or (proxy is not None and proxy.url.startswith("https:"))
        key = (host if ours else None, foreign, proxy, secure)
        with self._lock:
            if key not in self._pools:
                self._pools[key] = self._make_pool(
                    host if ours else None, proxy, host if foreign else None, secure
                )
            return self._pools[key]

    def _make_pool(
        self,
        host: RegistryHost | None,
        proxy: Proxy | None,
        sent_by: RegistryHost | None,
        secure: bool,
    ) -> urllib3.PoolManager:
        options: dict[str, Any] = {"maxsize": 8, "num_pools": 16}
        if secure:
            options["ssl_context"] = tls_context(host)
        if host is not None and host.skip_verify:
            options |= {"cert_reqs": "CERT_NONE", "assert_hostname": False}
        socks = proxy if proxy and proxy.is_socks else None
        manager = (
            urllib3.ProxyManager(proxy.url, proxy_headers=proxy.headers, **options)
            if proxy and not socks
            else urllib3.PoolManager(**options)
        )
        # Through a proxy the peer is the proxy, which may well be on this machine.
        manager.pool_classes_by_scheme = self._pool_classes(None if proxy else sent_by, socks)
        return manager

    def _pool_classes(self, sent_by: RegistryHost | None, socks: Proxy | None) -> dict[str, Any]:
        """Return urllib3's pool classes by scheme. Their connections are registered with this
        session for `abort`, and go through the SOCKS proxy `socks` if there is one. `sent_by`: the
        host whose answer contained the URL; None: the peer's address is not checked."""
        session = self

        class Http(HTTPConnection):
            def _new_conn(self) -> socket.socket:
                sock = _through_socks(self, socks) if socks else super()._new_conn()
                return session._check_peer(sock, sent_by)

        class Https(Http, HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                # TLS detaches the plain socket: the socket registered before has no descriptor any
                # more.
                session._register(self.sock)

        class HttpPool(HTTPConnectionPool):
            ConnectionCls = Http

        class HttpsPool(HTTPSConnectionPool):
            ConnectionCls = Https

        return {"http": HttpPool, "https": HttpsPool}

    def _check_peer(self, sock: socket.socket, sent_by: RegistryHost | None) -> socket.socket:
        # Check the address of the connection: a separate lookup could give another address (DNS
        # rebinding).
        if sent_by is not None and _is_local(sock.getpeername()[0]) and not _is_at_home(sent_by):
            sock.close()
            raise Forbidden(
                f"{sent_by.netloc}: a redirect to a loopback or link-local address is not followed"
            )
        self._register(sock)
        return sock

    def _register(self, sock: socket.socket | None) -> None:
        if sock is None:
            return
        with self._lock:
            self._sockets = {
                open_socket for open_socket in self._sockets if open_socket.fileno() >= 0
            }
            self._sockets.add(sock)
        if self._aborted.is_set():
            sock.shutdown(socket.SHUT_RDWR)


def origin_of(parts: SplitResult) -> tuple[str, str, int | None]:
    """Return scheme, host and port of a URL: its origin (RFC 6454 section 4). A secret for one
    origin is sent to no other."""
    return (
        parts.scheme,
        parts.hostname or "",
        parts.port or {"http": 80, "https": 443}.get(parts.scheme),
    )


def _is_same_server(here: SplitResult, target: SplitResult) -> bool:
    """Return whether `target` has the origin of `here`, or the same host with https (port 443) in
    place of http."""
    upgraded = ("https", here.hostname or "", 443)
    return origin_of(target) in (origin_of(here), upgraded if here.scheme == "http" else None)


def tls_context(host: RegistryHost | None) -> ssl.SSLContext:
    """Return a TLS context with the system's CAs and, unless `host` is None, the CAs, client
    certificates and `skip_verify` of `host`. Raises InvalidSpec naming a file that cannot be used.
    """
    context = ssl.create_default_context()
    # Python 3.13 sets this flag. It refuses CAs without keyUsage, and certificates without an
    # authority key identifier. Private CAs often make such ones, and Go's TLS accepts them.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if host is None:
        return context
    for path in host.ca:
        _load(host, path, partial(context.load_verify_locations, path))
    for certificate, key in host.client:
        if key is not None:
            _load(host, key, partial(_check_readable, key))
        names = f"{certificate} and {key}" if key else certificate
        _load(host, names, partial(context.load_cert_chain, certificate, key))
    if host.skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _check_readable(path: str) -> None:
    with open(path, "rb"):
        pass


def _load(host: RegistryHost, name: str, load: Callable[[], object]) -> None:
    try:
        load()
    except (OSError, ssl.SSLError) as error:  # OpenSSL names no file
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise InvalidSpec(
            f"{host.source} of {host.netloc}", f"{name} cannot be used: {reason}"
        ) from None


def _through_socks(connection: HTTPConnection, proxy: Proxy) -> socket.socket:
    """Return a socket connected to the target of `connection` through a SOCKS 5 proxy, which
    resolves the target's name."""
    from python_socks import ProxyError, ProxyType
    from python_socks.sync import Proxy as Socks

    parts = urlsplit(proxy.url)
    username, password = proxy.login or (None, None)
    socks = Socks(
        ProxyType.SOCKS5, str(parts.hostname), parts.port or 1080, username, password, rdns=True
    )
    host = connection.host.strip("[]")
    try:
        return socks.connect(host, connection.port, timeout=connection.timeout)
    except (ProxyError, OSError) as error:
        text = f"the proxy {proxy.url} does not connect to {host}:{connection.port}: {error}"
        raise NewConnectionError(connection, text) from error


def _is_local(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    # ::ffff:127.0.0.1 reaches 127.0.0.1.
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast


def _is_at_home(host: RegistryHost) -> bool:
    """Return whether `host` has a loopback or link-local address. If so, its redirects may lead to
    such addresses."""
    name = urlsplit(host.url).hostname or ""
    try:
        return any(
            _is_local(str(info[4][0]))
            for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        )
    except OSError:
        return False


def _cause(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None or isinstance(seen, kind):
            return seen
        reason = getattr(seen, "reason", None)
        seen = reason if isinstance(reason, BaseException) else seen.__cause__ or seen.__context__
    return None


# OpenSSL 1.1 to 3.5's reasons when the peer answers in plain text instead of a TLS record.
NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")


def describe_error(error: BaseException, host: str) -> str:
    """Describe a failed request to `host`. The text of the HTTP library is left out, because it
    contains URLs with query strings and header values."""
    if isinstance(error, NameResolutionError):
        return f"the name {host} does not resolve"
    if isinstance(error, SSLError) or _cause(error, ssl.SSLError):
        inner = _cause(error, ssl.SSLError)
        if getattr(inner, "reason", "") in NOT_TLS:
            return f'it speaks HTTP, not TLS: set server = "http://{host}" in its hosts.toml'
        reason = (
            getattr(inner, "verify_message", "")
            or getattr(inner, "reason", "")
            or "handshake failed"
        )
        return f"TLS: {reason}"
    os_error = _cause(error, OSError)
    if isinstance(os_error, OSError) and os_error.errno:
        return os.strerror(os_error.errno).lower()
    if isinstance(error, NewConnectionError):
        return "cannot connect"
    if isinstance(error, TimeoutError | socket.timeout):
        return "no answer in time"
    return "the connection broke off or the answer is not HTTP"
