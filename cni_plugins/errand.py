"""Our plugins in forks of the server's zygote: workers that serve request after request, and
foreign executables.

    serve(arguments, fds)      a worker: answers requests on a socket until that is closed
    execute(arguments, fds)    become a foreign plugin's executable
    install(arguments, fds)    write ours as executables, for foreign ones that delegate to them

A worker is a fork that stays: forking anew and touching copied pages costs more than a plugin's
work (measured: 6 ms for a new fork, 3 for a worker that has done it before). Consecutive plugins of
a chain are one request. Requests and answers are the records of `protocol.worker`, in messages of
pyrunc.ipc with an `id`.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

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
from cni_plugins.protocol.worker import Answer, Chain, Execute, Install, Refused, Restore
from cni_plugins.skel import perform, refusal
from pyrunc import ipc
from pyrunc.errors import Error, InvalidArgument
from pyrunc.kernel import reaper

LARGE = "pyroute2"  # 20 MiB, see `net.inventory`
Asked = TypeVar("Asked", Chain, Restore)
PLUGINS = {plugin.name: plugin for plugin in (BRIDGE, HOST_LOCAL, LOOPBACK, PORTMAP)}


def serve(arguments: Mapping[str, Any], fds: Sequence[int]) -> int:
    """Answer requests on the packet socket `fds[0]`; ends with it, or when it finds itself in
    another namespace."""
    reaper.set_name("pyrunc-cni")
    home = netns.identity()
    for part in (netns, nfnetlink, rtnetlink):
        part.keep_open()
    with socket.socket(fileno=fds[0]) as link:
        while (received := ipc.receive(link)) is not None:
            request, stray = received
            ipc.close_all(stray)
            try:
                answered = answer(request)
            except Error as error:
                ipc.send(link, {"id": request["id"], "error": error.to_wire()})
            else:
                # It came with CHECK, GC or the flows of a UDP port: the process has grown.
                ipc.send(
                    link,
                    {
                        "id": request["id"],
                        "ok": answered.replace(last=LARGE in sys.modules).to_fields(),
                    },
                )
            if netns.identity() != home:
                return 1
    return 0


def execute(arguments: Mapping[str, Any], fds: Sequence[int]) -> int:
    """Become the program of an `Execute`, with exactly its environment."""
    asked = Execute.of(arguments)
    os.chdir("/")
    program = asked.program
    try:
        os.execve(program, [program], asked.environment)
    except OSError as error:
        print(f"cannot execute {program}: {error.strerror}", file=sys.stderr)
    return 127


def install(arguments: Mapping[str, Any], fds: Sequence[int]) -> int:
    """Write our plugins into the folder of an `Install`."""
    from cni_plugins.install import install as write

    try:
        write(Install.of(arguments).folder)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def answer(request: Mapping[str, Any]) -> Answer:
    """The answer to one request; every exception of a plugin becomes a refusal. Raises
    InvalidArgument for what is no request."""
    name = request.get("call")
    if name == Chain.call:
        return _answered(chain, Chain.of(request))
    if name == Restore.call:
        return _answered(restore, Restore.of(request))
    raise InvalidArgument(f"a CNI worker has no call {name!r}")


def _answered(verb: Callable[[Asked], Answer], asked: Asked) -> Answer:
    try:
        return verb(asked)
    except Exception as error:
        return _refuse(asked.call, error, version.LATEST)


def chain(asked: Chain) -> Answer:
    """Run plugins in their order, each with the result of the one before; the last result of an
    ADD."""
    call = Call.from_environment(asked.environment)
    if call.command != "ADD":
        return _in_turn(call, asked.inputs, None)
    with sharing(call.netns) as pod:
        if asked.loopback:
            pod.bring_loopback_up()
        answered = _in_turn(call, asked.inputs, asked.previous)
        pod.settle()
    return answered


def _in_turn(
    call: Call, inputs: Sequence[dict[str, Any]], previous: dict[str, Any] | None
) -> Answer:
    """Run one plugin after the other; results are handed on as they are, without a detour through
    JSON."""
    result: Result | None = None
    for value in inputs:
        plugin = PLUGINS[value["type"]]
        if result is None and previous is not None:
            value["prevResult"] = previous
        try:
            result = (
                perform(plugin, call, replace(PluginConfig.from_object(value), previous=result))
                or result
            )
        except Exception as error:
            return _refuse(plugin.name, error, value["cniVersion"])
    if call.command != "ADD":
        return Answer()
    return Answer(previous if result is None else result.to_json(inputs[-1]["cniVersion"]))


def restore(asked: Restore) -> Answer:
    """Put back rules and elements of living attachments, given as plugin inputs with their
    prevResult."""
    wanted: dict[tuple[str, bytes], nfnetlink.Element] = {}
    subnets: set[host_rules.Subnet] = set()
    for attachment in asked.attachments:
        call = Call.from_environment(attachment.environment)
        for value in attachment.inputs:
            found, needed = _host_rules_of(call, PluginConfig.from_object(value))
            wanted.update({(e.set_name, e.key): e for e in found})
            subnets |= needed
    return Answer(restored=host_rules.restore(list(wanted.values()), subnets))


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


def _refuse(plugin: str, error: Exception, cni_version: str) -> Answer:
    refused = refusal(plugin, error)
    trace = traceback.format_exc() if refused.code == INTERNAL else ""
    return Answer(refused=Refused(plugin, refused.to_json(cni_version), trace))
