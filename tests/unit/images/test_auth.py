"""Tests logins without a network: which secret is sent where, and the token requests."""

from __future__ import annotations

import base64
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as some

from cri_server.images.formats.reference import Reference
from cri_server.images.model import Auth
from cri_server.images.registry.auth import (
    ANONYMOUS,
    Challenge,
    Credential,
    challenges,
    credential,
    read_token,
    token_request,
)
from cri_server.images.registry.hosts import RegistryHost
from pyrunc.errors import Error, InvalidArgument, PeerError

UPSTREAM = RegistryHost("https://r.example", upstream=True)
MIRROR = RegistryHost("https://mirror.example:5000")
R = Reference.parse("r.example/team/app:v1")
SECRET = Credential("u", "p")


def b64(text: bytes) -> str:
    return base64.b64encode(text).decode()


@pytest.mark.parametrize(
    ("auth", "expected"),
    [
        (None, ANONYMOUS),
        (Auth(), ANONYMOUS),
        (Auth("u", "p"), SECRET),
        (Auth("u", "p", auth=b64(b"x:y")), SECRET),
        (Auth(auth=b64(b"u:p")), SECRET),
        (Auth(auth=b64(b"u:p\0\0")), SECRET),
        (Auth(auth=b64(b"u:p:with:colons")), Credential("u", "p:with:colons")),
        (Auth(identity_token="t"), Credential(refresh_token="t")),
        (Auth(auth=b64(b"u:"), identity_token="t"), Credential(refresh_token="t")),
        (Auth("u", "p", identity_token="t"), SECRET),
        (Auth(registry_token="t"), Credential(bearer="t")),
        (Auth(identity_token="i", registry_token="r"), Credential(refresh_token="i")),
    ],
)
def test_secrets_are_used_in_their_order_of_precedence(
    auth: Auth | None, expected: Credential
) -> None:
    assert credential(auth, R, UPSTREAM) == expected


