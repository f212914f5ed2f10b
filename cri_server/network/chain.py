"""Runs a network's plugins in order: ours in workers, several in one request; an executable of
`bin_dir` wins.

A foreign plugin may delegate to others (flannel to `bridge` and `host-local`), which it looks for
in CNI_PATH: the last folder there has ours as executables, written before the first foreign plugin
runs.

Everything that comes back is judged by `cni_plugins.protocol`: a plugin's answer is another
program's output.
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
from cni_plugins.protocol.builtin import HEAD_BYTES, MODULES, is_ours
from cni_plugins.protocol.call import Call
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
from cni_plugins.protocol.worker import Answer, Chain, Execute, Install, Living, Restore
from cri_server.network.attachments import Attachment
from cri_server.network.workers import Workers
from cri_server.observability.timeline.trace import span
from cri_server.zygote.client import JobResult, Zygote
from pyrunc.errors import Error, InvalidArgument, PeerError, ResourceExhausted, WrongState

log = logging.getLogger(__name__)

IFNAME = "eth0"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_WORDS_LIMIT = 500
_OUTPUT_LIMIT_BYTES = LIMIT_BYTES + 1
_REFUSALS: dict[int, type[Error]] = {
    NO_ADDRESS_LEFT: ResourceExhausted,
    TAKEN: WrongState,
    IMPOSSIBLE: InvalidArgument,
}
"""What codes that only our plugins use mean to the caller."""
_HOUSEKEEPING_TIMEOUT_S = 30.0
"""For what runs while no pod can be attached; an emulated node with its first pods took more than
ten seconds."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One plugin's run; `program` is empty for one of ours."""

    kind: str
    program: str
    input: dict[str, Any]


@dataclass(slots=True)
class Progress:
    """How far an ADD has come: for how many of the network's plugins it was begun."""

    begun: int = 0


