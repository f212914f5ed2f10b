"""Logs in to registries: parses challenges, chooses credentials, builds token requests and reads
their answers. No I/O.

A pull secret is sent to these hosts:

- the registry that the reference names, and the `server` in the registry's own hosts.toml (not the
  one in `_default`);
- the mirrors in the registry's own hosts.toml, except those with `pull_secrets = false`; over plain
  http only if the mirror is on loopback or the registry is on plain http, too;
- any other host only if the secret's server address names it.

A host that gets no pull secret gets the login `auth` that hosts.toml has for it, if any.

The registry's challenge names the token server. The token server gets the registry's secret; but if
the registry is on https, a token server on plain http gets no secret.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlencode, urlsplit

from cri_server.images.formats.reference import DOCKER, Reference, is_loopback, normal_registry
from cri_server.images.model import Auth
from cri_server.images.registry.hosts import TOKEN, RegistryHost, default_url
from pyrunc.errors import InvalidArgument, PeerError

TOKEN_LIMIT_BYTES = 1 << 20
CLIENT = "pyrunc"
_DOCKER_TOKENS = "auth.docker.io"
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_HEADER_SAFE = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Challenge:
    """A login method in a WWW-Authenticate header. The scheme and the names of the parameters are
    in lower case."""

    scheme: str
    parameters: dict[str, str]


@dataclass(frozen=True, slots=True)
class Credential:
    """A login for one host. All fields are empty for anonymous access. The repr shows no secret."""

    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    refresh_token: str = field(default="", repr=False)
    bearer: str = field(default="", repr=False)

    @property
    def basic(self) -> str | None:
        """Return the value of the header for basic authorization; None without user and
        password."""
        if not self.username and not self.password:
            return None
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


ANONYMOUS = Credential()


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """An HTTP request to a token server. `body` is None for GET."""

    url: str
    headers: dict[str, str] = field(repr=False)
    body: bytes | None = field(default=None, repr=False)


def credential(auth: Auth | None, reference: Reference, host: RegistryHost) -> Credential:
    """Return the credential for `host` when an image of `reference` is pulled: the pull secret
    `auth` if `host` may receive it, else the login for `host` in hosts.toml, else ANONYMOUS. Raises
    InvalidArgument for a malformed secret."""
    if auth is not None and not auth.empty and may_receive(auth, reference, host):
        return _credential(auth)
    return _credential(host.auth) if host.auth is not None and not host.auth.empty else ANONYMOUS


def may_receive(auth: Auth, reference: Reference, host: RegistryHost) -> bool:
    """Return whether `host` may receive the pull secret `auth`. A secret without a server address,
    or with that of the registry, is for the registry, and for the trusted mirrors to which
    `_is_private` permits sending it. Any other secret is for the host at its server address."""
    address = _server(auth.server_address)
    is_registrys = not address or address == reference.registry
    is_registry = host.upstream and (host.trusted or host.url == default_url(reference.registry))
    if is_registrys and (is_registry or (host.trusted and _is_private(host, reference))):
        return True
    return bool(address) and address == _server(host.netloc)


def _is_private(mirror: RegistryHost, reference: Reference) -> bool:
    """Return whether a pull secret may be sent to `mirror`: over https or loopback, or over plain
    http if the registry itself is on plain http."""
    parts = urlsplit(mirror.url)
    registry = default_url(reference.registry)
    return (
        parts.scheme == "https"
        or is_loopback(parts.hostname or "")
        or registry.startswith("http://")
    )


def _credential(auth: Auth) -> Credential:
    if auth.username or auth.password:
        return Credential(auth.username, auth.password)
    # Before `auth`, as containerd's ParseAuth: `docker login` at a registry with identity tokens
    # writes both, and `auth` has no password then.
    if auth.identity_token:
        return Credential(refresh_token=auth.identity_token)
    if auth.auth:
        try:
            # NUL bytes around the text are dropped, as in ParseAuth.
            text = base64.b64decode(auth.auth, validate=False).decode("utf-8").strip("\0")
        except ValueError:
            raise InvalidArgument("auth.auth is not base64 of USER:PASSWORD") from None
        user, colon, password = text.partition(":")
        if not colon:
            raise InvalidArgument("auth.auth is not base64 of USER:PASSWORD")
        return Credential(user, password.strip("\0"))
    return Credential(
        bearer=_header_value(auth.registry_token, InvalidArgument, "auth.registry_token")
    )


def _server(address: str) -> str:
    """Return the registry `HOST` or `HOST:PORT` of a pull secret's server address, which may be a
    URL: `https://index.docker.io/v1/` gives `docker.io`."""
    try:
        netloc = urlsplit(address if "://" in address else f"//{address}").netloc.rpartition("@")[2]
    except ValueError:
        return address
    registry = normal_registry(netloc)
    return DOCKER if registry == _DOCKER_TOKENS else registry


def challenges(header: str) -> list[Challenge]:
    """Parse all challenges of a WWW-Authenticate header (RFC 9110 section 11.6.1), up to the first
    malformed part."""
    offered: list[Challenge] = []
    at = 0
    while at < len(header):
        separator = re.compile(r"[\s,]*").match(header, at)
        at = separator.end() if separator else at
        word = TOKEN.match(header, at)
        if not word:
            break
        at = word.end()
        equals = re.compile(r"\s*=\s*").match(header, at)
        if not equals:
            offered.append(Challenge(word[0].lower(), {}))
            continue
        value = _QUOTED.match(header, equals.end()) or TOKEN.match(header, equals.end())
        if not offered or not value:
            break
        text = re.sub(r"\\(.)", r"\1", value[1]) if value.re is _QUOTED else value[0]
        offered[-1].parameters.setdefault(word[0].lower(), text)
        at = value.end()
    return offered


def token_request(
    challenge: Challenge, login: Credential, host: RegistryHost, scope: str
) -> TokenRequest:
    """Build the request for a bearer token. Raises PeerError for a token server that must not be
    contacted."""
    parts = _split(challenge.parameters.get("realm", ""))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise PeerError(
            f"{host.netloc}: the WWW-Authenticate header of the registry names no token server"
        )
    if parts.scheme == "http" and host.url.startswith("https://") and login != ANONYMOUS:
        text = "does not use https: refused to send it the credentials"
        raise PeerError(f"{host.netloc}: the token server {parts.netloc} {text}")
    fields = {
        "service": challenge.parameters.get("service", ""),
        "scope": challenge.parameters.get("scope") or scope,
    }
    fields = {key: value for key, value in fields.items() if value}
    base = parts._replace(fragment="")
    # An identity token is OAuth2's refresh token, for which distribution has a POST (its
    # documentation, "spec/auth/oauth"); user and password go by GET, which all token servers have.
    if login.refresh_token:
        form = {
            "grant_type": "refresh_token",
            "refresh_token": login.refresh_token,
            "client_id": CLIENT,
            **fields,
        }
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        return TokenRequest(base.geturl(), headers, urlencode(form).encode())
    query = "&".join(filter(None, (parts.query, urlencode(fields))))
    basic = login.basic
    return TokenRequest(
        base._replace(query=query).geturl(), {"Authorization": basic} if basic else {}
    )


def _split(url: str) -> SplitResult:
    """Split a URL that a server sent; a malformed one gives empty parts."""
    try:
        parts = urlsplit(url)
        return parts if parts.port is None or parts.port else urlsplit("")
    except ValueError:
        return urlsplit("")


def read_token(data: bytes, server: str) -> str:
    """Return the token in a token server's answer. Raises PeerError, whose message quotes nothing
    from the answer."""
    try:
        answer = json.loads(data)
        # OAuth2 calls it access_token; distribution's token servers may send either.
        token = answer.get("token") or answer.get("access_token")
    except (ValueError, AttributeError, RecursionError):
        token = None
    if not isinstance(token, str) or not token:
        raise PeerError(f"{server}: the token server's answer has no token")
    return _header_value(token, PeerError, f"{server}: the token")


def _header_value(text: str, error: type[InvalidArgument] | type[PeerError], what: str) -> str:
    """Return `text` if it can be in the value of an HTTP header; `what` names the text. Raises
    `error` otherwise, because the HTTP library's own error would show the text, which is secret."""
    if not _HEADER_SAFE.fullmatch(text):
        raise error(f"{what} has characters that a header cannot carry")
    return text
