"""The jobs that run CNI plugins. The server's zygote forks them.

    serve(arguments, fds)      a worker: runs pyrunc's plugins for requests on a socket until the
                               socket is closed
    execute(arguments, fds)    executes a plugin that is not pyrunc's
    install(arguments, fds)    writes pyrunc's plugins as executables, which other plugins may call

A worker serves many requests, because a new process for each request takes longer (measured: 6 ms
against 3 ms). One request runs consecutive plugins of a network. `protocol.worker` defines requests
and answers. They are sent as messages of pyrunc.ipc with an `id`.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cni_plugins.bridge import masquerade
from cni_plugins.bridge.plugin import PLUGIN as BRIDGE
from cni_plugins.host_local.plugin import PLUGIN as HOST_LOCAL
from cni_plugins.loopback.plugin import PLUGIN as LOOPBACK
from cni_plugins.net import host_rules, netns, nfnetlink, rtnetlink
from cni_plugins.net.pod import shared_pod
from cni_plugins.portmap.plugin import PLUGIN as PORTMAP
from cni_plugins.portmap.plugin import derive as derive_ports
from cni_plugins.protocol import version
from cni_plugins.protocol.addresses import Network
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import INTERNAL
from cni_plugins.protocol.result import Result
from cni_plugins.protocol.worker import (
    Answer,
    Chain,
    ExecutePlugin,
    InstallPlugins,
    PluginError,
    Restore,
)
from cni_plugins.skel import perform, to_cni_error
from pyrunc import ipc
from pyrunc.errors import Error, InvalidArgument
from pyrunc.kernel import reaper
from pyrunc.kernel.fd import close_all

LARGE_MODULE = "pyroute2"  # a worker that has imported it has grown by 20 MiB, see `net.inventory`
PLUGINS = {plugin.name: plugin for plugin in (BRIDGE, HOST_LOCAL, LOOPBACK, PORTMAP)}


def serve(arguments: Mapping[str, Any], fds: Sequence[int]) -> int:
    """Answer requests on the SOCK_SEQPACKET socket `fds[0]` until it is closed, and return the exit
    code. Returns 1 if a failed setns(2) has left this process in a pod's network namespace."""
    reaper.set_name("pyrunc-cni")
    initial_netns = netns.current_id()
    for part in (netns, nfnetlink.filter_socket, rtnetlink.host_socket):
        part.keep_open()
    with socket.socket(fileno=fds[0]) as link:
        while (received := ipc.receive(link)) is not None:
            request, stray = received
            close_all(stray)
            try:
                reply = answer(request)
            except Error as error:
                ipc.send(link, {"id": request["id"], "error": error.to_fields()})
            else:
                # If pyroute2 was imported (for CHECK, GC or UDP flows), the process has grown and
                # should be replaced.
                ipc.send(
                    link,
                    {
                        "id": request["id"],
                        "ok": reply.replace(last=LARGE_MODULE in sys.modules).to_fields(),
                    },
                )
            # If the setns(2) back to the host has failed, the worker is still in a pod's namespace.
            # Its next request would set up the host's side there.
            if netns.current_id() != initial_netns:
                return 1
    return 0


def execute(arguments: Mapping[str, Any], fds: Sequence[int]) -> int:
    """Execute a plugin that is not pyrunc's. `arguments`: an `ExecutePlugin`, which has all
    environment variables of the plugin. Returns exit code 127 if execve(2) fails."""
    request = ExecutePlugin.of(arguments)
    os.chdir("/")
    program = request.program
    try:
        os.execve(program, [program], request.environment)
    except OSError as error:
        print(f"cannot execute {program}: {error.strerror}", file=sys.stderr)
    return 127


def install(arguments: Mapping[str, Any], fds: Sequence[int]) -> int:
    """Write pyrunc's plugins as executables into a folder. The arguments are an `InstallPlugins`.
    Returns the exit code."""
    from cni_plugins.install import install as write

    try:
        write(InstallPlugins.of(arguments).folder)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def answer(request: Mapping[str, Any]) -> Answer:
    """Carry out a worker's request, a `Chain` or a `Restore`, and return the answer. An exception
    of a plugin becomes the answer's `error`. Raises InvalidArgument for any other request."""
    name = request.get("call")
    if name not in (Chain.call, Restore.call):
        raise InvalidArgument(f"unknown call {name!r} to a CNI worker")
    parsed = Chain.of(request) if name == Chain.call else Restore.of(request)
    try:
        return chain(parsed) if isinstance(parsed, Chain) else restore(parsed)
    except Exception as error:
        return _error_answer(parsed.call, error, version.LATEST)


def chain(request: Chain) -> Answer:
    """Run plugins in order, passing each result to the next plugin. The answer to ADD has the last
    plugin's result."""
    call = CniCall.from_environment(request.environment)
    # Only ADD is sure to have the namespace: DEL must also work after it is gone (spec, "DEL").
    if call.command != "ADD":
        return _run_plugins(call, request.inputs, None)
    with shared_pod(call.netns) as pod:
        if request.loopback:
            pod.bring_loopback_up()
        reply = _run_plugins(call, request.inputs, request.previous)
        # The chain may hold no plugin that sends requests into the pod; `lo` must be up all the
        # same.
        pod.send_pending()
    return reply


def _run_plugins(
    call: CniCall, inputs: Sequence[dict[str, Any]], previous: dict[str, Any] | None
) -> Answer:
    """Run plugins in order, passing each result to the next plugin as a Python object. Stops at the
    first error and returns it in the answer."""
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
            return _error_answer(plugin.name, error, value["cniVersion"])
    if call.command != "ADD":
        return Answer()
    return Answer(previous if result is None else result.to_json(inputs[-1]["cniVersion"]))


def restore(request: Restore) -> Answer:
    """Restore the nftables rules and elements that attachments need. The answer has the number of
    elements that were missing. Each plugin input must contain prevResult."""
    expected: dict[tuple[str, bytes], nfnetlink.Element] = {}
    subnets: set[Network] = set()
    for attachment in request.attachments:
        call = CniCall.from_environment(attachment.environment)
        for value in attachment.inputs:
            attachment_elements, attachment_subnets = _host_rules_of(
                call, PluginConfig.from_object(value)
            )
            expected.update({(e.set_name, e.key): e for e in attachment_elements})
            subnets |= attachment_subnets
    return Answer(restored=host_rules.restore(list(expected.values()), subnets))


def _host_rules_of(
    call: CniCall, config: PluginConfig
) -> tuple[list[nfnetlink.Element], set[Network]]:
    previous = config.previous_result() or Result()
    if config.kind == "portmap":
        rules = derive_ports(call, config, previous)
        return list(rules.elements), set(rules.subnets)
    if config.kind == "bridge":
        return masquerade.expected(call, config, previous)
    return [], set()


def _error_answer(plugin: str, error: Exception, cni_version: str) -> Answer:
    cni_error = to_cni_error(plugin, error)
    trace = traceback.format_exc() if cni_error.code == INTERNAL else ""
    return Answer(error=PluginError(plugin, cni_error.to_json(cni_version), trace))