class PluginRunner:
    """Runs plugins for one server. `bin_dirs` are searched in order; `own_dir` is for executables
    of ours, made here; `scope` is a word that is this server's alone.
    """

    def __init__(
        self, errands: Zygote, bin_dirs: tuple[str, ...], own_dir: str, timeout_s: float, scope: str
    ) -> None:
        self._errands = errands
        self._bin_dirs = bin_dirs
        self._timeout_s = timeout_s
        self._scope = scope
        self._own_dir = own_dir
        self._path: tuple[str, ...] = (*bin_dirs, own_dir)
        self._installing, self._installed = asyncio.Lock(), False
        self._workers = Workers(errands)

    def replace_folders(self, bin_dirs: tuple[str, ...]) -> None:
        """Where plugins are searched from now on."""
        self._path = (*bin_dirs, self._own_dir)

    def close(self) -> None:
        self._workers.close()

    @property
    def folders(self) -> str:
        """Where executables are searched, as CNI_PATH has them."""
        return ":".join(self._bin_dirs)

    def missing(self, network: NetworkList) -> list[str]:
        """The plugins of `network` that there is no program for, and the address plugins of
        ours."""
        kinds = []
        for plugin in network.plugins:
            kinds.append(str(plugin["type"]))
            ipam = plugin.get("ipam")
            if isinstance(ipam, dict) and ipam.get("type") and self.runs_ours(kinds[-1]):
                kinds.append(str(ipam["type"]))
        return [kind for kind in kinds if kind not in MODULES and not self._program(kind)]

    def runs_ours(self, kind: str) -> bool:
        return kind in MODULES and not self._program(kind)

    def runs_only_ours(self, network: NetworkList) -> bool:
        """Whether no foreign program takes part in `network`, neither as a plugin nor as a plugin's
        address plugin."""
        kinds = {str(plugin["type"]) for plugin in network.plugins}
        ipams = (plugin.get("ipam") for plugin in network.plugins)
        kinds |= {
            str(ipam["type"]) for ipam in ipams if isinstance(ipam, dict) and ipam.get("type")
        }
        return all(map(self.runs_ours, kinds))

    async def add(self, attachment: Attachment, progress: Progress) -> Result:
        """Loopback and ADD of every plugin. Raises PeerError, ResourceExhausted,
        DeadlineExceeded."""
        call = self._call("ADD", attachment, attachment.netns_path)
        steps = self._steps(attachment, None)
        result: Result | None = None
        loopback = True
        for ours, group in _groups(steps):
            if ours or loopback:
                if ours:
                    self._require(group)
                    progress.begun += len(group)
                result = (
                    await self._ours(
                        call, group if ours else [], result, attachment.network, loopback
                    )
                    or result
                )
                loopback = False
            for step in () if ours else group:
                progress.begun += 1
                result = await self._add_foreign(call, step, result, attachment.network)
        if result is None:
            raise PeerError(f"the plugins of network {attachment.network.name} gave no result")
        return result

    async def delete(self, attachment: Attachment, netns_path: str) -> None:
        """DEL in reverse of every plugin that ADD was begun for, each with the whole chain's
        result; the first refusal ends it."""
        call = self._call("DEL", attachment, netns_path)
        for ours, group in _groups(self._delete_steps(attachment)):
            if ours:
                await self._ours(call, group, None, attachment.network, loopback=False)
            for step in () if ours else group:
                await self._run_foreign(call, step)

    async def delete_what_can_be(self, attachment: Attachment, netns_path: str) -> list[Error]:
        """As `delete`, but a plugin that refuses, or is not there any more, does not keep the
        others; what they refused with."""
        call, refused = self._call("DEL", attachment, netns_path), list[Error]()
        for step in self._delete_steps(attachment):
            try:
                if step.program:
                    await self._run_foreign(call, step)
                else:
                    await self._ours(call, [step], None, attachment.network, loopback=False)
            except Error as error:
                refused.append(error)
        return refused

    def _delete_steps(self, attachment: Attachment) -> list[_Step]:
        begun = self._steps(attachment, _for_delete(attachment))[: attachment.begun]
        return [_in_background(step) for step in reversed(begun)]

    async def check(self, attachment: Attachment) -> None:
        """CHECK of every plugin, where the configuration wants it. Raises PeerError for the first
        damage."""
        network = attachment.network
        if (
            network.disable_check
            or not version.at_least(network.cni_version, "0.4.0")
            or attachment.result is None
        ):
            return
        call = self._call("CHECK", attachment, attachment.netns_path)
        for ours, group in _groups(self._steps(attachment, attachment.result)):
            if ours:
                await self._ours(call, group, None, network, loopback=False)
            for step in () if ours else group:
                await self._run_foreign(call, step)

    async def status(
        self, network: NetworkList, capabilities: Mapping[str, Any], timeout_s: float
    ) -> None:
        """STATUS of every plugin of a network of 1.1.0. Raises PeerError where one is not ready.

        capabilities: what does not depend on a pod; a plugin that takes its ranges from us is not
        ready without them.
        """
        if version.at_least(network.cni_version, "1.1.0"):
            await self._for_network("STATUS", network, None, timeout_s, capabilities)

    async def collect(self, network: NetworkList, attachments: list[Attachment]) -> None:
        """GC: of our plugins for every version, of foreign ones for networks of 1.1.0."""
        if not network.disable_gc:
            valid = [{"containerID": a.sandbox_id, "ifname": IFNAME} for a in attachments]
            await self._for_network("GC", network, valid, _HOUSEKEEPING_TIMEOUT_S)

    async def restore(self, attachments: list[Attachment]) -> int:
        """Put back host rules of our plugins that somebody removed; returns how many elements were
        missing."""
        wanted = []
        for attachment in attachments:
            if attachment.result is not None:
                steps = [s for s in self._steps(attachment, attachment.result) if not s.program]
                call = self._call("ADD", attachment, attachment.netns_path)
                wanted.append(Living(call.environment(), [s.input for s in steps]))
        if not any(living.inputs for living in wanted):
            return 0
        return (await self._ask(Restore(wanted), "restore", _HOUSEKEEPING_TIMEOUT_S)).restored

    async def _for_network(
        self,
        command: str,
        network: NetworkList,
        valid: list[dict[str, str]] | None,
        timeout_s: float,
        capabilities: Mapping[str, Any] | None = None,
    ) -> None:
        call = Call(command=command, path=self._path)
        newest = version.at_least(network.cni_version, "1.1.0")
        for plugin in network.plugins:
            value = plugin_input(
                network, plugin, capabilities=capabilities, valid_attachments=valid
            )
            step = self._step(plugin, value)
            if not step.program:
                step.input["cniVersion"] = version.LATEST
                await self._ours(call, [step], None, network, loopback=False, timeout_s=timeout_s)
            elif newest:
                await self._run_foreign(call, step, timeout_s)

    def _call(self, command: str, attachment: Attachment, netns_path: str) -> Call:
        return Call(
            command=command,
            container_id=attachment.sandbox_id,
            netns=netns_path,
            ifname=IFNAME,
            arguments=attachment.arguments,
            path=self._path,
        )

    def _steps(self, attachment: Attachment, previous: Result | None) -> list[_Step]:
        network, capabilities = attachment.network, attachment.capabilities
        return [
            self._step(
                plugin, plugin_input(network, plugin, capabilities=capabilities, previous=previous)
            )
            for plugin in network.plugins
        ]

    def _step(self, plugin: dict[str, Any], value: dict[str, Any]) -> _Step:
        """Ours learn who we are, so that the GC of another server on the same network leaves our
        pods alone."""
        kind = str(plugin["type"])
        step = _Step(kind, self._program(kind), value)
        return step if step.program else _with_argument(step, "scope", self._scope)

    def _program(self, kind: str) -> str:
        """The executable to run, or an empty string: ours is meant, or there is none."""
        for folder in self._bin_dirs:
            path = os.path.join(folder, kind)
            if os.path.isfile(path) and os.access(path, os.X_OK):
                return "" if kind in MODULES and _is_ours(path) else path
        return ""

    async def _ours(
        self,
        call: Call,
        steps: list[_Step],
        previous: Result | None,
        network: NetworkList,
        loopback: bool,
        timeout_s: float | None = None,
    ) -> Result | None:
        """Run consecutive plugins of ours in one request; the last result of an ADD."""
        self._require(steps)
        asked = Chain(
            environment=_environment(call),
            inputs=[step.input for step in steps],
            loopback=loopback,
            previous=None if previous is None else previous.to_json(network.cni_version),
        )
        names = "+".join(step.kind for step in steps) or "loopback"
        with span(f"plugin {names}"):
            answer = await self._ask(
                asked, call.command, self._timeout_s if timeout_s is None else timeout_s
            )
        return None if answer.result is None else _judge(answer.result, names, network)

    def _require(self, steps: list[_Step]) -> None:
        """Raises PeerError unless `steps`, which have no program, are plugins of ours."""
        unknown = [step.kind for step in steps if step.kind not in MODULES]
        if unknown:
            raise PeerError(f"there is no CNI plugin {unknown[0]!r} in {self.folders}")

    async def _ask(self, asked: Chain | Restore, command: str, timeout_s: float) -> Answer:
        """A worker's answer; raises what it refuses with."""
        answer = await self._workers.ask(asked, timeout_s)
        if answer.refused is not None:
            refused = _refused(answer.refused.plugin, command, from_json(answer.refused.error))
            if answer.refused.trace:
                refused.add_note(answer.refused.trace)
            raise refused
        return answer

    async def _add_foreign(
        self, call: Call, step: _Step, previous: Result | None, network: NetworkList
    ) -> Result:
        value = dict(step.input)
        if previous is not None:
            value["prevResult"] = previous.to_json(network.cni_version)
        done = await self._run_foreign(call, replace(step, input=value))
        answer = _decode(done, step.kind, "ADD")
        if "code" in answer and "msg" in answer:
            raise _refused(step.kind, "ADD", from_json(answer))
        return _judge(answer, step.kind, network)

    async def _run_foreign(
        self, call: Call, step: _Step, timeout_s: float | None = None
    ) -> JobResult:
        """Run an executable; raises its refusal. DEL and the others may print nothing."""
        if not step.program:
            raise PeerError(f"there is no CNI plugin {step.kind!r} in {self.folders}")
        environment = {"PATH": _PATH, **_environment(call)}
        await self._install_ours()
        with span(f"plugin {step.kind}"):
            done = await self._errands.run(
                "cni_plugins.errand:execute",
                Execute(step.program, environment),
                timeout_s=self._timeout_s if timeout_s is None else timeout_s,
                stdin=json.dumps(step.input).encode(),
                output_limit_bytes=_OUTPUT_LIMIT_BYTES,
            )
        if said := _words(
            done.stderr
        ):  # where many plugins log to, and what they say may be about the pod's annotations
            log.debug("CNI plugin %s, %s %s: %s", step.kind, call.command, call.container_id, said)
        if done.exit_code != 0:
            try:
                refused = from_json(decode_object(done.stdout, "its answer"))
            except CniError:
                words = _words(done.stderr) or _words(done.stdout) or "it said nothing"
                raise PeerError(
                    f"CNI plugin {step.kind} ended {call.command} with {done.exit_code}: {words}"
                ) from None
            raise _refused(step.kind, call.command, refused)
        return done

    async def _install_ours(self) -> None:
        """Once per server: another version may have left executables that lead to its own code.
        Raises PeerError."""
        async with self._installing:
            if self._installed:
                return
            done = await self._errands.run(
                "cni_plugins.errand:install",
                Install(self._own_dir),
                timeout_s=_HOUSEKEEPING_TIMEOUT_S,
            )
            if done.exit_code != 0:
                raise PeerError(f"cannot write plugins into {self._own_dir}: {_words(done.stderr)}")
            self._installed = True


