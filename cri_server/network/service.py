"""The server's network: attaches pods by a chain of CNI plugins and remembers enough to detach
them.

network = Network(conf_dir, bin_dir, state_dir, errands, netns_dir=netns_dir)
(await network.status()).ready
result = await network.attach(PodNetwork(...))   # result.ips[0] is the pod's primary address
await network.detach(sandbox_id, netns_path)      # idempotent, also when the namespace is gone
await network.reconcile(live_sandbox_ids)         # at start and every ten seconds or so
network.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any, cast

from cni_plugins.protocol.call import check_identifier
from cni_plugins.protocol.config import NetworkList
from cni_plugins.protocol.errors import CniError
from cni_plugins.protocol.result import Result
from cri_server.network.attachments import Attachment, Attachments
from cri_server.network.capabilities import capability_arguments, cni_arguments, node_capabilities
from cri_server.network.chain import IFNAME, PluginRunner, Progress
from cri_server.network.configuration import Configuration, Found
from cri_server.network.leases import Usage, usage
from cri_server.network.model import NetworkResult, PodNetwork, Readiness
from cri_server.network.names import NamespaceNames, is_name
from cri_server.network.names import remove as remove_name
from cri_server.network.pod_ranges import PodRanges
from cri_server.operations.locks import KeyedLock
from cri_server.operations.tasks import gather, shield_until_done
from cri_server.zygote.client import Zygote
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import AlreadyExists, Error, InvalidArgument, NotFound, PeerError, WrongState
from pyrunc.kernel.full import disk_errors

log = logging.getLogger(__name__)

_NOT_READY = "NetworkPluginNotReady"
_STATUS_TTL_S = 10.0
_UNREADY_TTL_S = 2.0
_STATUS_TIMEOUT_S = 3.0


class Network:
    """One network for the node's pods: the first configuration of a folder, or the embedded one.

    conf_dir: folder of *.conflist, *.conf, *.json; bin_dir: folders of CNI executables separated by
    `:`, which win over our plugins of the same name; state_dir: where attachments are remembered
    (created, 0700); netns_dir: where the pods' network namespaces have their names (`names`).
    default: a conflist object used while `conf_dir` holds no configuration
    (`configuration.builtin_network`); None: the network is not ready then. timeout_s: for one
    plugin, or several of ours in a row.
    """

    def __init__(
        self,
        conf_dir: str,
        bin_dir: str,
        state_dir: str,
        errands: Zygote,
        *,
        netns_dir: str,
        default: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._configuration = Configuration(conf_dir, default)
        self._attachments = Attachments(state_dir)
        self._names = NamespaceNames(netns_dir)
        scope = hashlib.sha256(os.path.abspath(state_dir).encode()).hexdigest()[:8]
        folders = tuple(p for p in bin_dir.split(":") if p)
        own = os.path.join(os.path.abspath(state_dir), "bin")
        self._plugins = PluginRunner(errands, folders, own, timeout_s, scope)
        self._pod_ranges = PodRanges(state_dir)
        self._turns = _Turns()
        self._writing: dict[str, asyncio.Task[None]] = {}
        self._status: tuple[float, str, Readiness] | None = None
        self._status_lock = asyncio.Lock()
        self._must_collect = True
        self._last_found: Found | None = None

    def close(self) -> None:
        self._plugins.close()

    async def use_pod_ranges(self, subnets: Iterable[str]) -> None:
        """The node's pod CIDRs (UpdateRuntimeConfig), for plugins with the capability ipRanges;
        remembered over restarts.

        Raises InvalidArgument, ResourceExhausted, KernelError.
        """
        given = list(subnets)
        with disk_errors("write", "the node's pod CIDRs"):
            await asyncio.to_thread(self._pod_ranges.replace, given)

    def reconfigure(self, conf_dir: str, bin_dir: str, default: dict[str, Any] | None) -> None:
        """Another folder of configurations, of executables, another embedded network, for the calls
        to come."""
        self._configuration.replace_folder(conf_dir)
        self._configuration.replace_default(default)
        self._plugins.replace_folders(tuple(p for p in bin_dir.split(":") if p))

    def replace_default(self, default: dict[str, Any] | None) -> None:
        """Another embedded network for the pods to come."""
        self._configuration.replace_default(default)

    async def status(self) -> Readiness:
        """The condition `NetworkReady`; cheap, asks the plugins' STATUS at most every ten seconds,
        or two while not ready."""
        found = self._current()
        problem = self._problem_of(found)
        if problem or found.network is None:
            return Readiness(False, _NOT_READY, problem)
        async with self._status_lock:
            now, ranges = time.monotonic(), self._pod_ranges.subnets
            key = f"{found.source} {found.network} {ranges}"
            if self._status is None or self._status[1] != key or now > self._status[0]:
                ready = await self._ask_status(found.network, node_capabilities(ranges))
                self._status = (
                    now + (_STATUS_TTL_S if ready.ready else _UNREADY_TTL_S),
                    key,
                    ready,
                )
            return self._status[2]

    async def attached(self) -> list[str]:
        """Ids of the sandboxes that are remembered as attached."""
        remembered, _ = await asyncio.to_thread(self._attachments.all)
        return [attachment.sandbox_id for attachment in remembered]

    async def leases(self) -> list[Usage]:
        """How many addresses of the current network are taken. Raises OSError."""
        network = self._current().network
        return [] if network is None else await asyncio.to_thread(usage, network)

    async def attach(self, pod: PodNetwork, *, settled: bool = True) -> NetworkResult:
        """A name for the namespace, loopback up and the chain's ADD. What failed is rolled back by
        DEL before the error is raised.

        It is on the disk when this returns, or, not `settled`, when `settle` does, and until then
        after a kill without result.

        Raises WrongState (no configuration), InvalidArgument (ports, names), NotFound (no such
        namespace), AlreadyExists (attached already), PeerError (a plugin failed or answered
        nonsense), ResourceExhausted (no address left), DeadlineExceeded. When the roll-back fails
        too, the attachment stays remembered: call `detach`.
        """
        found = self._current()
        problem = self._problem_of(found)
        if problem or found.network is None:
            raise WrongState(f"the network is not ready: {problem}")
        attachment = self._prepare(pod, found.network)
        async with self._turns.of(pod.sandbox_id):
            if self._attachments.has(pod.sandbox_id):
                raise AlreadyExists(f"sandbox {pod.sandbox_id} is attached to the network already")
            self._names.make(pod.sandbox_id, pod.netns_path)
            progress = Progress()
            try:
                result = await self._add(attachment, progress)
                answer = _result(attachment.with_result(result))
                writing = asyncio.create_task(self._remember(attachment.with_result(result)))
                if settled:
                    await writing
                else:
                    self._writing[pod.sandbox_id] = writing
            except BaseException as error:
                await shield_until_done(
                    self._roll_back(replace(attachment, begun=progress.begun), error)
                )
                raise
            return answer

    async def settle(self, sandbox_id: str) -> None:
        """Wait until an attachment is on the disk. Raises ResourceExhausted, KernelError: call
        `detach`."""
        writing = self._writing.pop(sandbox_id, None)
        if writing is not None:
            await writing

    async def detach(self, sandbox_id: str, netns_path: str | None = None) -> None:
        """The chain's DEL with the configuration of the ADD, and the end of the namespace's name;
        nothing to do for an unknown or detached sandbox.

        Plugins get the name that they got for ADD. `netns_path` is where else the namespace is
        found, None when nowhere: for a pod of an earlier version, which had no name, and for a name
        that somebody has removed. The interfaces are quiet afterwards and vanish with the
        namespace. Raises PeerError, DeadlineExceeded: the attachment and the name are then still
        there, call again.
        """
        _check_id(sandbox_id)
        async with self._turns.of(sandbox_id):
            with contextlib.suppress(Error):  # then the first record is there
                await self.settle(sandbox_id)
            attachment = await self._recalled(sandbox_id)
            if attachment is None:
                remove_name(self._names.path_of(sandbox_id))
                return
            await self._plugins.delete(attachment, _namespace_of(attachment, netns_path))
            await asyncio.to_thread(self._forget, attachment)

    async def release(self, sandbox_id: str, netns_path: str | None = None) -> list[str]:
        """As `detach`, but nothing keeps the attachment: what plugins refused is returned, a line
        each.

        For a pod that could not be removed else: a plugin that is not there any more, or a record
        that is damaged. What such a plugin keeps, an address for example, stays with it until its
        GC.
        """
        _check_id(sandbox_id)
        async with self._turns.of(sandbox_id):
            with contextlib.suppress(Error):
                await self.settle(sandbox_id)
            try:
                attachment = await self._recalled(sandbox_id)
            except DamagedRecord as error:
                remove_name(self._names.path_of(sandbox_id))
                self._attachments.forget(sandbox_id)
                return [error.message]
            if attachment is None:
                remove_name(self._names.path_of(sandbox_id))
                return []
            namespace = _namespace_of(attachment, netns_path)
            refused = await self._plugins.delete_what_can_be(attachment, namespace)
            await asyncio.to_thread(self._forget, attachment)
            self._must_collect = True
        lines = [error.message for error in refused]
        for line in lines:
            log.warning("network of sandbox %s is given up: %s", sandbox_id, line)
        return lines

    def remembers(self, sandbox_id: str) -> bool:
        """Whether an attachment is recorded, be its record damaged: `detach` has something to do."""
        return self._attachments.has(sandbox_id)

    async def _recalled(self, sandbox_id: str) -> Attachment | None:
        found = self._attachments.at_hand(sandbox_id)
        if found is None and self._attachments.has(sandbox_id):
            found = await asyncio.to_thread(self._attachments.read, sandbox_id)
        return found

    def _forget(self, attachment: Attachment) -> None:
        """After DEL: first the name, since an attachment that is remembered is detached again.
        Raises OSError, KernelError."""
        name = attachment.netns_path
        remove_name(name if is_name(name) else self._names.path_of(attachment.sandbox_id))
        self._attachments.forget(attachment.sandbox_id)

    async def moved(self, sandbox_id: str, netns_path: str) -> None:
        """The namespace of a pod of an earlier version is found at another path from now on; a name
        stays. Raises KernelError."""
        _check_id(sandbox_id)
        async with self._turns.of(sandbox_id):
            attachment = await self._recalled(sandbox_id)
            if attachment is not None and not is_name(attachment.netns_path):
                await self._remember(attachment.moved(netns_path))

    async def check(self, sandbox_id: str) -> None:
        """The chain's CHECK. Raises NotFound, PeerError for the first damage found."""
        attachment = await self._recalled(sandbox_id)
        if attachment is None or attachment.result is None:
            raise NotFound(f"sandbox {sandbox_id} is not attached to the network")
        await self._plugins.check(attachment)

    async def recall(self, sandbox_id: str) -> NetworkResult | None:
        """The result of a successful `attach` that was not detached, also after a restart of the
        server."""
        attachment = await self._recalled(sandbox_id)
        return None if attachment is None or attachment.result is None else _result(attachment)

    async def reconcile(self, live_sandbox_ids: Iterable[str]) -> list[str]:
        """Detach what is remembered but not live, let plugins collect leftovers, put back lost host
        rules.

        A sandbox counts as live from before its `attach`. Leftovers are collected by the first call
        and after a failed roll-back. Returns one line per problem that stays; never raises for a
        broken plugin.
        """
        live = set(live_sandbox_ids)
        remembered, problems = await asyncio.to_thread(self._attachments.all)
        for attachment in remembered:
            if attachment.sandbox_id not in live and not self._turns.busy(attachment.sandbox_id):
                try:
                    await self.detach(attachment.sandbox_id)
                except (Error, OSError) as error:
                    problems.append(f"detaching {attachment.sandbox_id}: {error}")
        if self._must_collect:
            failed = await self._collect()
            self._must_collect = bool(failed)
            problems += failed
        return problems + await self._restore()

    def _current(self) -> Found:
        """What the folder says; what is wrong with it is logged when it changes."""
        found = self._configuration.current()
        if found is not self._last_found:
            before = set() if self._last_found is None else _complaints(self._last_found)
            for line in sorted(_complaints(found) - before):
                log.warning("network configuration: %s", line)
            self._last_found = found
        return found

    def _problem_of(self, found: Found) -> str:
        """Why no pod can be attached to it, or an empty string. Runs no plugin."""
        if found.network is None:
            return found.problem
        missing = self._plugins.missing(found.network)
        return (
            f"{found.source}: there is no CNI plugin {missing[0]!r} in {self._plugins.folders}"
            if missing
            else ""
        )

    async def _ask_status(self, network: NetworkList, capabilities: dict[str, Any]) -> Readiness:
        try:
            await self._plugins.status(network, capabilities, _STATUS_TIMEOUT_S)
        except (Error, OSError) as error:
            return Readiness(False, _NOT_READY, str(error))
        return Readiness(True)

    def _prepare(self, pod: PodNetwork, network: NetworkList) -> Attachment:
        _check_id(pod.sandbox_id)
        netns_id = _namespace_id(pod.netns_path)
        if not netns_id:
            raise NotFound(f"there is no network namespace {pod.netns_path}")
        return Attachment(
            sandbox_id=pod.sandbox_id,
            network=network,
            netns_path=self._names.path_of(pod.sandbox_id),
            netns_id=netns_id,
            arguments=cni_arguments(pod),
            capabilities=capability_arguments(pod, self._pod_ranges.subnets),
        )

    async def _add(self, attachment: Attachment, progress: Progress) -> Result:
        """Remember the attachment, then ADD; both at once where only plugins of ours run, see
        `Attachments`.

        What those leave when the server is killed before the record is there, the GC at the next
        start collects.
        """
        if not self._plugins.runs_only_ours(attachment.network):
            await self._remember(attachment)
            return await self._plugins.add(attachment, progress)
        remembering = self._remember(attachment, durable=False)
        adding = self._plugins.add(attachment, progress)
        _, result = await gather(remembering, adding)
        return cast(Result, result)

    async def _remember(self, attachment: Attachment, *, durable: bool = True) -> None:
        """Write the record. Who is cancelled meanwhile waits all the same: a thread cannot be
        stopped, and a roll-back that overtook it would leave the record behind. Raises
        ResourceExhausted, KernelError.
        """
        with disk_errors("write", "the network's record"):
            await shield_until_done(
                asyncio.to_thread(self._attachments.write, attachment, durable=durable)
            )

    async def _roll_back(self, attachment: Attachment, error: BaseException) -> None:
        """DEL of what was ADDed. Where that fails the attachment stays, with how far ADD had come,
        for `detach`."""
        try:
            await self._plugins.delete(attachment, attachment.netns_path)
            await asyncio.to_thread(self._forget, attachment)
        except (Error, OSError) as second:
            self._must_collect = True
            error.add_note(f"the roll-back failed too: {second}")
            with contextlib.suppress(Error):  # then the first record is there
                await self._remember(attachment)

    async def _collect(self) -> list[str]:
        """GC for every network that pods are or would be attached to, while no plugin runs."""
        async with self._turns.alone():
            remembered, problems = await asyncio.to_thread(self._attachments.all)
            if problems:  # whose attachment is damaged must not lose its address
                return problems
            networks = {a.network.name: a.network for a in remembered}
            current = self._current().network
            if current is not None:
                networks[current.name] = current
            for network in networks.values():
                try:
                    mine = [a for a in remembered if a.network.name == network.name]
                    await self._plugins.collect(network, mine)
                except (Error, OSError) as error:
                    problems.append(f"collecting leftovers of network {network.name}: {error}")
        return problems

    async def _restore(self) -> list[str]:
        async with self._turns.alone():
            remembered, _ = await asyncio.to_thread(self._attachments.all)
            try:
                await self._plugins.restore(remembered)
            except (Error, OSError) as error:
                return [f"restoring host rules: {error}"]
        return []


