"""Reads the policy that says which images may be pulled, a containers-policy.json(5). Refuses a
policy with requirements that need GPG.

If scopes of the transport `docker` cover an image, the most specific of them decides, else the
policy's default. The scopes are, from the most to the least specific: the image with its tag or
digest, its repository, a namespace, the registry, a domain with its subdomains (`*.example.com`),
the whole transport.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cri_server import typed
from cri_server.images.formats.reference import Reference, normal_registry
from pyrunc.errors import Error, WrongState

TRANSPORT = "docker"
SIZE_LIMIT_BYTES = 1 << 20
ACCEPT, REJECT, SIGNED = "insecureAcceptAnything", "reject", "sigstoreSigned"
IDENTITIES = {
    "matchExact": set[str](),
    "matchRepoDigestOrExact": set[str](),
    "matchRepository": set[str](),
    "exactReference": {"dockerReference"},
    "exactRepository": {"dockerRepository"},
    "remapIdentity": {"prefix", "signedPrefix"},
}


class Identity(msgspec.Struct, forbid_unknown_fields=True, frozen=True, rename="camel"):
    """Which image a signature must name; the fields in use depend on `type`."""

    type: str = "matchRepoDigestOrExact"
    docker_reference: str = ""
    docker_repository: str = ""
    prefix: str = ""
    signed_prefix: str = ""


class Requirement(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A requirement that the policy has for a scope. An image must meet all requirements of its
    scope. For the type `sigstoreSigned` the image needs a signature by any one of the keys."""

    type: str
    key_path: str = ""
    key_paths: list[str] = []
    key_data: str = ""
    key_datas: list[str] = []
    signed_identity: Identity = Identity()

    def public_keys(self) -> list[bytes]:
        """Return the public keys in PEM. Raises OSError, ValueError."""
        paths = [path for path in (self.key_path, *self.key_paths) if path]
        texts = [text for text in (self.key_data, *self.key_datas) if text]
        try:
            decoded = [base64.b64decode(text, validate=True) for text in texts]
        except ValueError:
            raise ValueError("keyData is not base64") from None
        return [Path(path).read_bytes() for path in paths] + decoded


class _File(msgspec.Struct, forbid_unknown_fields=True):
    default: list[Requirement]
    transports: dict[str, dict[str, list[Requirement]]] = {}


@dataclass(frozen=True, slots=True)
class SignaturePolicy:
    """A parsed policy file."""

    path: str
    file: _File

    def requirements(self, reference: Reference) -> tuple[str, list[Requirement]]:
        """Return the scope that decides about an image, as text for errors, and the requirements
        that the policy has for it."""
        scopes = self.file.transports.get(TRANSPORT, {})
        for scope in scopes_of(reference):
            if scope in scopes:
                return scope or f"all of {TRANSPORT}", scopes[scope]
        return "default", self.file.default


def read(path: str) -> SignaturePolicy:
    """Read the policy file. Raises WrongState for a file with any error, because a guess at its
    meaning could accept an image that the administrator wants to refuse."""
    try:
        with open(path, "rb") as file:
            content = file.read(SIZE_LIMIT_BYTES + 1)
        if len(content) > SIZE_LIMIT_BYTES:
            raise ValueError(f"larger than {SIZE_LIMIT_BYTES} bytes")
        rules_file = typed.convert(json.loads(content, object_pairs_hook=typed.unique_keys), _File)
        _check("default", rules_file.default)
        # Otherwise registry.example:443/team would evade the rejection of registry.example/team.
        rules_file.transports[TRANSPORT] = _normal_scopes(rules_file.transports.get(TRANSPORT, {}))
        # Other transports are used by other programs only.
        for scope, requirements in rules_file.transports[TRANSPORT].items():
            _check(f"transports.{TRANSPORT}.{scope or '(all)'}", requirements)
    except (OSError, ValueError, RecursionError) as error:
        raise WrongState(f"signature policy {path}: {error}") from None
    return SignaturePolicy(path, rules_file)


def _normal_scopes(scopes: dict[str, list[Requirement]]) -> dict[str, list[Requirement]]:
    """Return the requirements of each scope by its `normal_scope`. Raises ValueError when two
    scopes have the same normal form."""
    normal: dict[str, list[Requirement]] = {}
    written: dict[str, str] = {}
    for scope, requirements in scopes.items():
        name = normal_scope(scope)
        if name in normal:
            raise ValueError(f"{written[name]!r} and {scope!r} are the same scope")
        normal[name], written[name] = requirements, scope
    return normal