def _groups(steps: list[_Step]) -> Iterator[tuple[bool, list[_Step]]]:
    """Runs of plugins that are all ours or all foreign."""
    for ours, group in groupby(steps, key=lambda step: not step.program):
        yield ours, list(group)


def _with_argument(step: _Step, name: str, value: str) -> _Step:
    """`step` with an argument in `args.cni` that our own plugins understand."""
    given = step.input.get("args")
    inner = given.get("cni") if isinstance(given, dict) else None
    arguments = {
        **(given if isinstance(given, dict) else {}),
        "cni": {**(inner if isinstance(inner, dict) else {}), name: value},
    }
    return replace(step, input={**step.input, "args": arguments})


def _in_background(step: _Step) -> _Step:
    """Tell our bridge that the namespace is closed next: the kernel removes the veth then, nobody
    need wait for it."""
    return step if step.program else _with_argument(step, "teardown", "background")


def _for_delete(attachment: Attachment) -> Result | None:
    """DEL gets the result since 0.4.0."""
    return attachment.result if version.at_least(attachment.network.cni_version, "0.4.0") else None


def _environment(call: Call) -> dict[str, str]:
    try:
        return call.environment()
    except CniError as error:
        assert error.code == INVALID_ENVIRONMENT
        raise InvalidArgument(error.message) from None


