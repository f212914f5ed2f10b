"""CNI configurations: the network list that an administrator writes, and the input of each plugin
in it.

A runtime parses a list with `parse_list_object` and builds each plugin's input with `plugin_input`.
A plugin parses its input with `PluginConfig.parse`. Unknown keys are kept, because they belong to
the plugin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cni_plugins.protocol import version
from cni_plugins.protocol.call import check_identifier
from cni_plugins.protocol.errors import DECODING_FAILURE, INVALID_CONFIG, CniError
from cni_plugins.protocol.result import Result

LIMIT_BYTES = 1 << 20
VALID_ATTACHMENTS = "cni.dev/valid-attachments"
"""Key of GC's input: a list of {"containerID", "ifname"} (spec 1.1.0)."""
_OTHER_ATTACHMENTS = "cni.dev/attachments"


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """A plugin's input.

    - `kind`: the value of the key `type`
    - `raw`: the whole JSON object
    - `previous`: the result of an earlier plugin that ran in this process, or None. It replaces
      `prevResult` in `raw`.
    """

    name: str
    cni_version: str
    kind: str
    raw: dict[str, Any]
    previous: Result | None = None

    @classmethod
    def parse(cls, content: bytes) -> PluginConfig:
        """Parse the JSON on a plugin's stdin, of any CNI version. Raises CniError DECODING_FAILURE
        or INVALID_CONFIG."""
        return cls.from_object(decode_object(content, "the configuration on stdin"))

    @classmethod
    def from_object(cls, value: dict[str, Any]) -> PluginConfig:
        """Parse a plugin's input object, of any CNI version. Raises CniError INVALID_CONFIG."""
        name, kind = _name(value), value.get("type")
        cni_version = value.get("cniVersion") or version.DEFAULT
        if not isinstance(kind, str) or not isinstance(cni_version, str):
            raise CniError(INVALID_CONFIG, "type and cniVersion must be strings")
        return cls(name=name, cni_version=cni_version, kind=kind, raw=value)

    def previous_result(self) -> Result | None:
        """Return prevResult; None if the input has none. Raises CniError if it is invalid.

        For ADD, prevResult is the result of the previous plugin. For other commands it is the
        result of ADD.
        """
        if self.previous is not None:
            return self.previous
        value = self.raw.get("prevResult")
        if value is None:
            return None
        return Result.from_json(value, default_version=self.cni_version)

    def to_json(self) -> dict[str, Any]:
        """Return the input as a JSON object, for a plugin to which this plugin delegates."""
        if self.previous is None:
            return self.raw
        return {**self.raw, "prevResult": self.previous.to_json(self.cni_version)}

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean option; `default` if it is missing or null. Raises CniError
        INVALID_CONFIG."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CniError(INVALID_CONFIG, f"{key}: not a boolean")
        return value

    def capability(self, name: str) -> Any:
        """Return the value of the capability `name` in `runtimeConfig`; None if it is missing."""
        arguments = self.raw.get("runtimeConfig")
        return arguments.get(name) if isinstance(arguments, dict) else None

    def cni_argument(self, name: str) -> Any:
        """Return the argument `name` in `args.cni` (CNI conventions); None if it is missing."""
        arguments = self.raw.get("args")
        inner = arguments.get("cni") if isinstance(arguments, dict) else None
        return inner.get(name) if isinstance(inner, dict) else None

    def scope(self) -> str:
        """Return `args.cni.scope`, the name of the calling runtime; empty if it is not set. GC with
        a scope keeps the attachments of other runtimes on the same network. pyrunc's server sets
        the scope. Raises CniError INVALID_CONFIG."""
        value = self.cni_argument("scope") or ""
        if (
            not isinstance(value, str)
            or len(value) > 16
            or not (value.isascii() and (value.isalnum() or not value))
        ):
            raise CniError(
                INVALID_CONFIG, "args.cni.scope: not a word of at most 16 letters and digits"
            )
        return value

    def valid_attachments(self) -> set[tuple[str, str]]:
        """Return GC's `cni.dev/valid-attachments` as (container id, interface) pairs. Raises
        CniError if the list is missing, because GC would then release every attachment.

        Also accepts null, which libcni writes for an empty list, and the key that the first edition
        of spec 1.1.0 used by mistake."""
        key = VALID_ATTACHMENTS if VALID_ATTACHMENTS in self.raw else _OTHER_ATTACHMENTS
        # False stands for a missing key, since null is a valid value.
        value = self.raw.get(key, False)
        value = [] if value is None else value
        if not isinstance(value, list):
            raise CniError(INVALID_CONFIG, f"GC needs a list in {VALID_ATTACHMENTS}")
        pairs = set()
        for index, item in enumerate(value):
            where = f"{VALID_ATTACHMENTS}[{index}]"
            fields = item if isinstance(item, dict) else {}
            container_id, ifname = fields.get("containerID"), fields.get("ifname")
            if not isinstance(container_id, str) or not isinstance(ifname, str):
                raise CniError(INVALID_CONFIG, f"{where}: needs containerID and ifname")
            pairs.add((container_id, ifname))
        return pairs


