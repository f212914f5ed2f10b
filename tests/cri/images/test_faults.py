"""Tests pulls from registries that fail, send wrong answers or attack: a refused pull adds no
image and reveals no secret."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cni_plugins.net import netns
from cri_server.images.archives import build
from cri_server.images.archives.build import image, layer
from cri_server.images.formats import manifest as types
from cri_server.images.formats.digests import digest_of
from cri_server.images.model import Auth
from cri_server.images.service import ImageService
from pyrunc.errors import DeadlineExceeded, Error, NotFound, PeerError, Unsupported
from pyrunc.kernel.fd import closing_fd
from tests.cri.images.conftest import only_erofs
from tests.cri.images.test_pull import hosts_toml, left_over, make
from tests.kernel.cni.harness import open_new_namespace
from tests.support.layer_threads import LayerThreads
from tests.support.oci_archives import descriptor, manifest_of
from tests.support.registry import Fault, Registry

pytestmark = pytest.mark.usefixtures("each_store")

PASSWORD = "s3cret-w0rd"


@asynccontextmanager
async def serve(tmp_path: Path, no_progress_timeout_s: float) -> AsyncIterator[ImageService]:
    """Provide an image service whose pulls and pushes fail after this time without progress."""
    service = ImageService(
        tmp_path / "images",
        [tmp_path / "certs.d"],
        no_progress_timeout_s=no_progress_timeout_s,
        jobs=LayerThreads(),
    )
    await service.start()
    yield service
    await service.close()


async def refused(service: ImageService, name: str, auth: Auth | None = None) -> Error:
    """Pull an image; assert that this fails within a minute and adds no image. Return the error."""
    started = time.monotonic()
    with pytest.raises(Error) as caught:
        await service.pull(name, auth)
    assert await service.list() == [] and time.monotonic() - started < 60
    return caught.value


# ---- faults that pass


@pytest.mark.parametrize(
    "fault",
    [
        Fault("/blobs/", times=1, cut_at=70_000),
        Fault("/blobs/", times=3, cut_at=70_000),
        Fault("/blobs/", times=2, cut_at=0),
        Fault("/blobs/", times=1, status=500),
        Fault("/blobs/", times=2, status=429, headers={"Retry-After": "0"}),
        Fault("/manifests/", times=2, status=503),
        Fault("/manifests/", times=1, status=502, body=b"<html>" + b"x" * 100_000),
        Fault("/manifests/", times=1, cut_at=10),
        Fault("/blobs/", media_type="text/html"),
        Fault("/blobs/", length=-1),
    ],
    ids=lambda f: " ".join(
        f"{k}={v!r}" for k, v in vars(f).items() if v not in (None, b"", {}, 0, False)
    )[:70],
)
async def test_a_pull_survives_a_passing_fault(
    registry: Registry, service: ImageService, fault: Fault
) -> None:
    built = make()
    registry.push("app:v1", built)
    registry.faults.append(fault)
    if fault.length == -1:
        fault.cut_at = 10**9  # a body that ends with the connection
    assert await service.pull(f"{registry.host}/app:v1") == built.id


async def test_an_interrupted_blob_continues_at_its_offset(
    registry: Registry, service: ImageService
) -> None:
    built = make(layers=1, size=400_000)
    registry.push("app:v1", built, compress="")
    layer_digest = digest_of(built.layers[0])
    registry.fault(layer_digest, times=1, cut_at=300_000)
    await service.pull(f"{registry.host}/app:v1")
    ranges = [r.headers.get("range") for r in registry.requested(layer_digest)]
    assert ranges == [None, "bytes=300000-"]


async def test_an_interrupted_blob_of_a_server_without_ranges_starts_again(
    registry: Registry, service: ImageService
) -> None:
    built = make(layers=1, size=400_000)
    registry.push("app:v1", built)
    registry.fault("/blobs/.*", times=1, cut_at=0)
    registry.fault("/blobs/", times=1, cut_at=300_000)
    registry.fault("/blobs/", ignore_range=True)
    assert await service.pull(f"{registry.host}/app:v1") == built.id


# ---- faults that last


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (Fault("/manifests/", status=500), PeerError, "RegistryUnavailable: .*500"),
        (Fault("/manifests/", status=429), PeerError, "RegistryUnavailable: .*429"),
        (Fault("/blobs/", status=503), PeerError, "RegistryUnavailable: .*503"),
        (
            Fault("/blobs/", cut_at=1000),
            PeerError,
            "RegistryUnavailable: .*(ended after|broke off)",
        ),
        (Fault("/manifests/", status=403), PeerError, "403 unauthorized"),
        (Fault("/manifests/", status=404), NotFound, "app v1: not found"),
        (Fault("/manifests/", status=418), PeerError, "unexpected status 418"),
        (Fault("/manifests/", status=200, body=b"<html>hello</html>"), PeerError, "not JSON"),
        (Fault("/manifests/", content=b""), PeerError, "digest|not JSON"),
        (Fault("/manifests/", content=b"\xef\xbb\xbf{}"), PeerError, "digest|not JSON"),
        (Fault("/manifests/", content=b"x" * 5_000_000), PeerError, "more than 4194304 bytes"),
        (Fault("/manifests/", status=200, body=b"[" * 100_000), PeerError, "not JSON"),
        (Fault("/manifests/", media_type="text/weird"), PeerError, "sent as 'text/weird'"),
        (Fault("/manifests/", media_type=types.OCI_INDEX), PeerError, "its media type is"),
        (
            Fault("/manifests/", headers={"Docker-Content-Digest": f"sha256:{'1' * 64}"}),
            PeerError,
            "has the digest",
        ),
        (Fault("/manifests/", headers={"X": "y" * 100_000}), PeerError, "RegistryUnavailable"),
        (
            Fault("/manifests/", headers={f"X-{n}": "y" * 50_000 for n in range(210)}),
            PeerError,
            "RegistryUnavailable",
        ),
        (
            Fault("/manifests/", headers={"Content-Encoding": "gzip"}, length=10),
            PeerError,
            "digest|JSON|broke",
        ),
        (
            Fault("/blobs/", content=b"other bytes"),
            PeerError,
            "shorter than promised",
        ),
        (Fault("/blobs/", length=10**9), PeerError, r"has 1000000000 bytes, not"),
        (Fault("/blobs/", length=-1, content=b"z" * 3_000_000), PeerError, "has more than"),
        (Fault("/blobs/", status=200, body=b""), PeerError, "ended after 0"),
        (
            Fault("/v2/", status=302, headers={"Location": "file:///etc/passwd"}),
            PeerError,
            "redirect to a 'file'",
        ),
        (
            Fault("/v2/", status=302, headers={"Location": "gopher://x/"}),
            PeerError,
            "redirect to a 'gopher'",
        ),
        (
            Fault("/v2/", status=302, headers={"Location": "/v2/again"}),
            PeerError,
            "more than 5 redirects",
        ),
        (
            Fault("/v2/", status=307, headers={"Location": "http://u:p@127.0.0.1/"}),
            PeerError,
            "a URL with a user name is not followed",
        ),
        (Fault("/v2/", status=302), PeerError, "unexpected status 302"),
        (Fault("/v2/", status=401), PeerError, "no supported login method"),
        (
            Fault("/v2/", status=401, headers={"WWW-Authenticate": 'Bearer realm="file:///x"'}),
            PeerError,
            "no token server",
        ),
        (
            Fault("/v2/", status=401, headers={"WWW-Authenticate": "Bearer"}),
            PeerError,
            "no token server",
        ),
        (
            Fault("/v2/", status=401, headers={"WWW-Authenticate": '",=;"\\' * 50}),
            PeerError,
            "no supported login method",
        ),
        (
            Fault("/v2/", status=401, headers={"WWW-Authenticate": "Negotiate, NTLM"}),
            PeerError,
            "no supported login method",
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, str) else "",
)
async def test_a_lasting_fault_fails_the_pull_as_documented(
    tmp_path: Path,
    registry: Registry,
    service: ImageService,
    fault: Fault,
    kind: type[Error],
    words: str,
) -> None:
    registry.push("app:v1", make())
    registry.faults.append(fault)
    error = await refused(service, f"{registry.host}/app:v1", Auth("u", PASSWORD))
    assert isinstance(error, kind)
    assert re.search(words, error.message), error.message
    assert f"pulling {registry.host}/app:v1: " in error.message and PASSWORD not in error.message
    assert left_over(tmp_path) == set()


async def test_an_unreachable_registry_is_an_error(service: ImageService) -> None:
    error = await refused(service, "127.0.0.1:9/app:v1")
    assert (
        error.message
        == "RegistryUnavailable: pulling 127.0.0.1:9/app:v1: 127.0.0.1:9: connection refused"
    )
    error = await refused(service, "no-such-host.invalid/app:v1")
    assert "the name no-such-host.invalid does not resolve" in error.message


@pytest.mark.requirement("5.1.4")
@pytest.mark.parametrize(
    "fault",
    [
        Fault("/manifests/", stall_at=20),
        Fault("/blobs/", stall_at=0),
        Fault("/blobs/", stall_at=100_000),
        Fault("/blobs/", byte_delay_s=0.05),
    ],
    ids=["manifest", "blob from the start", "blob", "a byte now and then"],
)
async def test_a_stalled_registry_fails_the_pull(
    tmp_path: Path, registry: Registry, fault: Fault
) -> None:
    registry.push("app:v1", make())
    registry.faults.append(fault)
    await check_stall(tmp_path, registry, 0.8)


async def check_stall(tmp_path: Path, registry: Registry, timeout_s: float) -> None:
    """Assert that a pull fails for lack of progress and leaves no files in the store."""
    async with serve(tmp_path, timeout_s) as service:
        error = await refused(service, f"{registry.host}/app:v1")
    assert isinstance(error, DeadlineExceeded)
    assert error.message == f"pulling {registry.host}/app:v1: no progress for {timeout_s:g} s"
    assert left_over(tmp_path) == set()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("POST /v2/copy/blobs/uploads/", stall_at=0),
        Fault("PUT /v2/copy/blobs/uploads/", stall_at=0),
        Fault("PUT /v2/copy/blobs/uploads/", byte_delay_s=0.05),
        Fault("PUT /v2/copy/manifests/", stall_at=0),
    ],
    ids=["before a blob", "after a blob", "a byte now and then", "manifest"],
)
async def test_a_stalled_registry_fails_the_push(
    tmp_path: Path, registry: Registry, fault: Fault
) -> None:
    registry.push("app:v1", make())
    name = f"{registry.host}/app:v1"
    async with serve(tmp_path, 0.8) as service:
        await service.pull(name)
        with Registry(tmp_path / "other") as other:
            other.faults.append(fault)
            with pytest.raises(DeadlineExceeded) as caught:
                await service.push(name, f"{other.host}/copy:v1", None, lambda progress: None)
    assert caught.value.message == f"pushing {other.host}/copy:v1: no progress for 0.8 s"


@only_erofs
async def test_a_slow_blob_stalls_regardless_of_its_decoded_size(
    tmp_path: Path, registry: Registry
) -> None:
    # if decoded bytes were progress, 130 bytes of zstd would count as 4 MiB
    built = image([layer({"zeros": bytes(256 << 20)})], {"Cmd": ["/zeros"]})
    registry.push("app:v1", built, compress="zstd")
    registry.faults.append(Fault("/blobs/", byte_delay_s=0.004))  # less than 250 bytes a second
    await check_stall(tmp_path, registry, 3)


async def test_a_stalled_pull_does_not_delay_another_pull(
    tmp_path: Path, registry: Registry
) -> None:
    registry.push("slow:v1", make(1))
    registry.push("quick:v1", make(2))
    registry.fault("/slow/blobs/", stall_at=1000)
    async with serve(tmp_path, 90) as service:
        slow = asyncio.create_task(service.pull(f"{registry.host}/slow:v1"))
        await asyncio.wait_for(service.pull(f"{registry.host}/quick:v1"), 60)
        assert not slow.done()
        slow.cancel()
        await asyncio.wait([slow])


# ---- requests to other servers, and their secrets


@pytest.mark.parametrize("status", [200, 404, 403])
async def test_a_push_asks_the_storage_to_which_the_registry_redirects(
    tmp_path: Path, registry: Registry, service: ImageService, status: int
) -> None:
    """The push sends the storage no login."""
    registry.push("app:v1", make())
    await service.pull(f"{registry.host}/app:v1")
    with (
        Registry(tmp_path / "a", auth=("bearer", "u", PASSWORD)) as front,
        Registry(tmp_path / "b") as storage,
    ):
        storage.fault("/stored", status=status)
        # as registries with S3 as storage answer
        front.fault(
            "HEAD /v2/copy/blobs/", status=307, headers={"Location": f"{storage.url}/stored"}
        )
        await service.push(
            f"{registry.host}/app:v1",
            f"{front.host}/copy:v1",
            Auth(username="u", password=PASSWORD),
            lambda progress: None,
        )
        assert len(front.requested("PUT .*/blobs/uploads/")) == (0 if status == 200 else 4)
        assert ("copy", "v1") in front.manifests
        assert storage.requested("HEAD /stored")
        assert all("authorization" not in request.headers for request in storage.requests)


async def test_a_redirect_to_another_host_gets_no_secret(
    tmp_path: Path, service: ImageService
) -> None:
    built = make()
    with (
        Registry(tmp_path / "a", auth=("bearer", "u", PASSWORD)) as front,
        Registry(tmp_path / "b") as storage,
    ):
        front.push("app:v1", built)
        storage.push("app:v1", built)
        front.fault(
            "GET /v2/app/blobs/", status=307, headers={"Location": f"{storage.url}/v2/app/blobs/x"}
        )
        for digest in [p.name for p in (tmp_path / "a" / "blobs").iterdir()]:
            front.faults.insert(
                0,
                Fault(
                    f"/blobs/sha256:{digest}",
                    status=307,
                    headers={"Location": f"{storage.url}/v2/app/blobs/sha256:{digest}?signature=1"},
                ),
            )
        hosts_toml(
            tmp_path,
            front.host,
            f'[host."{front.url}"]\n[host."{front.url}".header]\nX-Secret = "{PASSWORD}"\n',
        )
        assert await service.pull(f"{front.host}/app:v1", Auth("u", PASSWORD)) == built.id
        assert (
            storage.requests and front.requested("/manifests/")[-1].headers["x-secret"] == PASSWORD
        )
        for request in storage.requests:
            assert "authorization" not in request.headers and "x-secret" not in request.headers


AUTHS = {
    "password": Auth("u", PASSWORD),
    "refresh token": Auth(identity_token=PASSWORD),
    "bearer": Auth(registry_token=PASSWORD),
}


@pytest.mark.parametrize(
    "challenge", ['Basic realm="x"', 'Bearer realm="{thief}/token",service="s"']
)
@pytest.mark.parametrize("auth", AUTHS.values(), ids=AUTHS.keys())
@pytest.mark.parametrize(("what", "detour"), [("manifests", False), ("blobs", True)])
async def test_a_redirect_target_cannot_obtain_the_secret(
    tmp_path: Path, service: ImageService, challenge: str, auth: Auth, what: str, detour: bool
) -> None:
    """When a registry redirects to another host that demands a login, the pull fails."""
    with Registry(tmp_path / "front") as front, Registry(tmp_path / "thief") as thief:
        front.push("app:v1", make())
        thief.fault("/token", status=200, body=b'{"token": "t"}')
        if detour:
            thief.fault("/stolen/1", status=307, headers={"Location": f"{front.url}/stolen/2"})
            front.fault("/stolen/2", status=307, headers={"Location": f"{thief.url}/stolen/3"})
        thief.fault(
            "/stolen/", status=401, headers={"WWW-Authenticate": challenge.format(thief=thief.url)}
        )
        front.fault(f"/v2/app/{what}/", status=307, headers={"Location": f"{thief.url}/stolen/1"})
        error = await refused(service, f"{front.host}/app:v1", auth)
        assert (
            f"{front.host} redirects to {thief.host}, which requires another login" in error.message
        )
        assert thief.requested("/stolen/") and not thief.requested("/token")
        assert all("authorization" not in request.headers for request in thief.requests)


async def test_a_redirect_inside_the_registry_is_logged_in(
    tmp_path: Path, service: ImageService
) -> None:
    with Registry(tmp_path / "front", auth=("bearer", "u", PASSWORD)) as front:
        built = make()
        front.push("app:v1", built)
        for way in (
            "manifests/v1",
            *(f"blobs/sha256:{p.name}" for p in (front.root / "blobs").iterdir()),
        ):
            front.fault(
                f"/v2/old/{way}", status=307, headers={"Location": f"{front.url}/v2/app/{way}"}
            )
        assert await service.pull(f"{front.host}/old:v1", Auth("u", PASSWORD)) == built.id


DISTANT, LINK = "198.51.100.1", "169.254.169.254"


@contextlib.contextmanager
def network_with_a_distance() -> Iterator[None]:
    """Run a `with` block in a network namespace that has loopback and the addresses LINK
    (link-local) and DISTANT (like that of another machine)."""
    with closing_fd(open_new_namespace()) as namespace, netns.entered(namespace):
        for arguments in (
            "link set lo up",
            f"addr add {DISTANT}/32 dev lo",
            f"addr add {LINK}/32 dev lo",
        ):
            subprocess.run(["ip", *arguments.split()], check=True)
        yield


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{port}/x",
        "http://localhost:{port}/x",
        "http://[::1]:{port}/x",
        f"http://{LINK}:{{port}}/latest",
    ],
)
@pytest.mark.parametrize("how", ["redirect", "realm"])
async def test_a_distant_registry_cannot_redirect_to_this_machine(
    tmp_path: Path, target: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a registry on another machine redirects to this machine or to a link-local address, not
    one byte is sent there."""
    # urllib3 tests once, when it is imported, whether ::1 exists. The host may lack it, but not the
    # network of this test.
    monkeypatch.setattr("urllib3.util.connection.HAS_IPV6", True)
    with (
        network_with_a_distance(),
        Registry(tmp_path / "home", address="0.0.0.0") as home,
        # on this machine, but by its address it could be elsewhere
        Registry(tmp_path / "distant", address=DISTANT) as distant,
        contextlib.ExitStack() as listening,
    ):
        port = int(home.host.rpartition(":")[2])
        listening.enter_context(socket.create_server(("::1", port), family=socket.AF_INET6))
        url = target.format(port=port)
        hosts_toml(tmp_path, "registry.example", f'server = "{distant.url}"\n')
        if how == "redirect":
            distant.fault("/v2/", status=307, headers={"Location": url})
        else:
            distant.fault("/v2/", status=401, headers={"WWW-Authenticate": f'Bearer realm="{url}"'})
        async with serve(tmp_path, 2) as service:
            error = await refused(service, "registry.example/app:v1", Auth("u", PASSWORD))
        assert "a loopback or link-local address" in error.message
        assert distant.requests and home.requests == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b'{"token": 5}',
        b'{"token": ""}',
        b'{"token": "a\\r\\nX: y"}',
        b'{"token": "' + b"x" * 2_000_000 + b'"}',
        b"{" * 100_000,
    ],
    ids=["empty", "list", "number", "nothing", "newline", "huge", "deep"],
)
async def test_a_nonsensical_answer_of_a_token_server_is_refused(
    tmp_path: Path, service: ImageService, answer: bytes
) -> None:
    with Registry(tmp_path / "locked", auth=("bearer", "u", PASSWORD)) as locked:
        locked.push("app:v1", make())
        locked.fault("/token", status=200, body=answer)
        error = await refused(service, f"{locked.host}/app:v1", Auth("u", PASSWORD))
        assert "token" in error.message and PASSWORD not in error.message


