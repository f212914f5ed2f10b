"""Reads the folder of network configurations. The lexically first file is the pod network; plugins
in the subfolder with the network's name are appended to it.

The first file counts even if it is invalid, as under containerd: the next file, or the built-in
network, would give pods addresses in a network that the cluster does not know. Only files that are
not JSON objects are skipped.

The folder is checked for every pod. This is cheap: names, inodes, sizes and times are compared, and
the files are parsed only when one has changed.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from ipaddress import ip_network as parse_network
from typing import Any

from cni_plugins.protocol.config import (
    LIMIT_BYTES,
    NetworkList,
    decode_object,
    parse_list_object,
    plugin_folder,
)
from cni_plugins.protocol.errors import CniError
from pyrunc.errors import InvalidArgument

_ENDINGS = (".conflist", ".conf", ".json")
_Signature = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ConfiguredNetwork:
    """The configured network, or why there is none (`network` is None).

    - `source`: the path of the chosen file, `built in`, or "".
    - `problem`: the error in the file `source`.
    - `skipped`: a message for each file that was skipped before `source`.
    """

    network: NetworkList | None
    source: str
    problem: str
    skipped: tuple[str, ...] = ()


class Configuration:
    """Reads the network that is configured in a folder. `default`: the conflist object of the
    built-in network, used while the folder has no configuration. None: there is no built-in
    network."""

    def __init__(self, folder: str, default: dict[str, Any] | None) -> None:
        self._folder, self._default = folder, default
        self._signature: _Signature | None = None
        self._current = ConfiguredNetwork(None, "", "")

    def replace(self, folder: str, default: dict[str, Any] | None) -> None:
        """Set the folder and the built-in network that later calls of `current` use."""
        self._folder, self._default, self._signature = folder, default, None

    def current(self) -> ConfiguredNetwork:
        """Return the configured network. Never raises: an unreadable folder is reported in
        `problem`."""
        try:
            signature = self._sign()
        except OSError as error:
            return ConfiguredNetwork(None, self._folder, f"{self._folder}: {error.strerror}")
        if signature != self._signature:
            # A name with a slash is a plugin's file in a network's subfolder, not a network.
            names = [entry[0] for entry in signature if "/" not in entry[0]]
            self._current, self._signature = self._load(names), signature
        return self._current

    def _sign(self) -> _Signature:
        signature = []
        for entry in os.scandir(self._folder) if os.path.isdir(self._folder) else ():
            with contextlib.suppress(FileNotFoundError):  # removed since scandir
                if entry.name.endswith(_ENDINGS) and (entry.is_file() or _is_dangling(entry)):
                    signature.append(_describe(entry))
                elif entry.is_dir():
                    signature += [
                        _describe(e, entry.name) for e in os.scandir(entry) if _is_plugin(e)
                    ]
        return tuple(sorted(signature))

    def _load(self, names: list[str]) -> ConfiguredNetwork:
        skipped: list[str] = []
        for name in names:
            path = os.path.join(self._folder, name)
            try:
                content = _read(path)
            except OSError as error:
                problem = f"{path}: {error.strerror}"
                if isinstance(error, FileNotFoundError):
                    if not os.path.islink(path):  # removed since listing
                        continue
                    problem = f"{path} is a dangling link"
                return ConfiguredNetwork(None, path, problem, tuple(skipped))
            if not content.lstrip().startswith(b"{"):
                what = "is not a JSON object" if content.strip() else "is empty"
                skipped.append(f"{path} is skipped: it {what}")
                continue
            return self._parse(path, content, tuple(skipped))
        return self._fallback(tuple(skipped))

    def _parse(self, path: str, content: bytes, skipped: tuple[str, ...]) -> ConfiguredNetwork:
        """Parse `content`, the bytes of the file at `path`. An error is returned as the result's
        `problem`."""
        try:
            value = self._with_more_plugins(decode_object(content, "the file"))
            return ConfiguredNetwork(parse_list_object(value), path, "", skipped)
        except CniError as error:
            details = f" ({error.details})" if error.details else ""
            return ConfiguredNetwork(None, path, f"{path}: {error.message}{details}", skipped)
        except OSError as error:
            return ConfiguredNetwork(
                None, path, f"{error.filename or path}: {error.strerror}", skipped
            )

    def _with_more_plugins(self, value: dict[str, Any]) -> dict[str, Any]:
        """Append the plugins in the subfolder with the network's name to the conflist object
        `value`, and return the result. Raises OSError, and CniError for a malformed
        configuration."""
        inline, name = value.get("plugins", []), plugin_folder(value)
        folder = os.path.join(self._folder, name)
        if not name or not isinstance(inline, list) or not os.path.isdir(folder):
            return value
        names = sorted(entry.name for entry in os.scandir(folder) if _is_plugin(entry))
        appended = []
        for each in names:
            with contextlib.suppress(FileNotFoundError):
                appended.append(decode_object(_read(os.path.join(folder, each)), each))
        return {**value, "plugins": [*inline, *appended]} if appended else value

    def _fallback(self, skipped: tuple[str, ...]) -> ConfiguredNetwork:
        if self._default is not None:
            return ConfiguredNetwork(parse_list_object(self._default), "built in", "", skipped)
        empty = f"no network configuration (*.conflist, *.conf, *.json) in {self._folder}"
        return ConfiguredNetwork(None, "", "; ".join((empty, *skipped)), skipped)


def _is_plugin(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".conf") and entry.is_file()


def _describe(entry: os.DirEntry[str], folder: str = "") -> tuple[str, int, int, int]:
    stat = entry.stat(follow_symlinks=not _is_dangling(entry))
    # The inode tells a file that a rename has replaced within one tick of the clock (4 ms at
    # HZ=250), with the same size.
    return os.path.join(folder, entry.name), stat.st_ino, stat.st_size, stat.st_mtime_ns


def _is_dangling(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(LIMIT_BYTES + 1)


def builtin_network(
    data_dir: str,
    *,
    bridge: str = "pyrunc0",
    # CRI-O's default subnet for IPv4; a unique local one for IPv6 (RFC 4193).
    subnets: tuple[str, ...] = ("10.85.0.0/16", "fd85::/64"),
) -> dict[str, Any]:
    """Return the conflist object of the network that a node without a configuration gets: a bridge,
    host ports, and addresses from host-local, whose leases are stored below `data_dir`.

    Raises InvalidArgument for an invalid subnet.
    """
    for subnet in subnets:
        try:
            parse_network(subnet)
        except ValueError as error:
            raise InvalidArgument(f"the built-in network: {error}") from None
    default_routes = {"0.0.0.0/0": 4, "::/0": 6}
    versions = {6 if ":" in subnet else 4 for subnet in subnets}
    return {
        "cniVersion": "1.1.0",
        "name": "pyrunc",
        "plugins": [
            {
                "type": "bridge",
                "bridge": bridge,
                "isGateway": True,
                "ipMasq": True,
                # A pod that connects to its own host port gets its packet back through the same
                # port of the bridge.
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": data_dir,
                    "ranges": [[{"subnet": subnet}] for subnet in subnets],
                    "routes": [
                        {"dst": route}
                        for route, version in default_routes.items()
                        if version in versions
                    ],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