@dataclass(frozen=True, slots=True)
class NetworkList:
    """A network. Its plugins run in order for ADD and in reverse order for DEL."""

    name: str
    cni_version: str
    plugins: tuple[dict[str, Any], ...]
    disable_check: bool = False
    disable_gc: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the network as a JSON object that `parse_list_object` can parse."""
        return {
            "cniVersion": self.cni_version,
            "name": self.name,
            "disableCheck": self.disable_check,
            "disableGC": self.disable_gc,
            "plugins": list(self.plugins),
        }


def parse_list_object(value: dict[str, Any]) -> NetworkList:
    """Parse a network list (`*.conflist`), or a single plugin's configuration as a list of one.
    Raises CniError INCOMPATIBLE_VERSION or INVALID_CONFIG."""
    name = _name(value)
    plugins = value.get("plugins", [value] if "type" in value else None)
    if not isinstance(plugins, list) or not plugins:
        raise CniError(INVALID_CONFIG, "plugins: missing, not a list or empty")
    for index, plugin in enumerate(plugins):
        _check_plugin(plugin, f"plugins[{index}]")
    return NetworkList(
        name=name,
        cni_version=_choose_version(value),
        plugins=tuple(plugins),
        disable_check=_flag(value, "disableCheck"),
        disable_gc=_flag(value, "disableGC"),
    )


def plugin_folder(value: dict[str, Any]) -> str:
    """Return the name of the folder whose files add plugins to the network list (spec 1.1.0). The
    folder is beside the list's file, and has the network's name.

    Returns an empty name for a single plugin's configuration and with `loadOnlyInlinedPlugins`.
    Raises CniError INVALID_CONFIG."""
    if ("type" in value and "plugins" not in value) or _flag(value, "loadOnlyInlinedPlugins"):
        return ""
    return _name(value) if isinstance(value.get("name"), str) and value["name"] else ""


def plugin_input(
    network: NetworkList,
    plugin: dict[str, Any],
    *,
    capabilities: Mapping[str, Any] | None = None,
    previous: Result | None = None,
    valid_attachments: list[dict[str, str]] | None = None,
) -> dict[str, Any]:
    """Build the JSON object that `plugin` of `network` reads on stdin (CNI spec, section 4,
    "Deriving request configuration").

    `capabilities`: the values of all capabilities that the runtime offers. The plugin's
    `runtimeConfig` gets only those that its `capabilities` enable.
    """
    # The runtime keeps `capabilities` for itself, and adds its own values of the other two (spec,
    # section 4). A prevResult in a file would be another pod's.
    value = {
        k: v for k, v in plugin.items() if k not in ("capabilities", "prevResult", "runtimeConfig")
    }
    value["name"], value["cniVersion"] = network.name, network.cni_version
    capability_flags = plugin.get("capabilities")
    runtime_config = {
        k: v
        for k, v in (capabilities or {}).items()
        if isinstance(capability_flags, dict) and capability_flags.get(k) is True
    }
    if runtime_config:
        value["runtimeConfig"] = runtime_config
    if previous is not None:
        value["prevResult"] = previous.to_json(network.cni_version)
    if valid_attachments is not None:
        value[VALID_ATTACHMENTS] = valid_attachments
    return value


def decode_object(content: bytes, what: str) -> dict[str, Any]:
    """Decode `content` as a JSON object of at most 1 MiB. Raises CniError DECODING_FAILURE; `what`
    names the content in the error message."""
    if len(content) > LIMIT_BYTES:
        raise CniError(DECODING_FAILURE, f"{what} has more than {LIMIT_BYTES} bytes")
    try:
        value = json.loads(content)
    # Python's decoder raises RecursionError for lists in lists, about a thousand deep.
    except (ValueError, RecursionError) as error:
        raise CniError(DECODING_FAILURE, f"{what} is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise CniError(DECODING_FAILURE, f"{what} is not a JSON object")
    return value


def _name(value: dict[str, Any]) -> str:
    """Return the network's name. Raises CniError INVALID_CONFIG."""
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise CniError(INVALID_CONFIG, "name: missing or not a string")
    try:
        check_identifier(name, "name")
    except CniError as error:
        raise CniError(INVALID_CONFIG, error.message) from None
    return name


def _check_plugin(plugin: object, where: str) -> None:
    kind = plugin.get("type") if isinstance(plugin, dict) else None
    if not isinstance(kind, str) or not kind:
        raise CniError(INVALID_CONFIG, f"{where}.type: missing or not a string")
    if "/" in kind or kind in (".", "..") or "\0" in kind or len(kind) > 255:
        raise CniError(INVALID_CONFIG, f"{where}.type: {kind[:60]!r} is not the name of a plugin")


def _choose_version(value: dict[str, Any]) -> str:
    """Return the CNI version to use: the newest supported one in `cniVersions` and `cniVersion`
    (spec 1.1.0). Raises CniError if none is supported."""
    versions = value.get("cniVersions")
    single: object = value.get("cniVersion") or version.DEFAULT
    if not isinstance(single, str):
        raise CniError(INVALID_CONFIG, "cniVersion: not a string")
    if versions is not None:
        if not isinstance(versions, list) or not all(isinstance(v, str) for v in versions):
            raise CniError(INVALID_CONFIG, "cniVersions: not a list of strings")
        supported = [v for v in (*versions, single) if v in version.SUPPORTED]
        single = str(max(supported, key=version.parse)) if supported else single
    version.require_supported(single)
    return single


def _flag(value: dict[str, Any], key: str) -> bool:
    """Return the boolean at `key`, False if it is missing. Accepts the strings "true" and "false"
    too, as libcni does. Raises CniError INVALID_CONFIG."""
    flag = value.get(key, False)
    if isinstance(flag, str) and flag.lower() in ("true", "false"):
        return flag.lower() == "true"
    if not isinstance(flag, bool):
        raise CniError(INVALID_CONFIG, f"{key}: not a boolean")
    return flag
