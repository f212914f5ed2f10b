"""Registry logins in the files of podman and docker: `auth.json`, an object per registry with
base64 of USER:PASSWORD.

Read are $REGISTRY_AUTH_FILE, or else podman's and docker's files, of which the first one that has
the registry counts; after them the credential providers. New logins are written to the first file,
readable by the owner only. Sources: containers-auth.json(5), docker's config.json.
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
from pyrunc import atomic_file
from pyrunc.errors import InvalidSpec, NotFound

DOCKERS_NAME = "https://index.docker.io/v1/"  # docker's key for Docker Hub


@dataclass(frozen=True, slots=True)
class _Helper:
    """A login that a helper program has."""

    name: str


def files(chosen: Path | None = None) -> list[Path]:
    """Return the files that may contain logins, in order."""
    if chosen is not None:
        return [chosen]
    if path := os.environ.get("REGISTRY_AUTH_FILE"):
        return [Path(path)]
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
    """Return the login for an image: that of its repository or of a prefix of it, as in
    containers-auth.json(5), or of its registry. Raises InvalidSpec."""
    entry = _entry(reference, chosen)
    if entry is None:
        return credential_helpers.from_provider(reference)
    path, key, login, server = entry
    if isinstance(login, _Helper):
        return credential_helpers.from_helper(login.name, key, server)
    return _config(login, server, path)


def source(reference: str, chosen: Path | None = None) -> str:
    """Return the origin of the login that `find` returns, as `FILE: KEY`; empty for none. Raises
    InvalidSpec."""
    entry = _entry(reference, chosen)
    if entry is None:
        programs = credential_helpers.providers(reference)
        return f"{programs[0].file}: provider {programs[0].provider.name}" if programs else ""
    path, key, login, _ = entry
    return f"{path}: helper {login.name}" if isinstance(login, _Helper) else f"{path}: {key}"


def _entry(reference: str, chosen: Path | None) -> tuple[Path, str, Any, str] | None:
    """Return file, key and content of a login, and the registry that it is for.

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
                key_in_file = helper_keys[key]
                return path, key_in_file, _Helper(helpers[key_in_file]), image.registry
            if key in login_keys:
                key_in_file = login_keys[key]
                return path, key_in_file, document["auths"][key_in_file], image.registry
    return None


def _by_normal_key(table: dict[str, Any]) -> dict[str, str]:
    """Map the normal form of each key to the key. A key in normal form takes precedence, then the
    first one of the file."""
    keys = sorted(table, key=lambda key: key != _normal_key(key))
    return {_normal_key(key): key for key in reversed(keys)}


def _normal_key(key: str) -> str:
    """Normalize a key of `auths`: a registry, a repository or a prefix of one. docker uses the URL
    of its API for Docker Hub."""
    host, slash, path = key.removeprefix("https://").removeprefix("http://").partition("/")
    registry = normal_registry(host)
    path = path.rstrip("/")
    return registry if not slash or path in ("", "v1", "v2") else f"{registry}/{path}"


def parse_option(text: str, server: str = "") -> api.AuthConfig:
    """Parse --creds: USER[:PASSWORD]."""
    user, _, password = text.partition(":")
    return api.AuthConfig(username=user, password=password, server_address=server)


def save(registry: str, username: str, password: str, chosen: Path | None) -> Path:
    """Store a login and return the file. Raises InvalidSpec, OSError."""
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
    """Remove one login or all, and return their registries. Raises NotFound, InvalidSpec,
    OSError."""
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
        raise InvalidSpec(str(path), "expected an object with the key auths")
    return document


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The file has its mode from its creation on: others could read the password before a chmod(2).
    atomic_file.write_bytes(str(path), json.dumps(document, indent=2).encode(), mode=0o600)


def _config(login: Any, server: str, path: Path) -> api.AuthConfig:
    if not isinstance(login, dict):
        raise InvalidSpec(str(path), f"the login for {server} is no object")
    if login.get("identitytoken"):
        return api.AuthConfig(identity_token=str(login["identitytoken"]), server_address=server)
    try:
        # A password may contain colons, a user name may not (RFC 7617, section 2).
        user, colon, password = (
            base64.b64decode(str(login.get("auth", "")), validate=True).decode().partition(":")
        )
    except (binascii.Error, UnicodeDecodeError):
        colon = ""
    if not colon:
        raise InvalidSpec(str(path), f"the login for {server} is not base64 of USER:PASSWORD")
    return api.AuthConfig(username=user, password=password, server_address=server)
