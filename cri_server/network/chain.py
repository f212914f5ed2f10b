"""Runs a network's plugins in order. pyrunc's own plugins run in worker processes: one request to a
worker runs several consecutive plugins. An executable in `bin_dir` takes precedence over pyrunc's
plugin of the same name.

A foreign plugin may execute other plugins in CNI_PATH (flannel executes `bridge` and `host-local`).
The last folder of CNI_PATH holds pyrunc's plugins as executables; they are written before the first
foreign plugin runs.

Results and errors of plugins are parsed and checked by `cni_plugins.protocol`, because they may
come from foreign programs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from cni_plugins.protocol import version
from cni_plugins.protocol.builtin import HEAD_BYTES, MODULES, is_builtin_script
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import LIMIT_BYTES, NetworkList, decode_object, plugin_input
from cni_plugins.protocol.errors import (
    IMPOSSIBLE,
    INVALID_ENVIRONMENT,
    NO_ADDRESS_LEFT,
    TAKEN,
    CniError,
    from_json,
)
from cni_plugins.protocol.result import Result
from cni_plugins.protocol.worker import (
    Answer,
    Chain,
    ExecutePlugin,
    InstallPlugins,
    Restore,
    RestoredAttachment,
)
from cri_server.network.attachments import Attachment
from cri_server.observability.timeline.trace import span
from cri_server.zygote import workers
from cri_server.zygote.client import JobResult, Zygote
from pyrunc.errors import (
    Error,
    InvalidArgument,
    PeerError,
    ResourceExhausted,
    Unavailable,
    WrongState,
)
from pyrunc.kernel.fd import close_all

log = logging.getLogger(__name__)

IFNAME = "eth0"
# The kernel changes links under one lock (rtnl), so more workers than four do not help. Measured on
# two processors, attaching + detaching pods all at once: 30 pods 667 + 242 ms with a worker per
# request, 92 + 34 ms with four, 125 + 57 ms with one; 10 pods 64 + 65, 31 + 12, 41 + 18 ms.
_WORKERS = 4
# Plugins run iptables, ip and modprobe by PATH, and the server's own PATH may lack sbin.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MESSAGE_LIMIT = 500
# One byte more than is valid, to tell an answer that was cut off.
_OUTPUT_LIMIT_BYTES = LIMIT_BYTES + 1
_REFUSALS: dict[int, type[Error]] = {
    NO_ADDRESS_LEFT: ResourceExhausted,
    TAKEN: WrongState,
    IMPOSSIBLE: InvalidArgument,
}
"""CNI error code that only pyrunc's plugins use -> error that the server raises."""
_HOUSEKEEPING_TIMEOUT_S = 30.0
"""The time limit of GC, of restoring rules and of writing pyrunc's plugins. Pods wait meanwhile to
be attached. Ten seconds were too short for the first pods of an emulated node."""


@dataclass(frozen=True, slots=True)
class _PluginStep:
    """One plugin to run. `program`: the path of its executable, "" for a plugin of pyrunc's own.
    `input`: the configuration that it gets."""

    kind: str
    program: str
    input: dict[str, Any]


@dataclass(slots=True)
class AddProgress:
    """The progress of an ADD. `begun`: the number of the network's plugins that have been
    started."""

    begun: int = 0


