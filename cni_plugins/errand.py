"""Our plugins in forks of the server's zygote: workers that serve request after request, and foreign executables.

    serve(arguments, fds)      a worker: answers requests on a socket until that is closed
    execute(arguments, fds)    become a foreign plugin's executable
    install(arguments, fds)    write ours as executables, for foreign ones that delegate to them

A worker is a fork that stays: forking anew and touching copied pages costs more than a plugin's work (measured: 6 ms for a
new fork, 3 for a worker that has done it before). Consecutive plugins of a chain are one request. Requests and answers
are messages of pyrunc.ipc with an `id`; an answer's `ok` holds:

    {"do": "chain", "environment", "loopback", "inputs", "previous"}   -> {"result"} | {"error", "plugin", "trace"}
    {"do": "restore", "attachments": [{"environment", "inputs"}]}      -> {"restored": number of elements} | {"error", …}

An answer with `last` is the worker's last one: it has grown.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cni_plugins.bridge.plugin import PLUGIN as BRIDGE
from cni_plugins.bridge.restore import elements as masquerade_elements
from cni_plugins.host_local.plugin import PLUGIN as HOST_LOCAL
from cni_plugins.loopback.plugin import PLUGIN as LOOPBACK
from cni_plugins.net import host_rules, netns, nfnetlink, rtnetlink
from cni_plugins.net.pod import sharing
from cni_plugins.portmap.plugin import PLUGIN as PORTMAP
from cni_plugins.portmap.plugin import derive as derive_ports
from cni_plugins.protocol import version
from cni_plugins.protocol.call import Call
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import INTERNAL
from cni_plugins.protocol.result import Result
from cni_plugins.skel import perform, refusal
from pyrunc import ipc
from pyrunc.kernel import reaper

LARGE = "pyroute2"  # 20 MiB, see `net.inventory`
PLUGINS = {plugin.name: plugin for plugin in (BRIDGE, HOST_LOCAL, LOOPBACK, PORTMAP)}


def serve(arguments: dict[str, Any], fds: Sequence[int]) -> int:
    """Answer requests on the packet socket `fds[0]`; ends with it, or when it finds itself in another namespace."""
    reaper.set_name("pyrunc-cni")
    home = netns.identity()
    for part in (netns, nfnetlink, rtnetlink):
        part.keep_open()
    with socket.socket(fileno=fds[0]) as link:
        while (received := ipc.receive(link)) is not None:
            request, _ = received
            answered = answer(request)
            if LARGE in sys.modules:  # it came with CHECK, GC or the flows of a UDP port
                answered["last"] = True
            ipc.send(link, {"id": request["id"], "ok": answered})
            if netns.identity() != home:
                return 1
    return 0


def execute(arguments: dict[str, Any], fds: Sequence[int]) -> int:
    """Become `arguments["program"]` with exactly the environment `arguments["environment"]`."""
    os.chdir("/")
    program = arguments["program"]
    try:
        os.execve(program, [program], arguments["environment"])
    except OSError as error:
        print(f"cannot execute {program}: {error.strerror}", file=sys.stderr)
    return 127


def install(arguments: dict[str, Any], fds: Sequence[int]) -> int:
    """Write our plugins into the folder `arguments["folder"]`."""
    from cni_plugins.install import install as write

    try:
        write(arguments["folder"])
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request; every exception becomes an error object."""
    try:
        return _REQUESTS[request["do"]](request)
    except Exception as error:
        return _refuse(request["do"], error, version.LATEST)


def chain(request: dict[str, Any]) -> dict[str, Any]:
    """Run plugins in their order, each with the result of the one before; the last result of an ADD."""
    call = Call.from_environment(request["environment"])
    if call.command != "ADD":
        return _in_turn(call, request["inputs"], None)
    with sharing(call.netns) as pod:
        if request["loopback"]:
            pod.bring_loopback_up()
        answered = _in_turn(call, request["inputs"], request["previous"])
        pod.settle()
    return answered


def _in_turn(call: Call, inputs: list[dict[str, Any]], previous: dict[str, Any] | None) -> dict[str, Any]:
    """Run one plugin after the other; results are handed on as they are, without a detour through JSON."""
    result: Result | None = None
    for value in inputs:
        plugin = PLUGINS[value["type"]]
        if result is None and previous is not None:
            value["prevResult"] = previous
        try:
            result = (
                perform(plugin, call, replace(PluginConfig.from_object(value), previous=result)) or result
            )
        except Exception as error:
            return _refuse(plugin.name, error, value["cniVersion"])
    if call.command != "ADD":
        return {"result": None}
    return {"result": previous if result is None else result.to_json(inputs[-1]["cniVersion"])}


def restore(request: dict[str, Any]) -> dict[str, Any]:
    """Put back rules and elements of living attachments, given as plugin inputs with their prevResult."""
    wanted: dict[tuple[str, bytes], nfnetlink.Element] = {}
    subnets: set[host_rules.Subnet] = set()
    for attachment in request["attachments"]:
        call = Call.from_environment(attachment["environment"])
        for value in attachment["inputs"]:
            found, needed = _host_rules_of(call, PluginConfig.from_object(value))
            wanted.update({(e.set_name, e.key): e for e in found})
            subnets |= needed
    return {"restored": host_rules.restore(list(wanted.values()), subnets)}


_REQUESTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"chain": chain, "restore": restore}


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


def _refuse(plugin: str, error: Exception, cni_version: str) -> dict[str, Any]:
    refused = refusal(plugin, error)
    trace = traceback.format_exc() if refused.code == INTERNAL else ""
    return {"error": refused.to_json(cni_version), "plugin": plugin, "trace": trace}
