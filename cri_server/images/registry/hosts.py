"""Finds the hosts that serve a registry's content: reads containerd's `certs.d/HOST/hosts.toml`,
which lists mirrors in order; the registry itself is the last host.

Sources: containerd's docs/hosts.md; `rewrite` is from k3s and RKE2, `auth` has the keys of
containerd's old registry.configs, `pull_secrets` exists only in pyrunc. The folder is `HOST`,
`HOST_PORT_` or `HOST:PORT`, else `_default`. A folder without hosts.toml may hold docker's `*.crt`
(CAs) and `*.cert` with `*.key` (client certificates).
"""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from cri_server import typed
from cri_server.images.formats.reference import DOCKER, is_loopback, normal_registry, split_port
from cri_server.images.model import Auth
from cri_server.images.registry.rewrite import Rewrite
from pyrunc.errors import InvalidSpec

if TYPE_CHECKING:
    from cri_server.images.registry.proxy import Proxy

log = logging.getLogger(__name__)
AnyTable = TypeVar("AnyTable", bound="_Table")
RESOLVE, PULL = "resolve", "pull"
DIAL_TIMEOUT_S = 30.0
DEFAULT_FOLDER = "_default"
SIZE_LIMIT_BYTES, LINE_LIMIT_BYTES = 64 << 10, 1024
_FOLDER_PORT = re.compile(r"_([0-9]+)_\Z")
_logged: set[str] = set()  # warnings that were logged, once each
TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # RFC 9110 section 5.6.2: a header's name


@dataclass(frozen=True, slots=True)
class RegistryHost:
    """A host that serves images. `url` is scheme://host[:port], `prefix` the path before the
    repository (`/v2`).

    - `upstream`: the host is the registry itself, not a mirror.
    - `trusted`: the host gets the registry's pull secrets, because the registry's own hosts.toml
      (not the one in `_default`) names it as the server, or as a mirror with `pull_secrets`.
    - `auth`: the administrator's login for this host.
    - `rewrites`: regular expressions for the repository, with their replacements.
    - `headers` may hold secrets, which the repr does not show.
    - `proxy`: used instead of the environment's proxy.
    """

    url: str
    prefix: str = "/v2"
    capabilities: frozenset[str] = frozenset({RESOLVE, PULL})
    upstream: bool = False
    skip_verify: bool = False
    ca: tuple[str, ...] = ()
    client: tuple[tuple[str, str | None], ...] = ()
    headers: dict[str, list[str]] = field(default_factory=dict, repr=False, hash=False)
    dial_timeout_s: float = DIAL_TIMEOUT_S
    trusted: bool = False
    auth: Auth | None = field(default=None, hash=False)
    rewrites: tuple[Rewrite, ...] = ()
    proxy: Proxy | None = None
    source: str = ""

    def repository(self, path: str) -> str:
        """Return this host's name for the repository `path`: `path` rewritten by the first of
        `rewrites` that matches it, else unchanged."""
        for rewrite in self.rewrites:
            rewritten = rewrite.apply(path)
            if rewritten is not None:
                return rewritten
        return path

    @property
    def netloc(self) -> str:
        """The host and port in `url`, as host[:port]."""
        return urlsplit(self.url).netloc

    def can(self, capability: str) -> bool:
        """Return whether the host may be used for the capability, such as pull."""
        return capability in self.capabilities


class _Auth(msgspec.Struct):
    username: str = ""
    password: str = ""
    auth: str = ""
    identitytoken: str = ""
    registrytoken: str = ""


class _Table(msgspec.Struct):
    """The keys of a `[host.URL]` table. The same keys at the top level of the file are for the
    registry itself."""

    capabilities: list[str] | None = None
    ca: str | list[str] | None = None
    client: str | list[str | list[str]] | None = None
    skip_verify: bool = False
    override_path: bool = False
    header: dict[str, str | list[str]] | None = None
    dial_timeout: str | None = None
    proxy: str = ""
    auth: _Auth | None = None
    rewrite: dict[str, str] | None = None
    pull_secrets: bool = True