def _decode(done: JobResult, names: str, command: str) -> dict[str, Any]:
    if len(done.stdout) > LIMIT_BYTES:
        raise PeerError(f"CNI plugin {names} answered {command} with more than {LIMIT_BYTES} bytes")
    try:
        return decode_object(done.stdout, "the answer")
    except CniError as error:
        words = _words(done.stderr)
        raise PeerError(
            f"CNI plugin {names}, {command}: {error.message}" + (f" ({words})" if words else "")
        ) from None


def _judge(value: object, names: str, network: NetworkList) -> Result:
    try:
        return Result.from_json(value, default_version=network.cni_version)
    except CniError as error:
        raise PeerError(f"CNI plugin {names} gave a bad result: {error.message}") from None


def _refused(kind: str, command: str, error: CniError) -> Error:
    words = error.message if error.message.startswith(f"{kind}:") else f"{kind}: {error.message}"
    text = f"CNI {command} failed in {words}" + (f" ({error.details})" if error.details else "")
    return _REFUSALS.get(error.code, PeerError)(text)


def _words(output: bytes) -> str:
    return " ".join(output[: 1 << 16].decode("utf-8", "replace").split())[:_WORDS_LIMIT]


def _is_ours(path: str) -> bool:
    with open(path, "rb", buffering=0) as file:
        return is_ours(file.read(HEAD_BYTES) or b"")
