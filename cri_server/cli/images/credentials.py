"""Logins at registries, where podman and docker keep them: `auth.json`, an object per registry with
base64 of USER:PASSWORD.

Where none of them knows the registry, credential providers are asked. Read: $REGISTRY_AUTH_FILE,
else podman's files and docker's, the first that knows the registry. Written: the first of these,
closed to others. Sources: containers-auth.json(5), docker's config.json.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.cli.images import credential_helpers
from cri_server.images.formats.reference import DOCKER, Reference, normal_registry
from pyrunc.errors import InvalidSpec, NotFound

DOCKERS_NAME = "https://index.docker.io/v1/"


@dataclass(frozen=True, slots=True)
class _Helper:
    """Stands for a login that a program has."""

    name: str


def files(chosen: Path | None = None) -> list[Path]:
    """Where logins may be, in order."""
    if chosen is not None:
        return [chosen]
    if found := os.environ.get("REGISTRY_AUTH_FILE"):
        return [Path(found)]
    home = Path.home()
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    docker = Path(os.environ.get("DOCKER_CONFIG") or home / ".docker")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [
        *([Path(runtime) / "containers/auth.json"] if runtime else []),
        configuration / "containers/auth.json",
        docker / "config.json",
    ]


def find(reference: str, chosen: Path | None = None) -> api.AuthConfig | None:
    """The login for an image: of its repository or what that lies in, as containers-auth.json(5)
    says, else of its registry. Raises InvalidSpec."""
    found = _entry(reference, chosen)
    if found is None:
        return credential_helpers.from_provider(reference)
    path, key, login, server = found
    if isinstance(login, _Helper):
        return credential_helpers.from_helper(login.name, key, server)
    return _config(login, server, path)


def source(reference: str, chosen: Path | None = None) -> str:
    """Where `find` takes the login from, `FILE: KEY`; empty for none. Raises InvalidSpec."""
    found = _entry(reference, chosen)
    if found is None:
        programs = credential_helpers.providers(reference)
        return f"{programs[0].file}: provider {programs[0].provider.name}" if programs else ""
    path, key, login, _ = found
    return f"{path}: helper {login.name}" if isinstance(login, _Helper) else f"{path}: {key}"


def _entry(reference: str, chosen: Path | None) -> tuple[Path, str, Any, str] | None:
    """The file, the key and the login itself as they are written, and the registry that it is for.

    A key may have any spelling of the registry's name (`https://R.example/v1/`, `r.example:443`).
    """
    image = Reference.parse(reference)
    keys = [image.repository]
    while "/" in keys[-1]:
        keys.append(keys[-1].rpartition("/")[0])
    for path in files(chosen):
        document = _read(path)
        helpers = document.get("credHelpers") or {}
        helper_keys = _by_normal_key(helpers if isinstance(helpers, dict) else {})
        login_keys = _by_normal_key(document.get("auths") or {})
        for key in keys:
            if key in helper_keys and isinstance(helpers[helper_keys[key]], str):
                written = helper_keys[key]
                return path, written, _Helper(helpers[written]), image.registry
            if key in login_keys:
                written = login_keys[key]
                return path, written, document["auths"][written], image.registry
    return None


def _by_normal_key(table: dict[str, Any]) -> dict[str, str]:
    """normal form of a key -> the key. The one that is written in its normal form comes first, then
    the first in the file."""
    keys = sorted(table, key=lambda key: key != _normal_key(key))
    return {_normal_key(key): key for key in reversed(keys)}


def _normal_key(key: str) -> str:
    """A key of `auths`: a registry, a repository or what that lies in. docker writes a URL of its
    API for Docker Hub."""
    host, slash, path = key.removeprefix("https://").removeprefix("http://").partition("/")
    registry = normal_registry(host)
    path = path.rstrip("/")
    return registry if not slash or path in ("", "v1", "v2") else f"{registry}/{path}"


def given(text: str, server: str = "") -> api.AuthConfig:
    """USER[:PASSWORD] of --creds."""
    user, _, password = text.partition(":")
    return api.AuthConfig(username=user, password=password, server_address=server)


def save(registry: str, username: str, password: str, chosen: Path | None) -> Path:
    """Keep a login; the file. Raises InvalidSpec, OSError."""
    path = _to_write(chosen)
    document = _read(path)
    token = base64.b64encode(f"{username}:{password}".encode()).decode()
    auths = document.setdefault("auths", {})
    for key in [key for key in auths if _normal_key(key) == _normal_key(registry)]:
        del auths[key]
    auths[_key(registry)] = {"auth": token}
    _write(path, document)
    return path


def forget(registry: str | None, chosen: Path | None) -> list[str]:
    """Remove a login, or all of them; the registries. Raises NotFound, InvalidSpec, OSError."""
    gone = []
    for path in files(chosen):
        document = _read(path)
        auths = document.get("auths") or {}
        same = [
            key for key in auths if registry is None or _normal_key(key) == _normal_key(registry)
        ]
        for key in same:
            del auths[key]
            gone.append(key)
        if gone:
            _write(path, document)
    if not gone:
        raise NotFound(f"not logged in at {registry or 'any registry'}")
    return gone


def _key(registry: str) -> str:
    return DOCKERS_NAME if _normal_key(registry) == DOCKER else registry


def _to_write(chosen: Path | None) -> Path:
    possible = files(chosen)
    return next((path for path in possible if path.exists()), possible[0])


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (FileNotFoundError, PermissionError):
        return {}
    except (OSError, ValueError) as error:
        raise InvalidSpec(str(path), f"{error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("auths") or {}, dict):
        raise InvalidSpec(str(path), "not an object with auths")
    return document


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(document, file, indent=2)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _config(found: Any, server: str, path: Path) -> api.AuthConfig:
    if not isinstance(found, dict):
        raise InvalidSpec(str(path), f"the login at {server} is no object")
    if found.get("identitytoken"):
        return api.AuthConfig(identity_token=str(found["identitytoken"]), server_address=server)
    try:
        user, colon, password = (
            base64.b64decode(str(found.get("auth", "")), validate=True).decode().partition(":")
        )
    except (binascii.Error, UnicodeDecodeError):
        colon = ""
    if not colon:
        raise InvalidSpec(str(path), f"the login at {server} is not base64 of USER:PASSWORD")
    return api.AuthConfig(username=user, password=password, server_address=server)
