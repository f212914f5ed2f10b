"""Calls a network's IPAM plugin: the built-in host-local as a function, any other as an executable
(CNI's delegation).

If CNI_PATH has an executable `host-local` that is not pyrunc's, it replaces the built-in plugin.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from cni_plugins.host_local import plugin as host_local
from cni_plugins.protocol.builtin import HEAD_BYTES, is_builtin_script
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig, decode_object
from cni_plugins.protocol.errors import (
    DECODING_FAILURE,
    INVALID_CONFIG,
    IO_FAILURE,
    CniError,
    from_json,
)
from cni_plugins.protocol.result import Result

_ERROR_TEXT_LIMIT = 500


def plugin_of(config: PluginConfig) -> str:
    """Return the name of the network's IPAM plugin; empty for a network without addresses. Raises
    CniError INVALID_CONFIG."""
    ipam = config.raw.get("ipam")
    if ipam is None or ipam == {}:
        return ""
    kind = ipam.get("type") if isinstance(ipam, dict) else None
    if kind is None or kind == "":
        return ""
    if not isinstance(kind, str) or "/" in kind or "\0" in kind or kind in (".", ".."):
        raise CniError(INVALID_CONFIG, f"ipam.type: {str(kind)[:60]!r} is not the name of a plugin")
    return kind


def allocate(call: CniCall, config: PluginConfig, *, link: str) -> Result:
    """Run ADD of the network's IPAM plugin and return its result. For a network without addresses
    the result is empty. Raises CniError.

    `link`: the name of the veth's host end. host-local reuses a released address only after the
    kernel has removed that veth.
    """
    kind = plugin_of(config)
    if not kind:
        return Result()
    if program := _program(kind, call):
        # Strict, because bridge configures the kernel from this result; results that are only
        # passed on may contain what only their plugin understands.
        return Result.from_json(
            _run(program, call, config), default_version=config.cni_version, strict=True
        )
    return host_local.allocate(call, config, link=link)


def run(command: str, call: CniCall, config: PluginConfig) -> None:
    """Run the command DEL, CHECK, STATUS or GC of the network's IPAM plugin. Does nothing for a
    network without addresses. Raises CniError."""
    kind = plugin_of(config)
    if not kind:
        return
    # To undo a failed ADD, the bridge plugin runs DEL with the call of that ADD.
    call = replace(call, command=command)
    if program := _program(kind, call):
        _run(program, call, config)
    else:
        host_local.PLUGIN.verb(command)(call, config)


def _program(kind: str, call: CniCall) -> str:
    """Return the path of the executable of the IPAM plugin `kind` in CNI_PATH; empty for the
    built-in host-local. Raises CniError IO_FAILURE if there is no such plugin."""
    for folder in call.path:
        path = os.path.join(folder, kind)
        if os.path.isabs(path) and os.access(path, os.X_OK) and os.path.isfile(path):
            # A start of the script's interpreter would cost more than the allocation.
            if kind == "host-local" and is_builtin_script(_head(path)):
                return ""
            return path
    if kind == "host-local":
        return ""
    raise CniError(
        IO_FAILURE,
        f"address plugin {kind!r} is not in {':'.join(call.path) or 'CNI_PATH, which is empty'}",
    )


def _head(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(HEAD_BYTES) or b""


def _run(program: str, call: CniCall, config: PluginConfig) -> dict[str, Any]:
    """Execute the IPAM plugin at the path `program` with the request `call`; return its decoded
    output. Raises CniError if the plugin cannot be executed, or reports an error."""
    import subprocess  # takes 3 ms, and the built-in host-local does not need it

    name = os.path.basename(program)
    try:
        process = subprocess.run(
            [program],
            input=json.dumps(config.to_json()).encode(),
            env={**call.environment(), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise CniError(IO_FAILURE, f"cannot execute {program}: {error.strerror}") from None
    if process.returncode == 0:
        return (
            decode_object(process.stdout, f"the answer of {name}") if process.stdout.strip() else {}
        )
    try:
        refused = from_json(decode_object(process.stdout, f"the answer of {name}"))
    except CniError:
        stderr = " ".join(process.stderr.decode("utf-8", "replace").split())[:_ERROR_TEXT_LIMIT]
        raise CniError(
            DECODING_FAILURE,
            f"address plugin {name} failed with exit code {process.returncode}: {stderr}",
        ) from None
    raise refused