class PluginRunner:
    """Runs the CNI plugins of one server.

    - `bin_dirs`: folders of executables, searched in order. The caller may assign other folders,
      for later calls.
    - `own_dir`: the folder to which pyrunc's plugins are written as executables.
    - `scope`: a name of this server. pyrunc's plugins store it with each pod, so that GC spares the
      pods of other servers on the same network.
    """

    def __init__(
        self, jobs: Zygote, bin_dirs: tuple[str, ...], own_dir: str, timeout_s: float, scope: str
    ) -> None:
        self.bin_dirs = bin_dirs
        self._jobs, self._own_dir = jobs, own_dir
        self._timeout_s, self._scope = timeout_s, scope
        self._installing, self._installed = asyncio.Lock(), False
        self._workers = workers.Workers(jobs, "cni_plugins.jobs:serve", "a CNI worker", _WORKERS)

    def close(self) -> None:
        """Close the connections to idle workers, which then end."""
        self._workers.close()

    @property
    def folders(self) -> str:
        """The folders that are searched for executables: CNI_PATH without the folder of pyrunc's
        own plugins."""
        return ":".join(self.bin_dirs)

    def missing(self, network: NetworkList) -> list[str]:
        """Return the plugins of `network` that are neither executables nor among pyrunc's own. An
        IPAM plugin is checked too if the plugin that calls it is one of pyrunc's own."""
        kinds = []
        for plugin in network.plugins:
            kinds.append(str(plugin["type"]))
            ipam = plugin.get("ipam")
            if isinstance(ipam, dict) and ipam.get("type") and self.is_builtin(kinds[-1]):
                kinds.append(str(ipam["type"]))
        return [kind for kind in kinds if kind not in MODULES and not self._program(kind)]

    def is_builtin(self, kind: str) -> bool:
        """Return whether the plugin `kind` is one of pyrunc's own, and no other executable
        overrides it."""
        return kind in MODULES and not self._program(kind)

    def runs_only_builtin(self, network: NetworkList) -> bool:
        """Return whether all plugins of `network`, with their IPAM plugins, are pyrunc's own."""
        kinds = {str(plugin["type"]) for plugin in network.plugins}
        ipams = (plugin.get("ipam") for plugin in network.plugins)
        kinds |= {
            str(ipam["type"]) for ipam in ipams if isinstance(ipam, dict) and ipam.get("type")
        }
        return all(map(self.is_builtin, kinds))

    async def add(self, attachment: Attachment, progress: AddProgress) -> Result:
        """Set loopback up, and run ADD of every plugin in order; return the last plugin's result.
        `progress` is updated as plugins are started.

        Raises PeerError (a plugin failed, is missing or gave an invalid answer), DeadlineExceeded.
        pyrunc's own plugins also raise ResourceExhausted (no address left), WrongState (another pod
        has the host port) and InvalidArgument (an impossible request).
        """
        call = self._call("ADD", attachment, attachment.netns_path)
        steps = self._steps(attachment, None)
        result: Result | None = None
        # containerd executes a plugin for `lo`. Here the first request also sets `lo` up, with one
        # more message to the kernel.
        loopback = True
        for builtin, group in _groups(steps):
            if builtin or loopback:
                if builtin:
                    self._require(group)
                    progress.begun += len(group)
                result = (
                    await self._run_builtin(
                        call,
                        group if builtin else [],
                        attachment.network,
                        previous=result,
                        loopback=loopback,
                    )
                    or result
                )
                loopback = False
            for step in () if builtin else group:
                # Counted before it runs: a plugin that fails may have left something, so it gets
                # DEL as well.
                progress.begun += 1
                result = await self._add_foreign(call, step, result, attachment.network)
        if result is None:
            raise PeerError(f"the plugins of network {attachment.network.name} gave no result")
        return result

    async def delete(self, attachment: Attachment, netns_path: str) -> None:
        """Run DEL of every plugin that ADD has started, in reverse order, with the result of the
        whole chain as prevResult. Raises the first error; the remaining plugins do not run then."""
        call = self._call("DEL", attachment, netns_path)
        # The first error ends the command: the record stays, and kubelet's next StopPodSandbox runs
        # all DELs again. A plugin must succeed when it is called twice (spec, "DEL").
        await self._run_steps(call, self._delete_steps(attachment), attachment.network)

    async def delete_each(self, attachment: Attachment, netns_path: str) -> list[Error]:
        """Run DEL like `delete`, but go on after a plugin that fails or no longer exists; return
        the errors."""
        call = self._call("DEL", attachment, netns_path)
        errors: list[Error] = []
        for step in self._delete_steps(attachment):
            try:
                await self._run_steps(call, [step], attachment.network)
            except Error as error:
                errors.append(error)
        return errors

    def _delete_steps(self, attachment: Attachment) -> list[_PluginStep]:
        # Before 0.4.0 DEL has no prevResult.
        has_previous = version.at_least(attachment.network.cni_version, "0.4.0")
        steps = self._steps(attachment, attachment.result if has_previous else None)
        # The argument tells pyrunc's bridge plugin not to wait until the veth pair is removed. The
        # kernel removes it when the network namespace is closed after DEL.
        return [
            step if step.program else _with_argument(step, "teardown", "background")
            for step in reversed(steps[: attachment.begun])
        ]

    async def status(
        self, network: NetworkList, capabilities: Mapping[str, Any], timeout_s: float
    ) -> None:
        """Run STATUS of every plugin, if the network's cniVersion is 1.1.0 or later. Raises
        PeerError if a plugin is not ready.

        `capabilities`: the result of `node_capabilities`. Plugins may take their address ranges
        from the capability ipRanges.
        """
        if version.at_least(network.cni_version, "1.1.0"):
            await self._for_network("STATUS", network, None, timeout_s, capabilities)

    async def collect(self, network: NetworkList, attachments: list[Attachment]) -> None:
        """Run GC of the network's plugins. Each plugin removes what it has stored for pods that are
        not in `attachments`.

        pyrunc's own plugins always run, foreign ones only if the network's cniVersion is 1.1.0 or
        later. Does nothing for a network with disableGC.
        """
        if not network.disable_gc:
            valid = [{"containerID": a.sandbox_id, "ifname": IFNAME} for a in attachments]
            await self._for_network("GC", network, valid, _HOUSEKEEPING_TIMEOUT_S)

    async def restore(self, attachments: list[Attachment]) -> int:
        """Restore the nftables rules that pyrunc's plugins made for `attachments`, in case another
        program has removed the rules. Return how many elements of nftables maps were missing."""
        living = []
        for attachment in attachments:
            if attachment.result is not None:
                steps = [s for s in self._steps(attachment, attachment.result) if not s.program]
                call = self._call("ADD", attachment, attachment.netns_path)
                living.append(RestoredAttachment(call.environment(), [s.input for s in steps]))
        if not any(each.inputs for each in living):
            return 0
        return (await self._ask(Restore(living), "restore", _HOUSEKEEPING_TIMEOUT_S)).restored

    async def _for_network(
        self,
        command: str,
        network: NetworkList,
        valid: list[dict[str, str]] | None,
        timeout_s: float,
        capabilities: Mapping[str, Any] | None = None,
    ) -> None:
        call = CniCall(command=command, path=(*self.bin_dirs, self._own_dir))
        newest = version.at_least(network.cni_version, "1.1.0")
        for plugin in network.plugins:
            value = plugin_input(
                network, plugin, capabilities=capabilities, valid_attachments=valid
            )
            step = self._step(plugin, value)
            if not step.program:
                # pyrunc's plugins refuse GC and STATUS with a cniVersion before 1.1.0, which lacks
                # them. But leftovers must be removed with any cniVersion.
                step.input["cniVersion"] = version.LATEST
            if newest or not step.program:
                await self._run_steps(call, [step], network, timeout_s)

    def _call(self, command: str, attachment: Attachment, netns_path: str) -> CniCall:
        return CniCall(
            command=command,
            container_id=attachment.sandbox_id,
            netns=netns_path,
            ifname=IFNAME,
            arguments=attachment.arguments,
            path=(*self.bin_dirs, self._own_dir),
        )

    def _steps(self, attachment: Attachment, previous: Result | None) -> list[_PluginStep]:
        network, capabilities = attachment.network, attachment.capabilities
        return [
            self._step(
                plugin, plugin_input(network, plugin, capabilities=capabilities, previous=previous)
            )
            for plugin in network.plugins
        ]

    def _step(self, plugin: dict[str, Any], value: dict[str, Any]) -> _PluginStep:
        """Return the step that runs `plugin` with the input `value`. For pyrunc's own plugins the
        input also gets this server's name (`scope`), so that GC does not touch the pods of other
        servers on the same network."""
        kind = str(plugin["type"])
        step = _PluginStep(kind, self._program(kind), value)
        return step if step.program else _with_argument(step, "scope", self._scope)

    def _program(self, kind: str) -> str:
        """Return the path of the executable of the plugin `kind`; "" if pyrunc's own plugin is to
        run, or if there is no such plugin."""
        for folder in self.bin_dirs:
            path = os.path.join(folder, kind)
            if os.path.isfile(path) and os.access(path, os.X_OK):
                return "" if kind in MODULES and _is_builtin_file(path) else path
        return ""

    async def _run_steps(
        self,
        call: CniCall,
        steps: list[_PluginStep],
        network: NetworkList,
        timeout_s: float | None = None,
    ) -> None:
        """Run the plugins of `steps` in order with a command that has no result: DEL, GC or STATUS.
        Raises the first error."""
        for builtin, group in _groups(steps):
            if builtin:
                await self._run_builtin(call, group, network, timeout_s=timeout_s)
            for step in () if builtin else group:
                await self._run_foreign(call, step, timeout_s)

    async def _run_builtin(
        self,
        call: CniCall,
        steps: list[_PluginStep],
        network: NetworkList,
        *,
        previous: Result | None = None,
        loopback: bool = False,
        timeout_s: float | None = None,
    ) -> Result | None:
        """Run `steps`, all of them pyrunc's own plugins, with one request to a network worker.
        Return the last plugin's result for ADD, None for other commands. `loopback`: set the
        interface lo up first."""
        self._require(steps)
        request = Chain(
            environment=_environment(call),
            inputs=[step.input for step in steps],
            loopback=loopback,
            previous=None if previous is None else previous.to_json(network.cni_version),
        )
        names = "+".join(step.kind for step in steps) or "loopback"
        with span(f"plugin {names}"):
            reply = await self._ask(
                request, call.command, self._timeout_s if timeout_s is None else timeout_s
            )
        return None if reply.result is None else _parse_result(reply.result, names, network)

    def _require(self, steps: list[_PluginStep]) -> None:
        """Raise PeerError if a plugin of `steps` does not exist: it has no executable, and is not
        one of pyrunc's own. The error names the first such plugin."""
        unknown = [step.kind for step in steps if step.kind not in MODULES]
        if unknown:
            raise PeerError(f"CNI plugin {unknown[0]!r} is not in {self.folders}")

    async def _ask(self, request: Chain | Restore, command: str, timeout_s: float) -> Answer:
        """Send a request to a worker; return its reply. Raises the error that a plugin reports,
        DeadlineExceeded, PeerError when the worker dies before it replies."""
        try:
            answer, fds = await self._workers.ask(request, timeout_s)
        except Unavailable as dead:
            raise PeerError(dead.message) from None
        # No reply has descriptors; a malformed one must not leave any open in the server.
        close_all(fds)
        reply = Answer.of(answer, PeerError)
        if reply.error is not None:
            error = _to_error(reply.error.plugin, command, from_json(reply.error.error))
            if reply.error.trace:
                error.add_note(reply.error.trace)
            raise error
        return reply

    async def _add_foreign(
        self, call: CniCall, step: _PluginStep, previous: Result | None, network: NetworkList
    ) -> Result:
        value = dict(step.input)
        if previous is not None:
            value["prevResult"] = previous.to_json(network.cni_version)
        result = await self._run_foreign(call, replace(step, input=value))
        reply = _decode(result, step.kind, "ADD")
        # A plugin may print an error and still exit with 0.
        if "code" in reply and "msg" in reply:
            raise _to_error(step.kind, "ADD", from_json(reply))
        return _parse_result(reply, step.kind, network)

    async def _run_foreign(
        self, call: CniCall, step: _PluginStep, timeout_s: float | None = None
    ) -> JobResult:
        """Run the executable of a plugin; return its exit code and output. Raises the error that a
        failed plugin prints, or PeerError. A successful plugin's output is not parsed, because only
        ADD must print a result."""
        # ADD has checked this for the whole chain; DEL and CHECK may come after a plugin was
        # removed.
        if not step.program:
            raise PeerError(f"CNI plugin {step.kind!r} is not in {self.folders}")
        environment = {"PATH": _PATH, **_environment(call)}
        await self._install_builtin()
        with span(f"plugin {step.kind}"):
            result = await self._jobs.run(
                "cni_plugins.jobs:execute",
                ExecutePlugin(step.program, environment),
                timeout_s=self._timeout_s if timeout_s is None else timeout_s,
                stdin=json.dumps(step.input).encode(),
                output_limit_bytes=_OUTPUT_LIMIT_BYTES,
            )
        # Many plugins log to stderr, also the pod's annotations, so this is at debug level.
        if output := _one_line(result.stderr):
            log.debug(
                "CNI plugin %s, %s %s: %s", step.kind, call.command, call.container_id, output
            )
        if result.exit_code != 0:
            try:
                error = from_json(decode_object(result.stdout, "its answer"))
            except CniError:
                words = _one_line(result.stderr) or _one_line(result.stdout) or "no output"
                raise PeerError(
                    f"CNI plugin {step.kind} failed {call.command} with exit code"
                    f" {result.exit_code}: {words}"
                ) from None
            raise _to_error(step.kind, call.command, error)
        return result

    async def _install_builtin(self) -> None:
        """Write pyrunc's plugins as executables to `own_dir`. Each run of the server replaces
        existing files once: they may import the code of another version. Raises PeerError."""
        async with self._installing:
            if self._installed:
                return
            result = await self._jobs.run(
                "cni_plugins.jobs:install",
                InstallPlugins(self._own_dir),
                timeout_s=_HOUSEKEEPING_TIMEOUT_S,
            )
            if result.exit_code != 0:
                raise PeerError(
                    f"cannot write plugins into {self._own_dir}: {_one_line(result.stderr)}"
                )
            self._installed = True