class _Server(_Table):
    server: str = ""


@dataclass(frozen=True, slots=True)
class HostsFile:
    """A parsed hosts.toml. Each line of `warnings` names a key: an unknown key, which is ignored,
    or a rewrite whose replacement names a group that its pattern lacks."""

    hosts: list[RegistryHost]
    warnings: list[str]


def hosts_for(domain: str, certs_dirs: Sequence[Path]) -> list[RegistryHost]:
    """Return the hosts for images of the registry `domain`, in order. Raises InvalidSpec naming the
    file and the key."""
    domain = normal_registry(domain)
    folder = folder_of(domain, certs_dirs)
    if folder is None:
        return [_default(domain)]
    path = folder / "hosts.toml"
    if not path.exists():
        return [_with_docker_files(_default(domain), folder)]
    return _read(path, domain, own=folder.name != DEFAULT_FOLDER)


def default_url(domain: str) -> str:
    """Return the URL of a registry that has no hosts.toml: http for a loopback address whose port
    is not 443, else https, as in containerd."""
    if domain == DOCKER:
        return "https://registry-1.docker.io"
    host, port = split_port(domain)
    return f"{'http' if port != '443' and is_loopback(host.strip('[]')) else 'https'}://{domain}"


def _default(domain: str) -> RegistryHost:
    return RegistryHost(default_url(domain), upstream=True)


def folder_of(domain: str, certs_dirs: Sequence[Path]) -> Path | None:
    """Return the folder with a registry's settings: the registry's own folder in the first of
    `certs_dirs` that has one; else the first `_default`; else None.

    The folder may have any spelling of the registry's name; HOST_PORT_ comes before HOST:PORT, and
    both before other spellings.
    """
    normal = normal_registry(domain)
    for certs_dir in certs_dirs:
        if own := min(_spellings(normal, certs_dir), default=None):
            return certs_dir / own[1]
    defaults = (certs_dir / DEFAULT_FOLDER for certs_dir in certs_dirs)
    return next(filter(Path.is_dir, defaults), None)


def registry_of(folder: str) -> str:
    """Return the normal form of the registry whose settings are in the folder `folder` of
    `certs.d`."""
    return normal_registry(_FOLDER_PORT.sub(r":\1", folder))


def _spellings(normal: str, certs_dir: Path) -> Iterator[tuple[int, str]]:
    """Yield (rank, name) of each folder in `certs_dir` whose name is a spelling of the registry
    `normal`. The caller uses the folder with the lowest rank."""
    host, port = split_port(normal)
    preferred = ([f"{host}_{port}_"] if port else []) + [normal]
    try:
        names = [entry.name for entry in certs_dir.iterdir() if entry.is_dir()]
    except OSError:
        return
    for name in names:
        if name in preferred:
            yield preferred.index(name), name
        elif registry_of(name) == normal:
            yield len(preferred), name


def _read(path: Path, domain: str, *, own: bool) -> list[RegistryHost]:
    file = read_file(path, domain, own=own)
    for warning in file.warnings:
        # The file is read for each pull.
        if (text := f"{path}: {warning}") not in _logged:
            _logged.add(text)
            log.warning("%s", text)
    return file.hosts


