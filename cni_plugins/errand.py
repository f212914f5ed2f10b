"""Our plugins in a fork of the server's zygote: several of one chain in one process, with the answers of a plugin.

    chain(arguments, fds)      run consecutive plugins of a chain that are ours; the request is on stdin
    execute(arguments, fds)    become a foreign plugin's executable
    restore(arguments, fds)    put host rules back that somebody removed; the attachments are on stdin

stdin and stdout stay what the specification says, for a list of plugins instead of one: an input object per plugin, the
last result or the error of the plugin that refused.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from cni_plugins.bridge.plugin import PLUGIN as BRIDGE
from cni_plugins.bridge.restore import elements as masquerade_elements
from cni_plugins.host_local.plugin import PLUGIN as HOST_LOCAL
from cni_plugins.loopback.plugin import PLUGIN as LOOPBACK
from cni_plugins.loopback.plugin import bring_up
from cni_plugins.net import host_rules, netns, nfnetlink
from cni_plugins.portmap.plugin import PLUGIN as PORTMAP
from cni_plugins.portmap.plugin import derive as derive_ports
from cni_plugins.protocol import version
from cni_plugins.protocol.call import Call
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.result import Result
from cni_plugins.skel import Plugin, perform, refusal

PLUGINS = {plugin.name: plugin for plugin in (BRIDGE, HOST_LOCAL, LOOPBACK, PORTMAP)}


def chain(arguments: dict[str, Any], fds: Sequence[int]) -> int:
    """Run the plugins on stdin in their order.

    arguments: {"environment": the request's variables, "loopback": true to set the pod's `lo` up first}
    fds: none, or a netfilter socket to borrow
    stdin: {"inputs": [plugin input, …], "previous": result or null}; a plugin input lacks prevResult
    stdout: {"result": the last result, or null} | {"error": error object, "plugin": its type}
    """
    if fds:
        nfnetlink.borrow(fds[0])
    request = json.loads(_read_stdin())
    call = Call.from_environment(arguments["environment"])
    previous = request["previous"]
    if arguments.get("loopback"):
        with netns.opened(call.netns) as pod:
            bring_up(pod)
    for value in request["inputs"]:
        plugin = PLUGINS[value["type"]]
        if previous is not None:
            value["prevResult"] = previous
        try:
            result = _perform(plugin, call, value)
        except Exception as error:
            refused = refusal(plugin, error).to_json(value.get("cniVersion", version.LATEST))
            return _answer({"error": refused, "plugin": plugin.name}, 1)
        if result is not None:
            previous = result.to_json(value["cniVersion"])
    return _answer({"result": previous if call.command == "ADD" else None}, 0)


def execute(arguments: dict[str, Any], fds: Sequence[int]) -> int:
    """Become `arguments["program"]` with exactly the environment `arguments["environment"]`."""
    os.chdir("/")
    program = arguments["program"]
    try:
        os.execve(program, [program], arguments["environment"])
    except OSError as error:
        print(f"cannot execute {program}: {error.strerror}", file=sys.stderr)
    return 127


def restore(arguments: dict[str, Any], fds: Sequence[int]) -> int:
    """Put back rules and elements of living attachments.

    stdin: {"attachments": [{"environment": …, "inputs": [plugin input with prevResult, …]}, …]}
    stdout: {"restored": how many elements were put back}
    """
    if fds:
        nfnetlink.borrow(fds[0])
    wanted: dict[tuple[str, bytes], nfnetlink.Element] = {}
    subnets: set[host_rules.Subnet] = set()
    for attachment in json.loads(_read_stdin())["attachments"]:
        call = Call.from_environment(attachment["environment"])
        for value in attachment["inputs"]:
            found, needed = _host_rules_of(call, PluginConfig.parse(json.dumps(value).encode()))
            wanted.update({(e.set_name, e.key): e for e in found})
            subnets |= needed
    return _answer({"restored": host_rules.restore(list(wanted.values()), subnets)}, 0)


def _host_rules_of(
    call: Call, config: PluginConfig
) -> tuple[list[nfnetlink.Element], set[host_rules.Subnet]]:
    previous = config.previous_result() or Result()
    if config.kind == "portmap":
        rules = derive_ports(call, config, previous)
        return list(rules.elements), set(rules.subnets)
    if config.kind == "bridge":
        return masquerade_elements(call, config, previous)
    return [], set()


def _perform(plugin: Plugin, call: Call, value: dict[str, Any]) -> Result | None:
    config = PluginConfig.parse(json.dumps(value).encode())
    return perform(plugin, call, config)


def _read_stdin() -> bytes:
    parts = []
    while part := os.read(0, 1 << 16):
        parts.append(part)
    return b"".join(parts)


def _answer(value: dict[str, Any], code: int) -> int:
    view = memoryview(json.dumps(value).encode())
    while view:
        view = view[os.write(1, view) :]
    return code
