"""Reads and writes registry logins in the files of podman and docker: a JSON object per registry,
with base64 of USER:PASSWORD.

Logins are looked up in $REGISTRY_AUTH_FILE if it is set, else in podman's files, then docker's. The
first file with a login for the registry is used. If no file has one, credential providers are
called. New logins are written to the first of these files that exists, or to the first if none
exists, with mode 0600. Sources: containers-auth.json(5), docker's config.json.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cri_server.api import api_pb2 as api
from cri_server.cli.images import credential_helpers
from cri_server.images.formats.reference import DOCKER, Reference, normal_registry
from pyrunc import atomic_file
from pyrunc.errors import InvalidSpec, NotFound

DOCKERS_NAME = "https://index.docker.io/v1/"  # docker's key for Docker Hub


class _FileLogin(NamedTuple):
    """A login found in `file` under `key`: either its JSON `content`, or the credential helper
    `helper` that provides the login."""

    file: Path
    key: str
    registry: str
    content: Any = None
    helper: str = ""


def files(chosen: Path | None = None) -> list[Path]:
    """Return the files to search for logins, in order: `chosen` alone if it is set, else
    $REGISTRY_AUTH_FILE alone if it is set, else podman's and docker's files."""
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
    """Return the login for an image; None if there is none. A login for the repository or a prefix
    of it takes precedence over one for the registry (containers-auth.json(5)).

    Raises InvalidSpec for an invalid file of logins, PeerError if a credential provider or helper
    fails, WrongState for an invalid configuration of credential providers."""
    for login in _logins(reference, chosen):
        config = _config(login)
        if config is not None:
            return config
    return credential_helpers.from_provider(reference)


def source(reference: str, chosen: Path | None = None) -> str:
    """Return where `find` gets the login of an image from, as `FILE: KEY`, `FILE: helper NAME` or
    `FILE: provider NAME`; empty if there is no login. Runs no credential provider or helper.

    Raises InvalidSpec for an invalid file of logins, WrongState for an invalid configuration of
    credential providers."""
    login = next(_logins(reference, chosen), None)
    if login is None:
        programs = credential_helpers.providers(reference)
        return f"{programs[0].file}: provider {programs[0].provider.name}" if programs else ""
    return f"{login.file}: {f'helper {login.helper}' if login.helper else login.key}"


def _logins(reference: str, chosen: Path | None) -> Iterator[_FileLogin]:
    """Yield the logins for an image in the order in which they are tried: at most one from each
    file. If a file names a credential helper, the helper is yielded even if it has no login.

    A key in a file may spell the registry's name in any way (`https://R.example/v1/`,
    `r.example:443`)."""
    image = Reference.parse(reference)
    keys = [image.repository]
    while "/" in keys[-1]:
        keys.append(keys[-1].rpartition("/")[0])
    for path in files(chosen):
        login = _login_in(path, image.registry, keys)
        if login is not None:
            yield login


def _login_in(path: Path, registry: str, keys: Sequence[str]) -> _FileLogin | None:
    """Return the login in the file `path` for the first of `keys` that has a login. If none has
    one, return the helper that the file's `credsStore` names; None if there is no helper."""
    document = _read(path)
    helpers = _by_normal_key(document.get("credHelpers"))
    logins = _by_normal_key(document.get("auths"))
    for key in keys:
        key_in_file, helper = helpers.get(key, ("", None))
        if isinstance(helper, str):
            return _FileLogin(path, key_in_file, registry, helper=helper)
        key_in_file, content = logins.get(key, ("", None))
        # `docker login` writes an empty object for a login that is in a helper.
        if key_in_file and content != {}:
            return _FileLogin(path, key_in_file, registry, content)
    store = document.get("credsStore")
    # An installed store is tried even if `auths` has no entry: the helpers of clouds provide logins
    # without `docker login`.
    if isinstance(store, str) and (registry in logins or credential_helpers.is_installed(store)):
        key_in_file, _ = logins.get(registry, (_key(registry), None))
        return _FileLogin(path, key_in_file, registry, helper=store)
    return None


def _by_normal_key(table: Any) -> dict[str, tuple[str, Any]]:
    """Return {normal form of a key: (key as written, value)} for a JSON object. If several keys
    have the same normal form, the key that is written in this form wins, else the first key."""
    table = table if isinstance(table, dict) else {}
    keys = sorted(table, key=lambda key: key != _normal_key(key))
    return {_normal_key(key): (key, table[key]) for key in reversed(keys)}


def _normal_key(key: str) -> str:
    """Normalize a key of `auths`: a registry, a repository or a prefix of one. Removes the scheme
    and docker's /v1/ and /v2/, and spells the registry as `normal_registry` does: Docker Hub's
    `index.docker.io` becomes `docker.io`."""
    host, slash, path = key.removeprefix("https://").removeprefix("http://").partition("/")
    registry = normal_registry(host)
    path = path.rstrip("/")
    return registry if not slash or path in ("", "v1", "v2") else f"{registry}/{path}"


def parse_option(text: str, server: str = "") -> api.AuthConfig:
    """Parse the value of --creds, USER[:PASSWORD], as a login for the registry `server`."""
    user, _, password = text.partition(":")
    return api.AuthConfig(username=user, password=password, server_address=server)


def save(registry: str, username: str, password: str, chosen: Path | None) -> Path:
    """Store a login for `registry`, replacing an earlier one, and return the path of the file.
    Raises OSError, and InvalidSpec if the file's content is invalid."""
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
    """Remove the login for `registry` (None: all logins), and return the removed keys. Raises
    OSError, NotFound if there is no login, and InvalidSpec for an invalid file of logins."""
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


def _config(login: _FileLogin) -> api.AuthConfig | None:
    """Return the user and password, or the token, of a login; None if its credential helper has
    none. Raises InvalidSpec, PeerError."""
    if login.helper:
        return credential_helpers.from_helper(login.helper, login.key, login.registry)
    place, registry, content = str(login.file), login.registry, login.content
    if not isinstance(content, dict):
        raise InvalidSpec(place, f"the login for {registry} is not an object")
    if content.get("identitytoken"):
        token = str(content["identitytoken"])
        return api.AuthConfig(identity_token=token, server_address=registry)
    try:
        text = base64.b64decode(str(content.get("auth", "")), validate=True).decode()
    except ValueError:
        text = ""
    # A password may contain colons, a user name may not (RFC 7617, section 2).
    user, colon, password = text.partition(":")
    if not colon:
        raise InvalidSpec(place, f"the login for {registry} is not base64 of USER:PASSWORD")
    return api.AuthConfig(username=user, password=password, server_address=registry)
