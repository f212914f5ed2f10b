"""The folder of network configurations: the lexically first file of it is the node's network, with
the plugins in the folder of the network's name appended.

That file decides also when something is wrong with it, as under containerd: the next file, or the
built-in network, would give pods an address in a network that the cluster does not know. Only what
is no JSON object at all is passed over.

Reading is cheap enough to be done for every pod: names, sizes and times are compared, files are
parsed when they change.
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
class Found:
    """The node's network, or why there is none.

    source: the file that decides, or `built in`, or empty; problem: what is wrong with that file;
    passed_over: a line for each file before it that is no network configuration.
    """

    network: NetworkList | None
    source: str
    problem: str
    passed_over: tuple[str, ...] = ()


class Configuration:
    """What the folder says now; `default` (a conflist object) stands in while it holds no
    configuration."""

    def __init__(self, folder: str, default: dict[str, Any] | None) -> None:
        self._folder, self._default = folder, default
        self._signature: _Signature | None = None
        self._found = Found(None, "", "")

    def replace_default(self, default: dict[str, Any] | None) -> None:
        self._default, self._signature = default, None

    def replace_folder(self, folder: str) -> None:
        self._folder, self._signature = folder, None

    def current(self) -> Found:
        """Never raises: a folder that cannot be read is a problem to report."""
        try:
            signature = self._sign()
        except OSError as error:
            return Found(None, self._folder, f"{self._folder}: {error.strerror}")
        if signature != self._signature:
            names = [entry[0] for entry in signature if "/" not in entry[0]]
            self._found, self._signature = self._load(names), signature
        return self._found

    def _sign(self) -> _Signature:
        found = []
        for entry in os.scandir(self._folder) if os.path.isdir(self._folder) else ():
            with contextlib.suppress(FileNotFoundError):  # taken away since it was listed
                if entry.name.endswith(_ENDINGS) and (entry.is_file() or _leads_nowhere(entry)):
                    found.append(_described(entry))
                elif entry.is_dir():
                    found += [_described(e, entry.name) for e in os.scandir(entry) if _is_plugin(e)]
        return tuple(sorted(found))

    def _load(self, names: list[str]) -> Found:
        passed_over: list[str] = []
        for name in names:
            path = os.path.join(self._folder, name)
            try:
                content = _read(path)
            except FileNotFoundError:
                if not os.path.islink(path):  # taken away since it was listed
                    continue
                return Found(None, path, f"{path} leads nowhere", tuple(passed_over))
            except OSError as error:
                return Found(None, path, f"{path}: {error.strerror}", tuple(passed_over))
            if not content.lstrip().startswith(b"{"):
                what = "is not a JSON object" if content.strip() else "is empty"
                passed_over.append(f"{path} is passed over: it {what}")
                continue
            return self._parse(path, content, tuple(passed_over))
        return self._fallback(tuple(passed_over))

    def _parse(self, path: str, content: bytes, passed_over: tuple[str, ...]) -> Found:
        """The network of the file that decides."""
        try:
            value = self._with_more_plugins(decode_object(content, "the file"))
            return Found(parse_list_object(value), path, "", passed_over)
        except CniError as error:
            details = f" ({error.details})" if error.details else ""
            return Found(None, path, f"{path}: {error.message}{details}", passed_over)
        except OSError as error:
            return Found(None, path, f"{error.filename or path}: {error.strerror}", passed_over)

    def _with_more_plugins(self, value: dict[str, Any]) -> dict[str, Any]:
        """A configuration with the plugins of its folder behind its own. Raises CniError, OSError."""
        own, name = value.get("plugins", []), plugin_folder(value)
        folder = os.path.join(self._folder, name)
        if not name or not isinstance(own, list) or not os.path.isdir(folder):
            return value
        names = sorted(entry.name for entry in os.scandir(folder) if _is_plugin(entry))
        more = []
        for each in names:
            with contextlib.suppress(FileNotFoundError):
                more.append(_read_object(os.path.join(folder, each)))
        return {**value, "plugins": [*own, *more]} if more else value

    def _fallback(self, passed_over: tuple[str, ...] = ()) -> Found:
        if self._default is not None:
            return Found(parse_list_object(self._default), "built in", "", passed_over)
        empty = f"no network configuration (*.conflist, *.conf, *.json) in {self._folder}"
        return Found(None, "", "; ".join((empty, *passed_over)), passed_over)


def _is_plugin(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".conf") and entry.is_file()


def _described(entry: os.DirEntry[str], folder: str = "") -> tuple[str, int, int, int]:
    stat = entry.stat(follow_symlinks=not _leads_nowhere(entry))
    return os.path.join(folder, entry.name), stat.st_ino, stat.st_size, stat.st_mtime_ns


def _leads_nowhere(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


def _read_object(path: str) -> dict[str, Any]:
    return decode_object(_read(path), os.path.basename(path))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(LIMIT_BYTES + 1)


def builtin_network(
    data_dir: str,
    *,
    bridge: str = "pyrunc0",
    subnets: tuple[str, ...] = ("10.85.0.0/16", "fd85::/64"),
) -> dict[str, Any]:
    """The network of a node that has no configuration: a bridge, host-local addresses below
    `data_dir`, host ports.

    Raises InvalidArgument for what is not a subnet.
    """
    for subnet in subnets:
        try:
            parse_network(subnet)
        except ValueError as error:
            raise InvalidArgument(f"the built-in network: {error}") from None
    anywhere = {"0.0.0.0/0": 4, "::/0": 6}
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
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": data_dir,
                    "ranges": [[{"subnet": subnet}] for subnet in subnets],
                    "routes": [
                        {"dst": route} for route, version in anywhere.items() if version in versions
                    ],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