async def test_no_secret_is_logged(
    tmp_path: Path, service: ImageService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with Registry(tmp_path / "locked", auth=("bearer", "u", PASSWORD)) as locked:
        locked.push("app:v1", make())
        await service.pull(f"{locked.host}/app:v1", Auth("u", PASSWORD))
        locked.fault("/token", status=500, body=PASSWORD.encode())
        with pytest.raises(Error) as caught:
            await service.pull(f"{locked.host}/app:v1", Auth("u", PASSWORD + "x"))
        secrets = {PASSWORD, *locked.tokens, "dTpzM2NyZXQt"}
        written = caplog.text + repr(caught.value) + repr(Auth("u", PASSWORD))
        assert not [s for s in secrets if s in written]


# ---- invalid manifests and configurations


def manifest_with(
    registry: Registry,
    change: Callable[[dict[str, Any]], object],
    built: build.BuiltImage | None = None,
) -> None:
    data, blobs = manifest_of(built or make())
    for blob in blobs.values():
        registry.put_blob(blob)
    document = json.loads(data)
    change(document)
    registry.put_manifest("app:v1", json.dumps(document).encode(), types.OCI_MANIFEST)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda m: m.update(manifests=[]), PeerError, "both layers and manifests"),
        (lambda m: m.update(layers=m["layers"] * 200), PeerError, "more than 500 layers"),
        (
            lambda m: m.update(layers=m["layers"][:2]),
            PeerError,
            "2 layers, but the image configuration has 3 diff ids",
        ),
        (
            lambda m: m.update(layers=m["layers"][::-1]),
            PeerError,
            "as the image's configuration says",
        ),
        (lambda m: m.update(layers="x"), PeerError, "layers"),
        (lambda m: m.update(schemaVersion=1), Unsupported, "schema 1"),
        (
            lambda m: m.update(
                mediaType="application/vnd.docker.distribution.manifest.v1+prettyjws"
            ),
            PeerError,
            "its media type is",
        ),
        (
            lambda m: m["layers"][0].update(digest="sha384:" + "a" * 96),
            PeerError,
            "not a sha256 or sha512 digest",
        ),
        (
            lambda m: m["layers"][0].update(digest="sha512:" + "a" * 64),
            PeerError,
            "not a sha256 or sha512 digest",
        ),
        (lambda m: m["layers"][0].update(digest="sha512:" + "a" * 128), NotFound, "not found"),
        (
            lambda m: m["layers"][0].update(digest=m["layers"][0]["digest"].upper()),
            PeerError,
            "not a sha256 or sha512 digest",
        ),
        (
            lambda m: m["layers"][0].update(digest="sha256:../../../etc/passwd"),
            PeerError,
            "not a sha256 or sha512 digest",
        ),
        (lambda m: m["layers"][0].update(digest="sha256:" + "0" * 64), NotFound, "not found"),
        (lambda m: m["layers"][0].update(size=-1), PeerError, "out of range"),
        (lambda m: m["layers"][0].update(size=1 << 62), PeerError, "out of range"),
        (lambda m: m["layers"][0].update(size=7), PeerError, "bytes, not 7"),
        (
            lambda m: m["layers"][0].update(size=m["layers"][0]["size"] + 1),
            PeerError,
            "shorter than promised",
        ),
        (lambda m: m["layers"][0].update(size="12"), PeerError, "size"),
        (
            lambda m: m["layers"][0].update(
                mediaType="application/vnd.oci.image.layer.v1.tar+gzip+encrypted"
            ),
            Unsupported,
            "encrypted",
        ),
        (
            lambda m: m["layers"][0].update(mediaType="application/vnd.wasm"),
            PeerError,
            "2 layers and application/vnd.wasm, but",
        ),
        (
            lambda m: m["config"].update(size=5_000_000),
            PeerError,
            "the image configuration has 5000000 bytes",
        ),
        (lambda m: m.pop("config"), PeerError, "config"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
async def test_a_wrong_manifest_is_refused(
    tmp_path: Path,
    registry: Registry,
    service: ImageService,
    change: Callable[[dict[str, Any]], object],
    kind: type[Error],
    words: str,
) -> None:
    manifest_with(registry, change)
    error = await refused(service, f"{registry.host}/app:v1")
    assert isinstance(error, kind) and re.search(words, error.message), error.message
    assert left_over(tmp_path) == set()


async def test_foreign_urls_are_never_fetched(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    with Registry(tmp_path / "foreign") as foreign:

        def change(manifest: dict[str, Any]) -> None:
            manifest["layers"][0].update(urls=[f"{foreign.url}/layer"], digest="sha256:" + "0" * 64)

        manifest_with(registry, change)
        await refused(service, f"{registry.host}/app:v1")
        assert foreign.requests == []


async def test_a_manifest_with_a_repeated_key_is_refused(
    registry: Registry, service: ImageService
) -> None:
    data, _ = manifest_of(make())
    registry.put_manifest("app:v1", data[:-1] + b', "config": {}}', types.OCI_MANIFEST)
    assert "occurs twice" in (await refused(service, f"{registry.host}/app:v1")).message


async def test_nested_indexes_have_a_limit(registry: Registry, service: ImageService) -> None:
    """An image below three levels of indexes is pulled; one below five is refused."""
    # An index cannot contain itself, because it would need its own digest.
    built = make()
    platform = {"os": "linux", "architecture": types.host_platform().architecture}
    data, blobs = manifest_of(built)
    kind = types.OCI_MANIFEST
    for blob in blobs.values():
        registry.put_blob(blob)
    for level in range(6):
        registry.put_manifest(f"app:{level}", data, kind)
        entry = {**descriptor(data, kind), "platform": platform}
        kind = types.OCI_INDEX
        data = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": [entry]}).encode()
    assert await service.pull(f"{registry.host}/app:3") == built.id
    await service.remove(built.id)
    assert "nested more than 4 deep" in (await refused(service, f"{registry.host}/app:5")).message


@pytest.mark.parametrize(
    ("top", "words"),
    [
        (
            {"rootfs": {"type": "layers", "diff_ids": ["md5:1"]}},
            "not a list of sha256 or sha512 diff ids",
        ),
        ({"rootfs": {"type": "other", "diff_ids": []}}, "not a list of sha256 or sha512 diff ids"),
        (
            {"rootfs": {"type": "layers", "diff_ids": ["sha256:" + "1" * 64]}},
            "as the image's configuration says",
        ),
        ({"rootfs": None}, "rootfs"),
        ({"config": {"Env": "PATH"}}, "Env"),
        ({"config": {"Cmd": ["a\0b"]}}, "NUL"),
        ({"config": {"User": 5}}, "User"),
        ({"config": {"Volumes": ["/x"]}}, "Volumes"),
    ],
    ids=str,
)
async def test_a_wrong_configuration_is_refused(
    registry: Registry, service: ImageService, top: dict[str, Any], words: str
) -> None:
    registry.push("app:v1", image([layer({"a": "a"})], **top))
    assert words in (await refused(service, f"{registry.host}/app:v1")).message


@pytest.mark.requirement("5.2.2", "5.2.3")
@pytest.mark.parametrize(
    ("user", "uid", "username"),
    [
        ("", None, ""),
        ("0", 0, ""),
        ("1002", 1002, ""),
        ("1003:1004", 1003, ""),
        ("www-data", None, "www-data"),
        ("www-data:adm", None, "www-data"),
        ("2147483647", 2147483647, ""),
        ("2147483648", None, "2147483648"),
        ("4294967296", None, "4294967296"),
        ("-1", None, "-1"),
        ("root:x:0:0", None, "root"),
        ("a\nb", None, "a\nb"),
        ("٣", None, "٣"),
        ("1e3", None, "1e3"),
    ],
)
async def test_the_user_is_a_number_or_a_name_and_never_root_by_mistake(
    registry: Registry, service: ImageService, user: str, uid: int | None, username: str
) -> None:
    registry.push("app:v1", image([layer({"a": "a"})], {"User": user}))
    status = await service.status(await service.pull(f"{registry.host}/app:v1"))
    assert status is not None and (status.uid, status.username) == (uid, username)


async def test_content_of_another_digest_is_refused(
    registry: Registry, service: ImageService
) -> None:
    """When a registry answers with another manifest than the requested one, the pull fails."""
    registry.push("app:v1", make(1))
    digest = f"sha256:{hashlib.sha256(b'wanted').hexdigest()}"
    registry.manifests["app", digest] = registry.manifests["app", "v1"]
    error = await refused(service, f"{registry.host}/app@{digest}")
    assert f"not {digest}" in error.message


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a/UPPER",
        "a//b",
        "a:b:c",
        "name:",
        "name@",
        "name@sha256:abc",
        "a" * 300,
        "-a",
        "a/../b",
        "host:99999999/a",
        "a\nb",
        "a b",
        "http://a/b",
        "x@sha384:" + "a" * 96,
    ],
)
async def test_a_malformed_reference_is_refused(service: ImageService, name: str) -> None:
    with pytest.raises(Error) as caught:
        await service.pull(name)
    assert caught.value.kind in ("invalid_argument", "unsupported")