@pytest.mark.parametrize("text", ["***", b64(b"nocolon"), b64(b"\xff\xfe:x")])
def test_the_error_of_a_malformed_auth_does_not_show_the_secret(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        credential(Auth(auth=text), R, UPSTREAM)
    assert text not in caught.value.message


@pytest.mark.parametrize(
    ("address", "host", "used"),
    [
        ("", UPSTREAM, True),
        ("", MIRROR, False),
        ("r.example", UPSTREAM, True),
        ("https://r.example/v2/", UPSTREAM, True),
        ("R.EXAMPLE", UPSTREAM, True),
        ("r.example:443", UPSTREAM, True),
        ("r.example:8443", UPSTREAM, False),
        ("other.example", UPSTREAM, False),
        ("r.example.evil.example", UPSTREAM, False),
        ("evil@r.example", UPSTREAM, True),
        ("r.example", MIRROR, False),
        ("mirror.example:5000", MIRROR, True),
        ("mirror.example:5000", UPSTREAM, False),
    ],
)
def test_a_login_is_sent_only_to_its_server(address: str, host: RegistryHost, used: bool) -> None:
    sent = credential(Auth("u", "p", server_address=address), R, host)
    assert sent == (SECRET if used else ANONYMOUS)


@pytest.mark.parametrize(
    "address", ["docker.io", "https://index.docker.io/v1/", "registry-1.docker.io", ""]
)
def test_all_names_of_docker_hub_mean_the_same_registry(address: str) -> None:
    host = RegistryHost("https://registry-1.docker.io", upstream=True)
    assert (
        credential(Auth("u", "p", server_address=address), Reference.parse("busybox"), host)
        == SECRET
    )


TRUSTED = RegistryHost("https://mirror.example", trusted=True)


@pytest.mark.parametrize(
    ("image", "host", "used"),
    [
        # `trusted`: the registry's own file, not that of `_default`, names the host.
        ("r.example/a", TRUSTED, True),
        ("r.example/a", RegistryHost("http://mirror.example", trusted=True), False),
        ("r.example/a", RegistryHost("http://127.0.0.1:5000", trusted=True), True),
        ("localhost:5000/a", RegistryHost("http://mirror.example", trusted=True), True),
        ("r.example/a", RegistryHost("https://elsewhere.example", upstream=True), False),
        (
            "r.example/a",
            RegistryHost("https://elsewhere.example", upstream=True, trusted=True),
            True,
        ),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_mirror_gets_the_pull_secret_only_if_the_registrys_own_hosts_toml_names_it(
    image: str, host: RegistryHost, used: bool, named: bool
) -> None:
    """A mirror on plain http gets the secret only if it is local, or if the registry is on plain
    http, too."""
    reference = Reference.parse(image)
    address = reference.domain if named else ""
    sent = credential(Auth("u", "p", server_address=address), reference, host)
    assert sent == (SECRET if used else ANONYMOUS)
    assert credential(Auth("u", "p", server_address="third.example"), reference, host) == ANONYMOUS


def test_the_administrators_login_is_used_without_a_pull_secret() -> None:
    own = RegistryHost("https://mirror.example", trusted=True, auth=Auth("admin", "x"))
    assert credential(None, R, own) == Credential("admin", "x")
    assert credential(Auth("u", "p"), R, own) == SECRET
    assert credential(Auth("u", "p", server_address="third.example"), R, own) == Credential(
        "admin", "x"
    )
    assert "x" not in repr(own.auth)


def test_no_repr_shows_a_secret() -> None:
    text = repr(
        [
            Auth("u", "pw"),
            Credential("u", "pw", "rt", "bt"),
            token_request(BEARER, Credential("u", "pw"), UPSTREAM, "s"),
        ]
    )
    assert "pw" not in text and "rt" not in text and b64(b"u:pw") not in text


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('Basic realm="x"', [Challenge("basic", {"realm": "x"})]),
        ("Basic", [Challenge("basic", {})]),
        (
            'Bearer realm="https://a/t",service="s",scope="repository:a/b:pull"',
            [
                Challenge(
                    "bearer",
                    {"realm": "https://a/t", "service": "s", "scope": "repository:a/b:pull"},
                )
            ],
        ),
        (
            'Basic realm="a, b", BEARER realm = "c\\"d" , error=x',
            [
                Challenge("basic", {"realm": "a, b"}),
                Challenge("bearer", {"realm": 'c"d', "error": "x"}),
            ],
        ),
        ("Negotiate, Basic", [Challenge("negotiate", {}), Challenge("basic", {})]),
        ('Bearer realm="one",realm="two"', [Challenge("bearer", {"realm": "one"})]),
        ("", []),
        ("=,=", []),
        ('realm="x"', []),
    ],
)
def test_challenges_are_parsed(header: str, expected: list[Challenge]) -> None:
    assert challenges(header) == expected


@given(some.text(max_size=200))
def test_any_header_is_read_without_an_exception(header: str) -> None:
    challenges(header)


BEARER = Challenge(
    "bearer",
    {
        "realm": "https://auth.example/token?x=1",
        "service": "s",
        "scope": "repository:team/app:pull",
    },
)


def test_a_token_is_requested_with_the_password() -> None:
    request = token_request(BEARER, SECRET, UPSTREAM, "unused")
    assert request.headers == {"Authorization": "Basic " + b64(b"u:p")} and request.body is None
    query = parse_qs(urlsplit(request.url).query)
    assert query == {"x": ["1"], "service": ["s"], "scope": ["repository:team/app:pull"]}
    assert request.url.startswith("https://auth.example/token?")


def test_a_token_is_requested_with_a_refresh_token_in_the_body() -> None:
    request = token_request(
        Challenge("bearer", {"realm": "https://a.example/t"}),
        Credential(refresh_token="rt"),
        UPSTREAM,
        "the:scope",
    )
    assert request.body is not None and "rt" not in request.url
    form = parse_qs(request.body.decode())
    assert form == {
        "grant_type": ["refresh_token"],
        "refresh_token": ["rt"],
        "client_id": ["pyrunc"],
        "scope": ["the:scope"],
    }


def test_a_token_can_be_requested_without_a_login() -> None:
    assert token_request(BEARER, ANONYMOUS, MIRROR, "s").headers == {}


@pytest.mark.parametrize(
    "realm",
    [
        "",
        "x",
        "ftp://a/",
        "file:///etc/passwd",
        "https://u:p@a/",
        "https:///x",
        "http://a.example/t",
        "https://[x/t",
        "https://a:b/t",
        "https://a:99999/t",
    ],
)
def test_untrusted_token_servers_get_no_request(realm: str) -> None:
    with pytest.raises(PeerError, match=r"r\.example: "):
        token_request(Challenge("bearer", {"realm": realm}), SECRET, UPSTREAM, "s")


def test_a_registry_on_http_may_have_a_token_server_on_http() -> None:
    plain = RegistryHost("http://r.example", upstream=True)
    assert token_request(
        Challenge("bearer", {"realm": "http://a.example/t"}), SECRET, plain, "s"
    ).url.startswith("http://a")


def test_tokens_are_read_from_responses_of_the_token_server() -> None:
    assert (
        read_token(b'{"token": "a"}', "s") == "a"
        and read_token(b'{"access_token": "b", "token": ""}', "s") == "b"
    )


@given(some.binary(max_size=60))
def test_any_response_of_a_token_server_gives_a_token_or_a_peer_error(data: bytes) -> None:
    try:
        token = read_token(data, "s")
    except Error:
        return
    assert token.isprintable() and " " not in token


# (whose, its WWW-Authenticate, the scheme that counts, where the token comes from)
FIELD = [
    (
        "Docker Hub",
        'Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull"',
        "bearer",
        "https://auth.docker.io/token?service=registry.docker.io&scope=repository%3Aa%2Fb%3Apull",
    ),
    (
        "quay",
        'Bearer realm="https://quay.io/v2/auth",service="quay.io",scope="repository:a/b:pull"',
        "bearer",
        "https://quay.io/v2/auth?service=quay.io&scope=repository%3Aa%2Fb%3Apull",
    ),
    (
        "GitLab",
        'Bearer realm="https://gitlab.example/jwt/auth",service="container_registry",scope="repository:a/b:pull",error="invalid_token"',
        "bearer",
        "https://gitlab.example/jwt/auth?service=container_registry&scope=repository%3Aa%2Fb%3Apull",
    ),
    (
        "Harbor",
        'Bearer realm="https://harbor.example/service/token",service="harbor-registry"',
        "bearer",
        "https://harbor.example/service/token?service=harbor-registry&scope=s",
    ),
    (
        "Artifactory",
        'Bearer realm="https://a.example/artifactory/api/docker/r/v2/token",service="a.example"',
        "bearer",
        "https://a.example/artifactory/api/docker/r/v2/token?service=a.example&scope=s",
    ),
    (
        "ACR",
        'Basic realm="r.azurecr.io", Bearer realm="https://r.azurecr.io/oauth2/token",service="r.azurecr.io"',
        "bearer",
        "https://r.azurecr.io/oauth2/token?service=r.azurecr.io&scope=s",
    ),
    (
        "ECR",
        'Basic realm="https://1.dkr.ecr.us-east-1.amazonaws.com/",service="ecr.amazonaws.com"',
        "basic",
        "",
    ),
    ("Nexus", 'BASIC realm="Sonatype Nexus Repository Manager"', "basic", ""),
]


@pytest.mark.parametrize(
    ("whose", "header", "scheme", "url"), FIELD, ids=[whose for whose, *_ in FIELD]
)
def test_challenges_of_real_registries_are_parsed(
    whose: str, header: str, scheme: str, url: str
) -> None:
    offered = challenges(header)
    chosen = next((c for c in offered if c.scheme == "bearer"), offered[0])
    assert chosen.scheme == scheme, whose
    if url:
        assert token_request(chosen, ANONYMOUS, UPSTREAM, "s").url == url
