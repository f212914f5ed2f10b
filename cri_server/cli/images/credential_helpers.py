"""Runs executables that provide registry logins: kubelet's credential providers, and docker's
credential helpers.

A provider is the executable FOLDER/bin/NAME. A file in FOLDER configures the provider, in kubelet's
format (CredentialProviderConfig, kubelet.config.k8s.io/v1). The provider reads a
CredentialProviderRequest from stdin and writes a CredentialProviderResponse to stdout
(credentialprovider.kubelet.k8s.io/v1).

A helper is the command `docker-credential-NAME get`. It reads the registry's name from stdin and
writes {Username, Secret} to stdout.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cri_server.api import api_pb2 as api
from cri_server.images.formats.reference import Reference, normal_registry, split_port
from pyrunc.errors import NotFound, PeerError, WrongState

FOLDER = Path("/etc/pyrunc/credential-providers.d")
FOLDER_VARIABLE = "PYRUNC_CREDENTIAL_PROVIDERS"
PROTOCOL = "credentialprovider.kubelet.k8s.io/v1"
TIMEOUT_S = 60.0  # kubelet's
NO_LOGIN = b"credentials not found in native keychain"  # the words of docker's protocol
TOKEN_USER = "<token>"  # docker's user name for a secret that is an identity token


class _Variable(msgspec.Struct):
    name: str
    value: str


class _Provider(msgspec.Struct):
    name: str
    match_images: list[str] = msgspec.field(name="matchImages")
    api_version: str = msgspec.field(name="apiVersion")
    args: list[str] | None = None
    env: list[_Variable] | None = None


class _ProviderConfig(msgspec.Struct):
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
class LoginSource:
    """A credential provider whose patterns match an image, and the file that configures it."""

    file: Path
    provider: _Provider


def folder() -> Path:
    """Return the folder with the configuration of credential providers."""
    return Path(os.environ.get(FOLDER_VARIABLE) or FOLDER)


def providers(image: str) -> list[LoginSource]:
    """Return the credential providers that match an image, in the order of their files. Raises
    WrongState for an invalid file."""
    import yaml

    repository, matching = Reference.parse(image).repository, []
    for path in sorted(folder().glob("*.yaml")):
        try:
            config = msgspec.convert(yaml.safe_load(path.read_text()), _ProviderConfig)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise WrongState(f"{path}: {' '.join(str(error).split())}") from None
        for provider in config.providers:
            # A path would name a program outside of the folder that the administrator has filled.
            if "/" in provider.name:
                raise WrongState(f'{path}: the name of provider {provider.name} contains "/"')
            if provider.api_version != PROTOCOL:
                raise WrongState(
                    f"{path}: provider {provider.name}: apiVersion is {provider.api_version!r},"
                    f" not {PROTOCOL!r}"
                )
            if any(matches(pattern, repository) for pattern in provider.match_images):
                matching.append(LoginSource(path, provider))
    return matching


def matches(pattern: str, repository: str) -> bool:
    """Return whether the pattern HOST[:PORT][/PATH] matches a normalized repository name.

    The hosts must have equally many DNS labels, and `*` in the pattern does not match a dot. If the
    pattern has a port, the repository must have the same. The repository's path must begin with
    PATH."""
    pattern_registry, _, pattern_path = (
        pattern.removeprefix("https://").removeprefix("http://").partition("/")
    )
    registry, _, path = repository.partition("/")
    host, port = split_port(registry)
    pattern_host, pattern_port = split_port(normal_registry(pattern_registry))
    labels, pattern_labels = host.split("."), pattern_host.split(".")
    return (
        len(labels) == len(pattern_labels)
        # kubelet compares label by label, too (URLsMatch): `*.example` must not match
        # `a.evil.example`.
        and all(map(fnmatch.fnmatchcase, labels, pattern_labels))
        and (not split_port(pattern_registry)[1] or pattern_port == port)
        and path.startswith(pattern_path)
    )


def from_provider(image: str) -> api.AuthConfig | None:
    """Return the login of the first credential provider that has one for the image; None if no
    provider has one. If a response has several logins, the one with the longest matching key is
    used. Raises PeerError, WrongState."""
    reference = Reference.parse(image)
    for match in providers(image):
        provider = match.provider
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


def is_installed(helper: str) -> bool:
    """Return whether the helper's executable is in $PATH."""
    return shutil.which(f"docker-credential-{helper}") is not None


def from_helper(helper: str, key: str, server: str) -> api.AuthConfig | None:
    """Run `docker-credential-HELPER get` and return the login for the registry `server`; None if
    the helper has none. `key`: the registry as docker's config.json spells it. Raises PeerError."""
    if "/" in helper:
        raise PeerError(f"credential helper {helper!r} is not the name of an executable")
    try:
        secret = _run([f"docker-credential-{helper}", "get"], key, {}, _Secret)
    except NotFound:
        return None
    if secret.username == TOKEN_USER:
        return api.AuthConfig(identity_token=secret.secret, server_address=server)
    return api.AuthConfig(username=secret.username, password=secret.secret, server_address=server)


def _run(command: list[str], text: str, variables: Mapping[str, str], kind: Any) -> Any:
    """Run a provider or helper with `text` on stdin, and decode the JSON on its stdout as `kind`.
    Raises NotFound if a helper has no login, PeerError for any other failure. The message of the
    PeerError does not quote stdout, which may contain a secret."""
    try:
        result = subprocess.run(
            command,
            input=text.encode(),
            capture_output=True,
            timeout=TIMEOUT_S,
            env={**os.environ, **variables},
        )
    except OSError as error:
        raise PeerError(
            f"cannot execute credential helper {command[0]}: {error.strerror}"
        ) from None
    except subprocess.TimeoutExpired:
        raise PeerError(
            f"credential helper {command[0]} did not answer within {TIMEOUT_S:g} s"
        ) from None
    if result.returncode and result.stdout.strip() == NO_LOGIN:
        raise NotFound(f"credential helper {command[0]} has no login")
    if result.returncode:
        reason = " ".join(result.stderr.decode(errors="replace").split())[:300]
        raise PeerError(
            f"credential helper {command[0]} failed with exit code {result.returncode}:"
            f" {reason or 'no message'}"
        )
    try:
        return msgspec.json.decode(result.stdout, type=kind)
    except msgspec.MsgspecError:
        raise PeerError(f"credential helper {command[0]} returned malformed JSON") from None