# ---- invalid answers to ranges, and invalid numbers


@pytest.mark.parametrize(
    "answer",
    [
        Fault(
            "", status=206, body=b"x" * 400_000, headers={"Content-Range": "bytes 0-399999/400000"}
        ),
        Fault("", status=206, body=b"x" * 9, headers={"Content-Range": "bytes 100000-100008/9"}),
        Fault(
            "", status=206, body=b"x" * 400_000, headers={"Content-Range": "bytes 100000-100008/*"}
        ),
        Fault("", status=206, body=b"x" * 9),
        Fault("", status=206, body=b"x" * 9, headers={"Content-Range": f"bytes {'9' * 5000}-1/*"}),
        Fault(
            "",
            status=206,
            body=b"x" * 9,
            headers={"Content-Range": "bytes -1-8/9, bytes 100000-100008/*"},
        ),
        Fault(
            "",
            status=206,
            body=b"x" * 9,
            headers={"Content-Type": "multipart/byteranges; boundary=a"},
        ),
        Fault("", status=200, body=b"x" * 500_000),
        Fault("", status=200, headers={"Content-Length": "9" * 5000}),
        Fault("", status=200, headers={"Content-Length": "\xb2"}),
        Fault("", status=200, headers={"Content-Length": "-1"}),
        Fault("", status=416),
        Fault("", status=503, headers={"Retry-After": "\xb2"}),
        Fault("", status=503, headers={"Retry-After": "-5"}),
    ],
)
async def test_wrong_replies_to_range_requests_fail_the_pull(
    registry: Registry,
    service: ImageService,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    answer: Fault,
) -> None:
    """When a download breaks off and the registry answers the request for the rest with a wrong
    status or header, the error names the registry, and the store has no new content."""
    monkeypatch.setattr("cri_server.images.registry.registry.BACKOFF_S", (0.01,))
    built = make(layers=1, size=400_000)
    registry.push("app:v1", built, compress="")
    digest = digest_of(built.layers[0])
    registry.fault(digest, times=1, cut_at=100_000)
    answer.match = digest
    registry.faults.append(answer)
    error = await refused(service, f"{registry.host}/app:v1")
    assert isinstance(error, PeerError) and registry.host in error.message, error.message
    assert not re.search(r"[a-z]Error", error.message) and not left_over(tmp_path), error.message


async def test_a_download_that_always_starts_again_fails(
    registry: Registry, service: ImageService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When each answer begins with the first byte and breaks off, the pull fails after fewer than
    15 requests."""
    # bytes that were received before are no progress
    monkeypatch.setattr("cri_server.images.registry.registry.BACKOFF_S", (0.01,))
    built = make(layers=1, size=1_500_000)
    registry.push("app:v1", built, compress="")
    digest = digest_of(built.layers[0])
    for number in range(60):
        registry.fault(digest, times=1, cut_at=300_000 + number % 2 * 600_000, ignore_range=True)
    error = await refused(service, f"{registry.host}/app:v1")
    assert "RegistryUnavailable" in error.message
    assert len(registry.requested(digest)) < 15
