"""Checks what the types of configuration values cannot express, such as the forms of addresses and
paths. Reads no files.

Each check yields an InvalidSpec for each wrong value. The path of this error is `table.key`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from cri_server.config import handlers
from cri_server.config.model import Config
from pyrunc.abi.capability import CAPABILITIES
from pyrunc.errors import InvalidArgument, InvalidSpec

SOCKET_PATH_LIMIT = 107  # sun_path, unix(7), without its final NUL


def problems(config: Config) -> Iterator[InvalidSpec]:
    """Yield an error for each wrong value in the configuration."""
    if not config.server.listen.startswith("unix:///"):
        yield InvalidSpec("server.listen", f"{config.server.listen!r} is not unix:///PATH")
    elif len(str(config.socket_path).encode()) > SOCKET_PATH_LIMIT:
        yield InvalidSpec("server.listen", f"the path is longer than {SOCKET_PATH_LIMIT} bytes")
    if len(config.nri.socket.encode()) > SOCKET_PATH_LIMIT:
        yield InvalidSpec("nri.socket", f"the path is longer than {SOCKET_PATH_LIMIT} bytes")
    yield from _check_metrics(config.metrics.address)
    yield from _check_endpoint(config.tracing.endpoint)
    yield from _check_network(config)
    yield from _check_pinned(config)
    yield from _check_capabilities("containers", config.containers.default_capabilities)
    yield from _check_runtimes(config)
    yield from _check_tls(config)
    for key, path in _absolute(config):
        if not Path(path).is_absolute():
            yield InvalidSpec(key, f"{path!r} is not an absolute path")


def _check_network(config: Config) -> Iterator[InvalidSpec]:
    for place, subnet in enumerate(config.network.builtin):
        try:
            ipaddress.ip_network(subnet)
        except ValueError as error:
            yield InvalidSpec(f"network.builtin[{place}]", str(error))


def _check_tls(config: Config) -> Iterator[InvalidSpec]:
    streaming = config.streaming
    for key, other in (
        ("tls_certificate", "tls_key"),
        ("tls_key", "tls_certificate"),
        ("tls_client_ca", "tls_key"),
    ):
        if getattr(streaming, key) and not getattr(streaming, other):
            yield InvalidSpec(f"streaming.{key}", f"needs {other}")


def _check_runtimes(config: Config) -> Iterator[InvalidSpec]:
    for name, runtime in config.runtimes.items():
        table = f"runtimes.{name}"
        if not handlers.NAME.fullmatch(name):
            yield InvalidSpec(table, "the name of a handler must be a DNS label, such as my-class")
        if name in handlers.OURS and runtime.binary:
            yield InvalidSpec(f"{table}.binary", f"{name} is the name of the built-in runtime")
        if runtime.arguments and not runtime.binary:
            yield InvalidSpec(f"{table}.arguments", "needs binary")
        yield from _check_capabilities(table, runtime.default_capabilities or [])


def _check_capabilities(table: str, names: list[str]) -> Iterator[InvalidSpec]:
    for place, name in enumerate(names):
        if name not in CAPABILITIES:
            key = f"{table}.default_capabilities[{place}]"
            yield InvalidSpec(key, f"{name!r} is not a capability such as CAP_CHOWN")


def _check_pinned(config: Config) -> Iterator[InvalidSpec]:
    if not config.images.pinned:
        return
    from cri_server.images.store.catalog import pin

    for place, reference in enumerate(config.images.pinned):
        try:
            pin(reference)
        except InvalidArgument as error:
            yield InvalidSpec(f"images.pinned[{place}]", error.message)


def _absolute(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (`table.key`, path) for each path that must be absolute."""
    yield "server.root", config.server.root
    yield "server.state", config.server.state
    yield "network.conf_dir", config.network.conf_dir
    yield "network.netns_dir", config.network.netns_dir
    for key in ("tls_certificate", "tls_key", "tls_client_ca"):
        if path := getattr(config.streaming, key):
            yield f"streaming.{key}", path
    if config.registry.signature_policy:
        yield "registry.signature_policy", config.registry.signature_policy
    for name, runtime in config.runtimes.items():
        table = f"runtimes.{name}"
        yield from (
            (f"{table}.{key}", path)
            for key in ("binary", "seccomp_profile")
            if (path := getattr(runtime, key))
        )
        yield from ((f"{table}.hooks_dirs", folder) for folder in runtime.hooks_dirs or [])
    for key in ("hooks_dirs", "cdi_dirs"):
        yield from ((f"containers.{key}", folder) for folder in getattr(config.containers, key))
    for key in ("seccomp_profile", "block_io_classes", "rdt_classes"):
        if path := getattr(config.containers, key):
            yield f"containers.{key}", path
    for key in ("socket", "plugin_dir", "plugin_config_dir"):
        yield f"nri.{key}", getattr(config.nri, key)
    for key, folders in (
        ("network.bin_dir", config.network.bin_dir),
        ("registry.config_path", config.registry.config_path),
    ):
        yield from ((key, folder) for folder in folders.split(":") if folder)


def _check_endpoint(endpoint: str) -> Iterator[InvalidSpec]:
    try:
        parts = urlsplit(endpoint)
        wrong = bool(endpoint) and (
            parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        )
    except ValueError:
        wrong = True
    if wrong:
        yield InvalidSpec("tracing.endpoint", f"{endpoint!r} is not http[s]://HOST:PORT[/PATH]")


def _check_metrics(address: str) -> Iterator[InvalidSpec]:
    if address.startswith("unix://"):
        path = address.removeprefix("unix://")
        wrong = not path.startswith("/") or len(path.encode()) > SOCKET_PATH_LIMIT
    else:
        host, colon, port = address.rpartition(":")
        # An IPv6 address needs brackets: its last group would be taken for the port.
        bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
        wrong = bool(address) and not (
            host and colon and not bare and port.isdecimal() and int(port) <= 65535
        )
    if wrong:
        yield InvalidSpec("metrics.address", f"{address!r} is not unix:///PATH or HOST:PORT")
