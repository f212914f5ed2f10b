"""Fetches an image's cosign signatures from its repository, and checks them against a policy with
public keys.

The signatures of a manifest are in the same repository, as the layers of the image
`sha256-DIGEST.sig`. Each layer is a small JSON text ("simple signing"); an annotation of the layer
has the signature of this text. Source: cosign's SIGNATURE_SPEC.md. Blocking: runs in a pull's
threads.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec

from cri_server import typed
from cri_server.images.formats.digests import is_digest
from cri_server.images.formats.reference import Reference
from cri_server.images.registry.registry import Registry
from cri_server.images.signatures import policy
from cri_server.images.signatures.policy import Requirement, SignaturePolicy
from pyrunc.errors import NotFound, PeerError, WrongState

PAYLOAD = "application/vnd.dev.cosign.simplesigning.v1+json"
SIGNATURE = "dev.cosignproject.cosign/signature"
TYPE = "cosign container image signature"
SIGNATURES_LIMIT = 128
PAYLOAD_LIMIT_BYTES = 64 << 10


class SignatureValidationFailed(PeerError):
    """The policy refuses the image. The message begins with the text of CRI's
    ErrSignatureValidationFailed, by which kubelet recognizes the error."""

    def __init__(self, message: str) -> None:
        super().__init__(f"SignatureValidationFailed: {message}")


class _Layer(msgspec.Struct):
    digest: str
    size: int
    media_type: str = msgspec.field(default="", name="mediaType")
    annotations: dict[str, str] | None = None


class _Manifest(msgspec.Struct):
    layers: list[_Layer]


class _Identity(msgspec.Struct):
    reference: str = msgspec.field(name="docker-reference")


class _Image(msgspec.Struct):
    digest: str = msgspec.field(name="docker-manifest-digest")


class _Critical(msgspec.Struct):
    identity: _Identity
    image: _Image
    type: str


class _Payload(msgspec.Struct):
    critical: _Critical


def check(
    rules: SignaturePolicy, registry: Registry, reference: Reference, digests: Sequence[str]
) -> None:
    """Check an image's signatures against the policy. `digests`: the digests of the image's
    manifest and of the indexes that lead to it. A valid signature for one of them is enough.

    Raises SignatureValidationFailed, PeerError (the registry does not answer), WrongState (a key
    cannot be read).
    """
    scope, requirements = rules.requirements(reference)
    where = f"{rules.path}, {scope}"
    signed = [requirement for requirement in requirements if requirement.type == policy.SIGNED]
    if not signed:
        return
    signatures = [entry for digest in digests for entry in _signatures(registry, digest)]
    for requirement in signed:
        _require(requirement, signatures, reference, where)


def check_scope(rules: SignaturePolicy, reference: Reference) -> None:
    """Raise SignatureValidationFailed if the policy rejects all images of the reference's scope."""
    scope, requirements = rules.requirements(reference)
    if any(requirement.type == policy.REJECT for requirement in requirements):
        raise SignatureValidationFailed(
            f"the image is rejected by the signature policy {rules.path}, scope {scope}"
        )


def _require(
    requirement: Requirement,
    signatures: list[tuple[str, bytes, bytes]],
    reference: Reference,
    where: str,
) -> None:
    """Check that one of the `signatures` (digest, signed JSON text, signature) is about this image
    and was made with one of the keys in the policy's `requirement`. Raises
    SignatureValidationFailed, with the reason for each signature. `where`: the policy's path and
    scope, for the error."""
    if not signatures:
        raise SignatureValidationFailed(f"{where}: the image has no signature")
    keys = _keys(requirement, where)
    reasons = []
    for digest, payload, signature in signatures:
        if not any(_verifies(key, payload, signature) for key in keys):
            reasons.append("a signature does not verify with any key of the policy")
        elif reason := _mismatch(payload, digest, requirement, reference):
            reasons.append(reason)
        else:
            return
    raise SignatureValidationFailed(f"{where}: {'; '.join(dict.fromkeys(reasons))}")


def _signatures(registry: Registry, digest: str) -> list[tuple[str, bytes, bytes]]:
    """Fetch the signatures of the manifest `digest`; return (digest, payload, signature) for each,
    or an empty list. The payload is the signed JSON text."""
    try:
        data = registry.document(f"{digest.replace(':', '-')}.sig")
    except NotFound:
        return []
    try:
        layers = typed.decode(data, _Manifest).layers
    except msgspec.MsgspecError as error:
        raise SignatureValidationFailed(
            f"the signatures of {digest} are not a manifest: {error}"
        ) from None
    signatures = []
    # Everyone who may push to the repository can add signatures, and each costs a request.
    for layer in layers[:SIGNATURES_LIMIT]:
        text = (layer.annotations or {}).get(SIGNATURE, "")
        if (
            layer.media_type != PAYLOAD
            or not is_digest(layer.digest)
            or layer.size > PAYLOAD_LIMIT_BYTES
        ):
            continue
        try:
            signature = base64.b64decode(text, validate=True)
        except ValueError:
            continue
        signatures.append(
            (digest, registry.small_blob(layer.digest, PAYLOAD_LIMIT_BYTES), signature)
        )
    return signatures


def _mismatch(payload: bytes, digest: str, requirement: Requirement, reference: Reference) -> str:
    """Return why a signed payload is not about this image, as text for an error; "" if it is about
    this image."""
    try:
        critical = typed.decode(payload, _Payload).critical
    except msgspec.MsgspecError:
        return "the signed payload is not a claim about an image"
    if critical.type != TYPE:
        return f"the signed payload has the type {critical.type[:80]!r}"
    # Otherwise the signature of one image could be attached to any other image.
    if critical.image.digest != digest:
        return "a signature is for another manifest"
    if not policy.identity_matches(
        requirement.signed_identity, reference, critical.identity.reference
    ):
        claimed = critical.identity.reference[:200]
        return (
            f"a signature is for {claimed!r},"
            f" which {requirement.signed_identity.type} does not accept"
        )
    return ""


def _keys(requirement: Requirement, where: str) -> list[object]:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        return [load_pem_public_key(key) for key in requirement.public_keys()]
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise WrongState(f"{where}: a public key cannot be read: {error}") from None


def _verifies(key: object, payload: bytes, signature: bytes) -> bool:
    """Return whether `signature` was made over `payload` with the private key that belongs to
    `key`. The hash algorithm is SHA-256, as in cosign."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, payload, ec.ECDSA(SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, payload, padding.PKCS1v15(), SHA256())
        elif isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, payload)
        else:
            return False
    except InvalidSignature:
        return False
    return True


def check_policy(path: str) -> None:
    """Check that a policy can be used here: the file and its keys can be read, and the library that
    verifies signatures is installed. Raises WrongState."""
    rules = policy.read(path)
    scopes = rules.file.transports.get(policy.TRANSPORT, {})
    for name, requirements in [("default", rules.file.default), *scopes.items()]:
        for requirement in requirements:
            if requirement.type == policy.SIGNED:
                try:
                    _keys(requirement, f"{path}, {name}")
                except ImportError:
                    raise WrongState(
                        f"signature policy {path}: {policy.SIGNED} needs"
                        " the Python package cryptography"
                    ) from None
