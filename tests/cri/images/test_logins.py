"""Tests token servers of registries, and the Retry-After of hosts that limit requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

from cri_server.images.model import Auth
from cri_server.images.registry import registry as registries
from cri_server.images.service import ImageService
from pyrunc.errors import PeerError
from tests.cri.images.test_pull import certificates, hosts_toml, make
from tests.support.registry import Registry

__all__ = ["certificates"]
TOKEN = b'{"token": "anonymous"}'
SECRET = Auth("user", "password")


@pytest.fixture
def secure(tmp_path: Path, certificates: tuple[Path, Path]) -> Iterator[Registry]:
    """Start a registry on https that demands a token and accepts the token `anonymous`."""
    with Registry(
        tmp_path / "secure", tls=certificates, auth=("bearer", "user", "password")
    ) as running:
        running.push("app:v1", make(layers=1))
        running.tokens.add("anonymous")
        hosts_toml(tmp_path, running.host, f'server = "{running.url}"\nca = "{certificates[0]}"\n')
        yield running


@pytest.fixture
def tokens(tmp_path: Path, secure: Registry) -> Iterator[Registry]:
    """Start a token server on http for the registry `secure`."""
    with Registry(tmp_path / "tokens") as running:
        secure.realm = f"{running.url}/token"
        yield running


async def test_a_token_server_on_http_gets_no_secret(
    secure: Registry, tokens: Registry, service: ImageService
) -> None:
    """A pull without a login accepts a token from an http server; a pull with a login fails."""
    # small GitLab and Harbor installations use http
    tokens.fault("/token", status=200, body=TOKEN)
    await service.pull(f"{secure.host}/app:v1")
    count = len(tokens.requests)
    with pytest.raises(PeerError, match="does not use https"):
        await service.pull(f"{secure.host}/app:v1", SECRET)
    assert len(tokens.requests) == count > 0


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("auth", [SECRET, Auth(identity_token="password")])
async def test_a_redirect_within_the_token_server_is_followed(
    tmp_path: Path, secure: Registry, service: ImageService, status: int, auth: Auth
) -> None:
    # Harbor and Nexus behind a proxy redirect /service/token to /service/token/.
    is_get = auth.identity_token == "" or status < 307
    secure.realm = f"{secure.url}/service/token"
    secure.fault(
        "/service/token$|/service/token[?]", status=status, headers={"Location": "/login/"}
    )
    secure.fault("/login/", status=200, body=TOKEN)
    await service.pull(f"{secure.host}/app:v1", auth)
    [login] = secure.requested("/login/")
    assert login.method == ("GET" if is_get else "POST")
    assert ("authorization" in login.headers) == bool(auth.username)


async def test_a_redirect_of_the_token_server_to_another_host_is_refused(
    secure: Registry, tokens: Registry, service: ImageService
) -> None:
    secure.realm = f"{secure.url}/service/token"
    secure.fault("/service/token", status=307, headers={"Location": f"https://{tokens.host}/token"})
    with pytest.raises(PeerError, match=f"a redirect of the token server to {tokens.host}"):
        await service.pull(f"{secure.host}/app:v1", SECRET)
    assert tokens.requests == []


@pytest.mark.parametrize("value", ["3600", "date", "epoch"])
@pytest.mark.parametrize("what", ["manifests", "blobs", "token"])
async def test_a_retry_after_beyond_the_bound_fails_at_once(
    secure: Registry, service: ImageService, value: str, what: str
) -> None:
    """When a host answers 429 and asks for a delay of an hour, the pull fails without a retry."""
    # kubelet repeats the call. GitLab sends seconds, proxies a date, Docker Hub its limit's end.
    end = time.time() + 3600
    header = {"date": formatdate(end, usegmt=True), "epoch": str(int(end))}.get(value, value)
    secure.fault(what, status=429, headers={"Retry-After": header})
    with pytest.raises(PeerError, match=r"429, and no more requests for 3[56][0-9]{2} s"):
        await service.pull(f"{secure.host}/app:v1", SECRET)
    assert len(secure.requested(what)) == 1


async def test_a_retry_after_within_the_bound_is_obeyed(
    secure: Registry, service: ImageService, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(
        registries.RegistrySession, "sleep", lambda self, seconds: waits.append(seconds)
    )
    secure.fault("manifests", times=1, status=503, headers={"Retry-After": "45"})
    end = formatdate(time.time() + 30, usegmt=True)
    secure.fault("manifests", times=1, status=429, headers={"Retry-After": end})
    await service.pull(f"{secure.host}/app:v1", SECRET)
    assert waits[0] == 45 and 25 < waits[1] <= 30


async def test_a_pull_does_not_wait_for_an_overloaded_mirror(
    tmp_path: Path, secure: Registry, service: ImageService, certificates: tuple[Path, Path]
) -> None:
    with Registry(tmp_path / "mirror") as mirror:
        mirror.fault("", status=429, headers={"Retry-After": "30"})
        text = f'server = "{secure.url}"\nca = "{certificates[0]}"\n[host."{mirror.url}"]\n'
        hosts_toml(tmp_path, secure.host, text)
        await service.pull(f"{secure.host}/app:v1", SECRET)
        assert len(mirror.requested("manifests")) == 1


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        ("17", 17),
        (" 17 ", 17),
        ("1000000060", 60),
        ("999999999", 999999999),
        ("", None),
        ("soon", None),
        ("Sun, 09 Sep 2001 01:47:40 GMT", 60),
        ("Sun, 09 Sep 2001 01:40:00 GMT", 0),
        ("Sun, 99 Sep 2001", None),
        ("-5", None),
        ("9" * 400, None),
    ],
)
def test_the_retry_delay_of_a_response_is_parsed(value: str, seconds: float | None) -> None:
    assert registries.retry_after(value, 1e9) == seconds