def read_file(path: Path, domain: str, *, own: bool) -> HostsFile:
    """Parse the hosts.toml at `path` for the registry `domain`. `own`: the file is in this
    registry's own folder, not in `_default`.

    Unknown keys are ignored with a warning, because other runtimes and later versions of containerd
    have more keys. Raises InvalidSpec naming the file and the key.
    """
    try:
        content = tomllib.loads(_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidSpec(str(path), str(error)) from None
    tables = content.pop("host", {})
    if not isinstance(tables, dict):
        raise InvalidSpec(f"{path}:host", "expected tables such as [host.'https://mirror.example']")
    warnings: list[str] = []
    hosts = []
    for url, fields in tables.items():
        key = f"host.{url!r}"
        table = _table(path, key, fields, _Table, warnings)
        # Mirrors of `_default` serve every registry, so they get the secrets of none.
        hosts.append(_host(path, key, url, table, warnings, trusted=own and table.pull_secrets))
    top = _table(path, "", content, _Server, warnings)
    url = top.server or default_url(domain)
    server = _host(path, "server", url, top, warnings, upstream=True, trusted=own)
    for number, host in enumerate(hosts):  # a table may be for the server itself
        if host.url == server.url and host.prefix == server.prefix:
            rest = [*hosts[:number], *hosts[number + 1 :]]
            return HostsFile([*rest, replace(host, upstream=True, trusted=own)], warnings)
    return HostsFile([*hosts, server], warnings)


def _table(
    path: Path, key: str, fields: Any, kind: type[AnyTable], warnings: list[str]
) -> AnyTable:
    """Convert the table `key` of the file to a `kind`. Unknown keys are dropped with a line in
    `warnings`. Raises InvalidSpec naming the table."""
    place = f"{path}:{key}" if key else str(path)
    if not isinstance(fields, dict):
        raise InvalidSpec(place, "not a table")
    auth = fields.get("auth")
    unknown = [name for name in fields if name not in kind.__struct_fields__]
    if isinstance(auth, dict):
        unknown += [f"auth.{name}" for name in auth if name not in _Auth.__struct_fields__]
    warnings += [f"{key}.{name} is unknown and ignored".removeprefix(".") for name in unknown]
    try:
        return typed.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise InvalidSpec(place, str(error)) from None


def _text(path: Path) -> str:
    """Return the content of the hosts.toml at `path`. Raises OSError; ValueError if the file or one
    of its lines is too long."""
    with path.open("rb") as file:
        data = file.read(SIZE_LIMIT_BYTES + 1)
    if len(data) > SIZE_LIMIT_BYTES:
        raise ValueError(f"more than {SIZE_LIMIT_BYTES} bytes")
    # tomllib's time for a dotted key grows with the square of its parts.
    if any(len(line) > LINE_LIMIT_BYTES for line in data.splitlines()):
        raise ValueError(f"a line of more than {LINE_LIMIT_BYTES} bytes")
    return data.decode("utf-8")


def _host(
    path: Path,
    key: str,
    url: str,
    table: _Table,
    warnings: list[str],
    *,
    upstream: bool = False,
    trusted: bool = False,
) -> RegistryHost:
    parts = _split(path, key, url)
    prefix = re.sub("/{2,}", "/", parts.path).rstrip("/")
    if not table.override_path and not prefix.endswith("/v2"):
        prefix += "/v2"
    netloc = parts.netloc
    # docker.io itself is a web site, but containerd's documentation uses it as the server.
    if not parts.port and parts.hostname == DOCKER:
        netloc = "registry-1.docker.io"
    return RegistryHost(
        url=f"{parts.scheme}://{netloc}",
        prefix=prefix,
        capabilities=_capabilities(path, key, table.capabilities),
        upstream=upstream,
        skip_verify=table.skip_verify,
        ca=tuple(str(path.parent / name) for name in _listed(table.ca)),
        client=tuple(_pair(path, key, item) for item in _listed(table.client)),
        headers=_headers(path, key, table.header or {}),
        dial_timeout_s=_duration(path, key, table.dial_timeout),
        trusted=trusted,
        auth=_auth(table.auth),
        rewrites=_rewrites(path, key, table.rewrite or {}, warnings),
        proxy=_proxy(path, key, table.proxy),
        source=str(path),
    )


def _split(path: Path, key: str, url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "://" in url else f"https://{url}")
        if parts.port == 0:
            raise ValueError
    except ValueError:
        parts = urlsplit("")
    is_bare = not (parts.username or parts.password or parts.query or parts.fragment)
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_bare:
        raise InvalidSpec(f"{path}:{key}", "not an http or https URL")
    return parts


def _capabilities(path: Path, key: str, names: list[str] | None) -> frozenset[str]:
    """Return the capabilities in `names`, in lower case. None and an empty list mean resolve and
    pull, as in containerd. Raises InvalidSpec for an unknown one."""
    supported = {RESOLVE, PULL, "push", "referrers"}
    lower = frozenset(name.lower() for name in names or (RESOLVE, PULL))
    if lower - supported:
        text = f"{sorted(lower - supported)} is unknown; known are {', '.join(sorted(supported))}"
        raise InvalidSpec(f"{path}:{key}.capabilities", text)
    return lower


def _proxy(path: Path, key: str, url: str) -> Proxy | None:
    if not url:
        return None
    from cri_server.images.registry.proxy import parse

    parts = urlsplit(url)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise InvalidSpec(f"{path}:{key}.proxy", "a proxy's URL has no path")
    return parse(f"{path}:{key}.proxy", url)


def _auth(table: _Auth | None) -> Auth | None:
    if table is None:
        return None
    return Auth(
        table.username, table.password, table.auth,
        identity_token=table.identitytoken, registry_token=table.registrytoken,
    )  # fmt: skip


def _rewrites(
    path: Path, key: str, table: dict[str, str], warnings: list[str]
) -> tuple[Rewrite, ...]:
    rewrites = []
    for pattern, replacement in table.items():
        place = f"{key}.rewrite.{pattern!r}"
        try:
            rewrite = Rewrite(pattern, replacement)
        except ValueError as error:
            raise InvalidSpec(f"{path}:{place}", str(error)) from None
        for name in rewrite.unknown_groups():
            warnings.append(
                f"{place} has no group {name!r}, so it is replaced by nothing;"
                " write ${1}x for $1 followed by x"
            )
        rewrites.append(rewrite)
    return tuple(rewrites)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _pair(path: Path, key: str, item: str | list[str]) -> tuple[str, str | None]:
    if isinstance(item, str):
        return str(path.parent / item), None
    if not 1 <= len(item) <= 2 or not item[0]:
        raise InvalidSpec(f"{path}:{key}.client", "not a file or a pair of certificate and key")
    certificate, *keys = item
    # containerd takes a pair with an empty key: the certificate's file has both.
    key_path = str(path.parent / keys[0]) if any(keys) else None
    return str(path.parent / certificate), key_path


def _headers(path: Path, key: str, table: dict[str, str | list[str]]) -> dict[str, list[str]]:
    headers = {name: _listed(value) for name, value in table.items()}
    for name, values in headers.items():
        if not TOKEN.fullmatch(name) or any("\n" in v or "\r" in v for v in values):
            raise InvalidSpec(f"{path}:{key}.header", f"{name!r} is not a header")
    return headers


def _duration(path: Path, key: str, text: str | None) -> float:
    """Return the seconds in the text of `dial_timeout`, a duration of Go such as `1m30s`, `500ms`
    or `.5s`; DIAL_TIMEOUT_S for None, "" and 0. Raises InvalidSpec."""
    if not text or text == "0":
        return DIAL_TIMEOUT_S
    units = {
        "ns": 1e-9,
        "us": 1e-6,
        "µs": 1e-6,
        "μs": 1e-6,
        "ms": 1e-3,
        "s": 1.0,
        "m": 60.0,
        "h": 3600.0,
    }
    parts = re.findall(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", text)
    if "".join(number + unit for number, unit in parts) != text:
        raise InvalidSpec(f"{path}:{key}.dial_timeout", f"{text!r} is not a time such as 30s")
    return sum(float(number) * units[unit] for number, unit in parts) or DIAL_TIMEOUT_S


def _with_docker_files(host: RegistryHost, folder: Path) -> RegistryHost:
    pairs = [(str(p), str(p.with_suffix(".key"))) for p in sorted(folder.glob("*.cert"))]
    return replace(
        host, ca=tuple(str(p) for p in sorted(folder.glob("*.crt"))), client=tuple(pairs)
    )
