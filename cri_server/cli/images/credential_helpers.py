"""Programs that know logins at registries: kubelet's credential providers, and the helpers that
docker's config.json names.

A provider is configured by a file of kubelet's form (CredentialProviderConfig,
kubelet.config.k8s.io/v1) in a folder; its program is in `bin` there. It reads a
CredentialProviderRequest and writes a CredentialProviderResponse
(credentialprovider.kubelet.k8s.io/v1). A docker helper is `docker-credential-NAME get` on the PATH,
which reads the registry and writes {Username, Secret}.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cri_server.api import api_pb2 as api
from cri_server.images.formats.reference import Reference, normal_registry, split_port
from pyrunc.errors import PeerError, WrongState

FOLDER = Path("/etc/pyrunc/credential-providers.d")
FOLDER_VARIABLE = "PYRUNC_CREDENTIAL_PROVIDERS"
PROTOCOL = "credentialprovider.kubelet.k8s.io/v1"
TIMEOUT_S = 60.0  # kubelet's
TOKEN_USER = "<token>"  # with which a docker helper says that the secret is an identity token


class _Variable(msgspec.Struct):
    name: str
    value: str


class _Provider(msgspec.Struct):
    name: str
    match_images: list[str] = msgspec.field(name="matchImages")
    api_version: str = msgspec.field(name="apiVersion")
    args: list[str] | None = None
    env: list[_Variable] | None = None


class _Config(msgspec.Struct):
    providers: list[_Provider]


class _Login(msgspec.Struct):
    username: str = ""
    password: str = ""


class _Response(msgspec.Struct):
    auth: dict[str, _Login] | None = None


class _Secret(msgspec.Struct):
    username: str = msgspec.field(name="Username")
    secret: str = msgspec.field(name="Secret")


@dataclass(frozen=True, slots=True)
class Found:
    """A provider that is for an image, and the file that says so."""

    file: Path
    provider: _Provider


def folder() -> Path:
    """Where providers are configured."""
    return Path(os.environ.get(FOLDER_VARIABLE) or FOLDER)


def providers(image: str) -> list[Found]:
    """Those for an image, in the order of the files. Raises WrongState for a file that is wrong."""
    import yaml

    repository, found = Reference.parse(image).repository, []
    for path in sorted(folder().glob("*.yaml")):
        try:
            config = msgspec.convert(yaml.safe_load(path.read_text()), _Config)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise WrongState(f"{path}: {' '.join(str(error).split())}") from None
        for provider in config.providers:
            if "/" in provider.name or provider.api_version != PROTOCOL:
                raise WrongState(
                    f"{path}: {provider.name}: not a program's name with apiVersion {PROTOCOL}"
                )
            if any(matches(pattern, repository) for pattern in provider.match_images):
                found.append(Found(path, provider))
    return found


def matches(pattern: str, repository: str) -> bool:
    """Whether `pattern` (HOST[:PORT][/PATH], `*` within a part of the host's name) is for a
    repository in its normal form.

    It is when the host has as many parts, the port is the same if the pattern has one, and the path
    begins so.
    """
    wanted, _, wanted_path = pattern.removeprefix("https://").removeprefix("http://").partition("/")
    registry, _, path = repository.partition("/")
    host, port = split_port(registry)
    wanted_host, wanted_port = split_port(normal_registry(wanted))
    parts, wanted_parts = host.split("."), wanted_host.split(".")
    return (
        len(parts) == len(wanted_parts)
        and all(map(fnmatch.fnmatchcase, parts, wanted_parts))
        and (not split_port(wanted)[1] or wanted_port == port)
        and path.startswith(wanted_path)
    )


def from_provider(image: str) -> api.AuthConfig | None:
    """The login that the first provider has for an image; of several in one answer the most
    specific. Raises PeerError, WrongState."""
    reference = Reference.parse(image)
    for found in providers(image):
        provider = found.provider
        program = str(folder() / "bin" / provider.name)
        request = {
            "apiVersion": PROTOCOL,
            "kind": "CredentialProviderRequest",
            "image": str(reference),
        }
        variables = {each.name: each.value for each in provider.env or []}
        answer = _run([program, *(provider.args or [])], json.dumps(request), variables, _Response)
        logins = answer.auth or {}
        for key in sorted(logins, key=len, reverse=True):
            if matches(key, reference.repository):
                login = logins[key]
                return api.AuthConfig(
                    username=login.username,
                    password=login.password,
                    server_address=reference.registry,
                )
    return None


def from_helper(helper: str, key: str, server: str) -> api.AuthConfig:
    """The login that docker's helper keeps for `key`, for `server`. Raises PeerError."""
    if "/" in helper:
        raise PeerError(f"credential helper {helper!r} is not a name")
    found = _run([f"docker-credential-{helper}", "get"], key, {}, _Secret)
    if found.username == TOKEN_USER:
        return api.AuthConfig(identity_token=found.secret, server_address=server)
    return api.AuthConfig(username=found.username, password=found.secret, server_address=server)


def _run(command: list[str], text: str, variables: Mapping[str, str], kind: Any) -> Any:
    """What a program answers. Of its answer nothing is shown: it has a secret."""
    try:
        done = subprocess.run(
            command,
            input=text.encode(),
            capture_output=True,
            timeout=TIMEOUT_S,
            env={**os.environ, **variables},
        )
    except OSError as error:
        raise PeerError(f"credential helper {command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise PeerError(
            f"credential helper {command[0]} does not answer after {TIMEOUT_S:g} s"
        ) from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())[:300]
        raise PeerError(
            f"credential helper {command[0]} ended with {done.returncode}: {said or 'no reason'}"
        )
    try:
        return msgspec.json.decode(done.stdout, type=kind)
    except msgspec.MsgspecError:
        raise PeerError(f"credential helper {command[0]}: its answer cannot be read") from None