def _groups(steps: list[_PluginStep]) -> Iterator[tuple[bool, list[_PluginStep]]]:
    """Split `steps` into groups of consecutive plugins: a group has only pyrunc's plugins or only
    foreign ones. Yield (builtin, steps) for each group; `builtin`: its plugins are pyrunc's."""
    for builtin, group in groupby(steps, key=lambda step: not step.program):
        yield builtin, list(group)


def _with_argument(step: _PluginStep, name: str, value: str) -> _PluginStep:
    """Return `step` with the argument `name` added to `args.cni` of its input, where pyrunc's own
    plugins read it."""
    arguments = _as_object(step.input.get("args"))
    inner = {**_as_object(arguments.get("cni")), name: value}
    return replace(step, input={**step.input, "args": {**arguments, "cni": inner}})


def _as_object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _environment(call: CniCall) -> dict[str, str]:
    try:
        return call.environment()
    except CniError as error:
        assert error.code == INVALID_ENVIRONMENT
        raise InvalidArgument(error.message) from None


def _decode(result: JobResult, names: str, command: str) -> dict[str, Any]:
    if len(result.stdout) > LIMIT_BYTES:
        raise PeerError(f"CNI plugin {names} answered {command} with more than {LIMIT_BYTES} bytes")
    try:
        return decode_object(result.stdout, "the answer")
    except CniError as error:
        words = _one_line(result.stderr)
        raise PeerError(
            f"CNI plugin {names}, {command}: {error.message}" + (f" ({words})" if words else "")
        ) from None


def _parse_result(value: object, names: str, network: NetworkList) -> Result:
    try:
        return Result.from_json(value, default_version=network.cni_version)
    except CniError as error:
        raise PeerError(f"CNI plugin {names} gave a bad result: {error.message}") from None


def _to_error(kind: str, command: str, error: CniError) -> Error:
    words = error.message if error.message.startswith(f"{kind}:") else f"{kind}: {error.message}"
    text = f"CNI {command} failed in {words}" + (f" ({error.details})" if error.details else "")
    return _REFUSALS.get(error.code, PeerError)(text)


def _one_line(output: bytes) -> str:
    return " ".join(output[: 1 << 16].decode("utf-8", "replace").split())[:_MESSAGE_LIMIT]


def _is_builtin_file(path: str) -> bool:
    with open(path, "rb", buffering=0) as file:
        return is_builtin_script(file.read(HEAD_BYTES) or b"")