class _Turns:
    """One verb at a time per sandbox; `alone` waits until no sandbox has its turn and keeps others
    waiting."""

    def __init__(self) -> None:
        self._sandboxes = KeyedLock()
        self._running = 0
        self._alone = False
        self._changed = asyncio.Event()

    def busy(self, sandbox_id: str) -> bool:
        return sandbox_id in self._sandboxes

    @contextlib.asynccontextmanager
    async def of(self, sandbox_id: str) -> AsyncIterator[None]:
        async with self._sandboxes.hold(sandbox_id):
            await self._until(lambda: not self._alone)
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1
                self._tell()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        await self._until(lambda: not self._alone and self._running == 0)
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            self._tell()

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self._changed.wait()

    def _tell(self) -> None:
        """Wake everybody who waits; nothing here can be cancelled."""
        self._changed.set()
        self._changed = asyncio.Event()


def _complaints(found: Found) -> set[str]:
    """What an administrator should know about the folder. That nothing is there yet is no mistake:
    kubelet says it."""
    return {*found.passed_over, *([found.problem] if found.source and found.problem else [])}


def _result(attachment: Attachment) -> NetworkResult:
    """The pod's addresses in the plugins' order. Raises PeerError where the pod's interface has
    none."""
    assert attachment.result is not None
    found = attachment.result.addresses_of(IFNAME, attachment.netns_path)
    ips = tuple(dict.fromkeys(str(a.address.ip) for a in found))
    if not ips:
        raise PeerError(
            f"the plugins of network {attachment.network.name} gave {IFNAME} no address"
        )
    raw = attachment.result.to_json(attachment.network.cni_version)
    return NetworkResult(ips=ips, raw=raw, netns_path=attachment.netns_path)


def _namespace_of(attachment: Attachment, also: str | None) -> str:
    """Where the namespace of the ADD is found, empty when it is gone."""
    name = attachment.netns_path if is_name(attachment.netns_path) else ""
    paths = (path for path in (name, also) if path)
    return next((path for path in paths if _namespace_id(path) == attachment.netns_id), "")


def _namespace_id(path: str) -> str:
    """Device and inode of what `path` leads to, empty where it leads nowhere."""
    try:
        stat = os.stat(path)
    except OSError:
        return ""
    return f"{stat.st_dev}:{stat.st_ino}"


def _check_id(sandbox_id: str) -> None:
    try:
        check_identifier(sandbox_id, "sandbox id")
    except CniError as error:
        raise InvalidArgument(error.message) from None