def normal_scope(scope: str) -> str:
    """Return a scope with its registry in the normal form, and for Docker Hub with `library/`
    before an image's short name: `docker.io/busybox:1` becomes `docker.io/library/busybox:1`.

    Without a tag or digest, `library/` is not added, because the name may be a namespace. Raises
    ValueError for a malformed name.
    """
    registry, slash, path = scope.partition("/")
    if registry.startswith("*."):
        return f"*.{normal_registry(registry[2:])}{slash}{path}"
    if slash and (":" in path or "@" in path):
        try:
            return _full(Reference.parse(scope))
        except Error as error:
            raise ValueError(error.message) from None
    return normal_registry(registry) + slash + path if registry else scope


def _check(place: str, requirements: list[Requirement]) -> None:
    # An image meets all requirements of an empty list, so it would be accepted unsigned.
    # containers/image refuses such a policy, too.
    if not requirements:
        raise ValueError(
            f"{place}: the list of requirements is empty; use {ACCEPT} to accept everything"
        )
    for requirement in requirements:
        if requirement.type not in (ACCEPT, REJECT, SIGNED):
            raise ValueError(
                f"{place}: {requirement.type!r} is not one of {ACCEPT}, {REJECT}, {SIGNED}"
            )
        keys = [
            requirement.key_path,
            requirement.key_paths,
            requirement.key_data,
            requirement.key_datas,
        ]
        key_count = sum(map(bool, keys))
        if requirement.type != SIGNED and key_count:
            raise ValueError(f"{place}: {requirement.type} has no keys")
        if requirement.type == SIGNED and key_count != 1:
            raise ValueError(
                f"{place}: {SIGNED} needs one of keyPath, keyPaths, keyData and keyDatas"
            )
        _check_identity(place, requirement.signed_identity)


def _check_identity(place: str, identity: Identity) -> None:
    if identity.type not in IDENTITIES:
        raise ValueError(f"{place}: signedIdentity is not one of {', '.join(IDENTITIES)}")
    fields = {
        key for key, value in msgspec.to_builtins(identity).items() if key != "type" and value
    }
    if fields != IDENTITIES[identity.type]:
        expected = ", ".join(sorted(IDENTITIES[identity.type])) or "nothing else"
        raise ValueError(f"{place}: signedIdentity {identity.type} takes {expected}")


def scopes_of(reference: Reference) -> Iterator[str]:
    """Yield the policy scopes that cover an image, from the most specific one to the whole
    transport ("")."""
    yield _full(reference)
    name = reference.repository
    while True:
        yield name
        if "/" not in name:
            break
        name = name.rpartition("/")[0]
    while "." in name:
        name = name.partition(".")[2]
        yield f"*.{name}"
    yield ""


def _full(reference: Reference) -> str:
    if reference.digest:
        return f"{reference.repository}@{reference.digest}"
    return f"{reference.repository}:{reference.tag}"


def identity_matches(identity: Identity, reference: Reference, claimed: str) -> bool:
    """Return whether the policy's `identity` accepts a signature for the pulled image `reference`.
    `claimed`: the reference that the signature names."""
    signed = _SignedReference.parse(claimed)
    if signed is None:
        return False
    match identity.type:
        case "matchRepository":
            return signed.name == reference.repository
        case "exactReference":
            return signed == _SignedReference.parse(identity.docker_reference)
        case "exactRepository":
            expected = _SignedReference.parse(identity.docker_repository)
            return expected is not None and signed.name == expected.name
        case "matchExact":
            return signed == _SignedReference.parse(_full(reference))
        case "remapIdentity":
            return _matches_image(signed, _remapped(identity, reference.repository), reference)
        case _:
            return _matches_image(signed, reference.repository, reference)


def _matches_image(signed: _SignedReference, name: str, reference: Reference) -> bool:
    """Return whether the signed reference means the pulled image: it has the repository `name` and
    the pulled tag. The tag is not compared when the image was pulled by digest, because the digest
    fixes the content."""
    return signed.name == name and (bool(reference.digest) or signed.rest == f":{reference.tag}")


def _remapped(identity: Identity, name: str) -> str:
    prefix, signed_prefix = map(normal_scope, (identity.prefix, identity.signed_prefix))
    if name == prefix or name.startswith(f"{prefix}/"):
        return signed_prefix + name[len(prefix) :]
    return name


@dataclass(frozen=True, slots=True)
class _SignedReference:
    """A reference in a signature or policy. `rest` is `:TAG`, `@DIGEST`, or "" for a reference with
    neither; the default tag `latest` is not added."""

    name: str
    rest: str

    @classmethod
    def parse(cls, text: str) -> _SignedReference | None:
        """Parse a reference; None for a malformed one."""
        try:
            parsed = Reference.parse(text)
        except Error:
            return None
        if parsed.digest:
            return cls(parsed.repository, f"@{parsed.digest}")
        return cls(parsed.repository, f":{parsed.tag}" if ":" in text.rpartition("/")[2] else "")
