"""Tests pulls under a signature policy: which signatures are accepted, and the error of a refused
pull."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cri_server.images.formats import manifest as types
from cri_server.images.model import Auth
from cri_server.images.service import ImageService
from cri_server.images.signatures.cosign import PAYLOAD, SIGNATURE
from pyrunc.errors import Error, PeerError, WrongState
from tests.cri.images.test_pull import hosts_toml, left_over, make
from tests.support.registry import Registry

NAME = "registry.example/team/app"
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, bytes], bytes]]] = {
    "ec": (
        lambda: ec.generate_private_key(ec.SECP256R1()),
        lambda key, data: key.sign(data, ec.ECDSA(SHA256())),
    ),
    "ec384": (
        lambda: ec.generate_private_key(ec.SECP384R1()),
        lambda key, data: key.sign(data, ec.ECDSA(SHA256())),
    ),
    "rsa": (
        lambda: rsa.generate_private_key(65537, 2048),
        lambda key, data: key.sign(data, padding.PKCS1v15(), SHA256()),
    ),
    "ed25519": (ed25519.Ed25519PrivateKey.generate, lambda key, data: key.sign(data)),
}


class Signer:
    """A key that signs images like `cosign sign --key`."""

    def __init__(self, kind: str = "ec") -> None:
        make_key, self._sign = KINDS[kind]
        self._key = make_key()

    @property
    def public(self) -> str:
        """Return the public key in the form of `keyData` in a signature policy."""
        pem = self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return base64.b64encode(pem).decode()

    def layer(
        self, registry: Registry, digest: str, claimed: str = NAME, **changes: Any
    ) -> dict[str, Any]:
        """Sign the manifest `digest` as image `claimed`; return the descriptor of the signature.
        `changes`: other signed fields."""
        critical = {
            "identity": {"docker-reference": claimed},
            "image": {"docker-manifest-digest": digest},
            "type": "cosign container image signature",
            **changes,
        }
        payload = json.dumps({"critical": critical, "optional": None}).encode()
        signature = base64.b64encode(self._sign(self._key, payload)).decode()
        stored = registry.put_blob(payload)
        return {
            "mediaType": PAYLOAD,
            "size": len(payload),
            "digest": stored,
            "annotations": {SIGNATURE: signature},
        }


def attach(
    registry: Registry, digest: str, *layers: dict[str, Any], path: str = "team/app"
) -> None:
    config = {"mediaType": types.OCI_CONFIG, "size": 2, "digest": registry.put_blob(b"{}")}
    document = {
        "schemaVersion": 2,
        "mediaType": types.OCI_MANIFEST,
        "config": config,
        "layers": list(layers),
    }
    tag = f"{digest.replace(':', '-')}.sig"
    registry.put_manifest(f"{path}:{tag}", json.dumps(document).encode(), types.OCI_MANIFEST)


def demand(tmp_path: Path, service: ImageService, *requirements: dict[str, Any]) -> None:
    """Write a policy with these requirements for registry.example; it rejects all other images."""
    path = tmp_path / "policy.json"
    scopes = {"registry.example": list(requirements)}
    path.write_text(json.dumps({"default": [{"type": "reject"}], "transports": {"docker": scopes}}))
    service.policy = str(path)


def signed(*signers: Signer, identity: str = "matchRepository") -> dict[str, Any]:
    keys = {"keyDatas": [signer.public for signer in signers]}
    return {"type": "sigstoreSigned", **keys, "signedIdentity": {"type": identity}}


@pytest.fixture
def pushed(tmp_path: Path, registry: Registry) -> str:
    """Push an image; return its digest."""
    hosts_toml(tmp_path, "registry.example", f'server = "{registry.url}"\n')
    return registry.push("team/app:v1", make(layers=1))


async def refused(service: ImageService, tmp_path: Path, image: str = f"{NAME}:v1") -> str:
    """Assert that a pull is refused and leaves the store empty; return the error message."""
    with pytest.raises(Error) as caught:
        await service.pull(image)
    assert caught.value.message.startswith(f"SignatureValidationFailed: pulling {image}: ")
    assert await service.list() == [] and not left_over(tmp_path)
    return caught.value.message


@pytest.mark.parametrize("kind", KINDS)
async def test_an_image_signed_by_the_key_is_accepted(
    tmp_path: Path, registry: Registry, service: ImageService, pushed: str, kind: str
) -> None:
    signer = Signer(kind)
    demand(tmp_path, service, signed(signer))
    assert "the image has no signature" in await refused(service, tmp_path)
    attach(registry, pushed, Signer(kind).layer(registry, pushed), signer.layer(registry, pushed))
    await service.pull(f"{NAME}:v1")
    await service.pull(f"{NAME}@{pushed}")
    [listed] = await service.list()
    assert listed.repo_tags == [f"{NAME}:v1"]


async def test_other_scopes_are_rejected_and_accepted(
    tmp_path: Path, registry: Registry, service: ImageService, pushed: str
) -> None:
    demand(tmp_path, service, {"type": "insecureAcceptAnything"})
    assert "rejected by" in await refused(service, tmp_path, "other.example/app:v1")
    assert not any("other" in request.path for request in registry.requests)
    await service.pull(f"{NAME}:v1")


@pytest.mark.requirement("12.1")
async def test_an_image_must_meet_all_requirements(
    tmp_path: Path, registry: Registry, service: ImageService, pushed: str
) -> None:
    one, two = Signer(), Signer()
    demand(tmp_path, service, signed(one), signed(two))
    attach(registry, pushed, one.layer(registry, pushed))
    assert "does not verify with any key of the policy" in await refused(service, tmp_path)
    attach(registry, pushed, one.layer(registry, pushed), two.layer(registry, pushed))
    await service.pull(f"{NAME}:v1")


async def test_signatures_of_other_images_are_refused(
    tmp_path: Path, registry: Registry, service: ImageService, pushed: str
) -> None:
    signer = Signer()
    demand(tmp_path, service, signed(signer))
    other = f"sha256:{'0' * 64}"
    good = signer.layer(registry, pushed)
    tampered = {**good, "digest": signer.layer(registry, pushed, "registry.example/x")["digest"]}
    for layer, why in (
        (signer.layer(registry, other), "a signature is for another manifest"),
        (
            signer.layer(registry, pushed, "registry.example/team/other"),
            "is for 'registry.example/team/other'",
        ),
        (
            signer.layer(registry, pushed, type="atomic container signature"),
            "the type 'atomic container signature'",
        ),
        (signer.layer(registry, pushed, identity={}), "not a claim about an image"),
        (
            {**good, "annotations": {SIGNATURE: "AAAA"}},
            "does not verify with any key of the policy",
        ),
        ({**good, "annotations": {SIGNATURE: "?"}}, "the image has no signature"),
        ({**good, "annotations": {SIGNATURE: "é"}}, "the image has no signature"),
        ({**good, "mediaType": "text/plain"}, "the image has no signature"),
        (tampered, "does not verify with any key of the policy"),
    ):
        attach(registry, pushed, layer)
        assert why in await refused(service, tmp_path), why


async def test_the_signed_tag_must_match_unless_the_policy_ignores_tags(
    tmp_path: Path, registry: Registry, service: ImageService, pushed: str
) -> None:
    signer = Signer()
    demand(tmp_path, service, signed(signer, identity="matchRepoDigestOrExact"))
    attach(registry, pushed, signer.layer(registry, pushed, f"{NAME}:v0"))
    assert "which matchRepoDigestOrExact does not accept" in await refused(service, tmp_path)
    attach(registry, pushed, signer.layer(registry, pushed, f"{NAME}:v1"))
    await service.pull(f"{NAME}:v1")


@pytest.mark.parametrize("of_index", [True, False])
async def test_a_signature_of_the_index_or_of_this_machines_image_suffices(
    tmp_path: Path, registry: Registry, service: ImageService, pushed: str, of_index: bool
) -> None:
    signer = Signer()
    host = types.host_platform()
    platform = (host.os, host.architecture, host.variant or "")
    index = registry.push_index("team/app:multi", {platform: make(layers=1)})
    demand(tmp_path, service, signed(signer))
    digest = index if of_index else pushed
    attach(registry, digest, signer.layer(registry, digest))
    await service.pull(f"{NAME}:multi")


async def test_signatures_are_fetched_with_the_login_of_the_pull(
    tmp_path: Path, service: ImageService
) -> None:
    signer = Signer()
    with Registry(tmp_path / "closed", auth=("bearer", "u", "p")) as closed:
        hosts_toml(tmp_path, "registry.example", f'server = "{closed.url}"\n')
        digest = closed.push("team/app:v1", make(layers=1))
        attach(closed, digest, signer.layer(closed, digest))
        demand(tmp_path, service, signed(signer))
        await service.pull(f"{NAME}:v1", Auth("u", "p"))


async def test_an_unreadable_policy_rejects_all_images(
    tmp_path: Path, service: ImageService, pushed: str
) -> None:
    service.policy = str(tmp_path / "absent.json")
    with pytest.raises(WrongState, match=r"absent\.json"):
        await service.pull(f"{NAME}:v1")
    demand(tmp_path, service, {"type": "sigstoreSigned", "keyPath": "/absent/key.pub"})
    with pytest.raises(Error, match="the image has no signature"):
        await service.pull(f"{NAME}:v1")
    assert await service.list() == []


async def test_a_changed_policy_applies_to_stored_images(
    tmp_path: Path, registry: Registry, service: ImageService, pushed: str
) -> None:
    """When a policy begins to demand signatures, further pulls of a stored unsigned image are
    refused: by its tag, by its digest and under another tag."""
    demand(tmp_path, service, {"type": "insecureAcceptAnything"})
    await service.pull(f"{NAME}:v1")
    demand(tmp_path, service, signed(Signer()))
    registry.push("team/app:v2", make(layers=1))
    for name in (f"{NAME}:v1", f"{NAME}@{pushed}", f"{NAME}:v2"):
        with pytest.raises(PeerError, match="SignatureValidationFailed"):
            await service.pull(name)
    [listed] = await service.list()
    assert listed.repo_tags == [f"{NAME}:v1"]
