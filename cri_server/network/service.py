"""The pod network: attaches pods by a chain of CNI plugins and stores the records that their
detachment needs.

    network = NetworkService(conf_dir, bin_dir, state_dir, jobs, netns_dir=netns_dir)
    (await network.status()).ready
    result = await network.attach(PodNetwork(...))   # result.ips[0] is the pod's primary address
    await network.detach(sandbox_id, netns_path)     # idempotent, also when the namespace is gone
    await network.reconcile(live_sandbox_ids)        # at start and about every ten seconds
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
from typing import Any

from cni_plugins.protocol.call import check_identifier
from cni_plugins.protocol.config import NetworkList
from cni_plugins.protocol.errors import CniError
from cni_plugins.protocol.result import Result
from cri_server.network.attachments import Attachment, Attachments
from cri_server.network.capabilities import capability_arguments, cni_arguments, node_capabilities
from cri_server.network.chain import IFNAME, AddProgress, PluginRunner
from cri_server.network.configuration import Configuration, ConfiguredNetwork
from cri_server.network.leases import LeaseUsage, usage
from cri_server.network.model import NetworkResult, PodNetwork, Readiness
from cri_server.network.names import NamespaceNames, is_name
from cri_server.network.names import remove as remove_name
from cri_server.network.pod_ranges import PodRanges
from cri_server.operations.locks import KeyedLock
from cri_server.operations.tasks import shield_until_done
from cri_server.zygote.client import Zygote
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import AlreadyExists, Error, InvalidArgument, NotFound, PeerError, WrongState
from pyrunc.kernel.full import disk_errors

log = logging.getLogger(__name__)

_NOT_READY = "NetworkPluginNotReady"
# kubelet calls Status every five seconds; a foreign plugin's STATUS executes a program.
_STATUS_TTL_S = 10.0
_UNREADY_TTL_S = 2.0
_STATUS_TIMEOUT_S = 3.0


class NetworkService:
    """The network of the node's pods: the first configuration of a folder, or the built-in one.

    conf_dir: folder of *.conflist, *.conf, *.json; bin_dir: folders of CNI executables separated by
    `:`, which take precedence over pyrunc's plugins of the same name; state_dir: folder of the
    attachments' records (created, 0700); netns_dir: folder of the names of the pods' network
    namespaces (`names`). default: a conflist object that is used while `conf_dir` holds no
    configuration (`configuration.builtin_network`); None: the network is not ready then. timeout_s:
    for one plugin, or a run of consecutive ones of pyrunc's own."""

    def __init__(
        self,
        conf_dir: str,
        bin_dir: str,
        state_dir: str,
        jobs: Zygote,
        *,
        netns_dir: str,
        default: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._configuration = Configuration(conf_dir, default)
        self._attachments = Attachments(state_dir)
        self._names = NamespaceNames(netns_dir)
        # Two servers may share a network's leases and rules (tests, benchmarks): the word tells GC
        # whose pod each one is.
        scope = hashlib.sha256(os.path.abspath(state_dir).encode()).hexdigest()[:8]
        own = os.path.join(os.path.abspath(state_dir), "bin")
        self._plugins = PluginRunner(jobs, _folders(bin_dir), own, timeout_s, scope)
        self._pod_ranges = PodRanges(state_dir)
        self._turns = _SandboxTurns()
        self._writing: dict[str, asyncio.Task[None]] = {}
        self._status: tuple[float, str, Readiness] | None = None
        self._status_lock = asyncio.Lock()
        # The previous server may have been killed between a plugin's work and the record of it.
        self._must_collect = True
        self._last_configured: ConfiguredNetwork | None = None

    def close(self) -> None:
        self._plugins.close()

    async def set_pod_ranges(self, subnets: Iterable[str]) -> None:
        """Set and store the node's pod CIDRs (UpdateRuntimeConfig), for plugins with the capability
        ipRanges.

        Raises InvalidArgument, ResourceExhausted, KernelError.
        """
        ranges = list(subnets)
        with disk_errors("write", "the node's pod CIDRs"):
            await asyncio.to_thread(self._pod_ranges.replace, ranges)

    def reconfigure(self, conf_dir: str, bin_dir: str, default: dict[str, Any] | None) -> None:
        """Use another folder of configurations, other executables and another built-in network for
        later calls."""
        self._configuration.replace(conf_dir, default)
        self._plugins.bin_dirs = _folders(bin_dir)

    async def status(self) -> Readiness:
        """Return the condition `NetworkReady`. Calls the plugins' STATUS at most every ten
        seconds; while the network is not ready, at most every two."""
        configured = self._read_configuration()
        problem = self._problem_of(configured)
        if problem or configured.network is None:
            return Readiness(False, _NOT_READY, problem)
        async with self._status_lock:
            now, ranges = time.monotonic(), self._pod_ranges.subnets
            key = f"{configured.source} {configured.network} {ranges}"
            if self._status is None or self._status[1] != key or now > self._status[0]:
                # With the pod ranges: a network that takes its ranges from kubelet would never be
                # ready without them, and kubelet would run no pod.
                ready = await self._ask_status(configured.network, node_capabilities(ranges))
                self._status = (
                    now + (_STATUS_TTL_S if ready.ready else _UNREADY_TTL_S),
                    key,
                    ready,
                )
            return self._status[2]

    async def attached(self) -> list[str]:
        """Return the ids of the sandboxes with a recorded attachment."""
        attachments, _ = await asyncio.to_thread(self._attachments.all)
        return [attachment.sandbox_id for attachment in attachments]

    async def leases(self) -> list[LeaseUsage]:
        """Return the leased addresses of the current network. Raises OSError."""
        network = self._read_configuration().network
        return [] if network is None else await asyncio.to_thread(usage, network)

    async def attach(self, pod: PodNetwork, *, durable: bool = True) -> NetworkResult:
        """Name the namespace, set loopback up and run the chain's ADD. A failure is rolled back by
        DEL before it is raised.

        The record is on disk when this returns; if not `durable`, when `wait_written` does, and
        until then a killed server knows the attachment without its result.

        Raises WrongState (no configuration), InvalidArgument (ports, names), NotFound (no such
        namespace), AlreadyExists (attached already), PeerError (a plugin failed or gave an invalid
        answer), ResourceExhausted (no address left), DeadlineExceeded. When the roll-back fails
        too, the attachment stays recorded: call `detach`."""
        configured = self._read_configuration()
        problem = self._problem_of(configured)
        if problem or configured.network is None:
            raise WrongState(f"the pod network is not ready: {problem}")
        attachment = self._prepare(pod, configured.network)
        async with self._turns.of(pod.sandbox_id):
            if self._attachments.has(pod.sandbox_id):
                raise AlreadyExists(f"sandbox {pod.sandbox_id} is attached to the network already")
            # Before ADD: plugins get the name as CNI_NETNS, and some store it for their daemon.
            self._names.make(pod.sandbox_id, pod.netns_path)
            progress = AddProgress()
            try:
                attached = attachment.with_result(await self._add(attachment, progress))
                answer = _result(attached)
                self._attachments.add(attached)
                writing = asyncio.create_task(self._store(attached))
                if durable:
                    await writing
                else:
                    self._writing[pod.sandbox_id] = writing
            except BaseException as error:
                await shield_until_done(
                    self._roll_back(replace(attachment, begun=progress.begun), error)
                )
                raise
            return answer

    async def wait_written(self, sandbox_id: str) -> None:
        """Wait until the attachment's record is on disk. Raises ResourceExhausted, KernelError:
        call `detach`."""
        writing = self._writing.pop(sandbox_id, None)
        if writing is not None:
            await writing

    async def detach(self, sandbox_id: str, netns_path: str | None = None) -> None:
        """Run the chain's DEL with the configuration of the ADD and remove the namespace's name;
        does nothing for an unknown or detached sandbox.

        Plugins get the name that they got for ADD. `netns_path`: another path of the namespace, or
        None; used for a pod of an earlier version, which has no name, and for a name that another
        program has removed. The interfaces are down afterwards and disappear with the namespace.
        Raises PeerError, DeadlineExceeded: the attachment and the name then still exist, call
        again."""
        _check_id(sandbox_id)
        async with self._turns.of(sandbox_id):
            with contextlib.suppress(Error):  # the first record is on disk in any case
                await self.wait_written(sandbox_id)
            attachment = await self._load(sandbox_id)
            if attachment is None:
                remove_name(self._names.path_of(sandbox_id))
                return
            await self._plugins.delete(attachment, _namespace_of(attachment, netns_path))
            await asyncio.to_thread(self._remove, attachment)

    async def release(self, sandbox_id: str, netns_path: str | None = None) -> list[str]:
        """Detach like `detach`, but drop the attachment even if plugins fail; returns a line per
        error.

        For a pod that could not be removed otherwise: a plugin no longer exists, or the record is
        damaged. The state of such a plugin, such as an address lease, stays until its GC."""
        _check_id(sandbox_id)
        async with self._turns.of(sandbox_id):
            with contextlib.suppress(Error):
                await self.wait_written(sandbox_id)
            try:
                attachment = await self._load(sandbox_id)
            except DamagedRecord as error:
                remove_name(self._names.path_of(sandbox_id))
                self._attachments.remove(sandbox_id)
                return [error.message]
            if attachment is None:
                remove_name(self._names.path_of(sandbox_id))
                return []
            namespace = _namespace_of(attachment, netns_path)
            errors = await self._plugins.delete_each(attachment, namespace)
            await asyncio.to_thread(self._remove, attachment)
            self._must_collect = True
        lines = [error.message for error in errors]
        for line in lines:
            log.warning(
                "network of sandbox %s is released in spite of an error: %s", sandbox_id, line
            )
        return lines

    def has_record(self, sandbox_id: str) -> bool:
        """Whether an attachment is recorded, even by a damaged record: `detach` then has work to
        do."""
        return self._attachments.has(sandbox_id)

    async def _load(self, sandbox_id: str) -> Attachment | None:
        attachment = self._attachments.cached(sandbox_id)
        if attachment is None and self._attachments.has(sandbox_id):
            attachment = await asyncio.to_thread(self._attachments.read, sandbox_id)
        return attachment

    def _remove(self, attachment: Attachment) -> None:
        """Remove the name and then the record, after DEL. Raises OSError, KernelError."""
        # The record is last: after a kill in between the attachment is detached again.
        name = attachment.netns_path
        remove_name(name if is_name(name) else self._names.path_of(attachment.sandbox_id))
        self._attachments.remove(attachment.sandbox_id)

    async def update_path(self, sandbox_id: str, netns_path: str) -> None:
        """Record the new path of the namespace of a pod of an earlier version. A name is not
        replaced. Raises KernelError."""
        _check_id(sandbox_id)
        async with self._turns.of(sandbox_id):
            attachment = await self._load(sandbox_id)
            if attachment is not None and not is_name(attachment.netns_path):
                await self._store(attachment.with_path(netns_path))

    async def result_of(self, sandbox_id: str) -> NetworkResult | None:
        """The result of an attachment that was not detached, also after a restart of the server;
        None if there is none."""
        attachment = await self._load(sandbox_id)
        return None if attachment is None or attachment.result is None else _result(attachment)

    async def reconcile(self, live_sandbox_ids: Iterable[str]) -> list[str]:
        """Detach recorded sandboxes that are not live, let plugins collect leftovers, restore lost
        host rules.

        A sandbox counts as live from before its `attach`. Leftovers are collected by the first call
        and after a failed roll-back. Returns a line for each remaining problem; never raises for a
        failing plugin."""
        live = set(live_sandbox_ids)
        attachments, problems = await asyncio.to_thread(self._attachments.all)
        for attachment in attachments:
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

    def _read_configuration(self) -> ConfiguredNetwork:
        """Return the configured network; log its problems when they change."""
        configured = self._configuration.current()
        if configured is not self._last_configured:
            before = set() if self._last_configured is None else _warnings(self._last_configured)
            for line in sorted(_warnings(configured) - before):
                log.warning("network configuration: %s", line)
            self._last_configured = configured
        return configured

    def _problem_of(self, configured: ConfiguredNetwork) -> str:
        """Return the reason why no pod can be attached, or an empty string. Runs no plugin."""
        if configured.network is None:
            return configured.problem
        missing = self._plugins.missing(configured.network)
        return (
            f"{configured.source}: CNI plugin {missing[0]!r} is not in {self._plugins.folders}"
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
            raise NotFound(f"network namespace {pod.netns_path} does not exist")
        return Attachment(
            sandbox_id=pod.sandbox_id,
            network=network,
            netns_path=self._names.path_of(pod.sandbox_id),
            netns_id=netns_id,
            arguments=cni_arguments(pod),
            capabilities=capability_arguments(pod, self._pod_ranges.subnets),
        )

    async def _add(self, attachment: Attachment, progress: AddProgress) -> Result:
        """Store the attachment before the ADD of a foreign plugin, then run ADD."""
        # Half the time of an attach on a busy machine (p50 0.52) is the wait for the disk.
        if not self._plugins.runs_only_builtin(attachment.network):
            await self._store(attachment)
        return await self._plugins.add(attachment, progress)

    async def _store(self, attachment: Attachment) -> None:
        """Write the record; waits for its thread even when cancelled. Raises ResourceExhausted,
        KernelError."""
        with disk_errors("write", "the network's record"):
            # A thread cannot be stopped: a roll-back that overtook it would leave the record
            # behind.
            await shield_until_done(asyncio.to_thread(self._attachments.write, attachment))

    async def _roll_back(self, attachment: Attachment, error: BaseException) -> None:
        """Run DEL after a failed ADD. If that fails too, store the attachment with its progress,
        for `detach`."""
        try:
            await self._plugins.delete(attachment, attachment.netns_path)
            await asyncio.to_thread(self._remove, attachment)
        except (Error, OSError) as second:
            self._must_collect = True
            error.add_note(f"the roll-back failed too: {second}")
            with contextlib.suppress(Error):  # the first record is on disk in any case
                await self._store(attachment)

    async def _collect(self) -> list[str]:
        """Run GC for each network that has attachments and for the configured one, while no other
        plugin runs. Returns a line per problem; with a damaged record nothing is collected."""
        async with self._turns.alone():
            attachments, problems = await asyncio.to_thread(self._attachments.all)
            if problems:  # the pod of a damaged record must not lose its address
                return problems
            networks = {a.network.name: a.network for a in attachments}
            current = self._read_configuration().network
            if current is not None:
                networks[current.name] = current
            for network in networks.values():
                try:
                    of_network = [a for a in attachments if a.network.name == network.name]
                    await self._plugins.collect(network, of_network)
                except (Error, OSError) as error:
                    problems.append(f"collecting leftovers of network {network.name}: {error}")
        return problems

    async def _restore(self) -> list[str]:
        async with self._turns.alone():
            attachments, _ = await asyncio.to_thread(self._attachments.all)
            try:
                await self._plugins.restore(attachments)
            except (Error, OSError) as error:
                return [f"restoring host rules: {error}"]
        return []


class _SandboxTurns:
    """Serializes the calls for each sandbox. `alone` waits until no sandbox has a call, and makes
    later calls wait."""

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
                self._wake()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        await self._until(lambda: not self._alone and self._running == 0)
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            self._wake()

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self._changed.wait()

    def _wake(self) -> None:
        """Wake all waiters; cannot be interrupted by a cancellation."""
        # Not an asyncio.Condition: a second cancellation while it takes its lock again would leave
        # the lock unacquired. All waiters have this event; later ones get the new one.
        self._changed.set()
        self._changed = asyncio.Event()


def _folders(bin_dir: str) -> tuple[str, ...]:
    """Return the folders of `bin_dir`, which `:` separates."""
    return tuple(folder for folder in bin_dir.split(":") if folder)


def _warnings(configured: ConfiguredNetwork) -> set[str]:
    """Return the problems of the configuration folder that are logged. An empty folder is not among
    them, because kubelet reports it."""
    return {
        *configured.skipped,
        *([configured.problem] if configured.source and configured.problem else []),
    }


def _result(attachment: Attachment) -> NetworkResult:
    """Return the pod's addresses in the plugins' order. Raises PeerError if its interface has
    none."""
    assert attachment.result is not None
    assigned = attachment.result.addresses_of(IFNAME, attachment.netns_path)
    ips = tuple(dict.fromkeys(str(each.address.ip) for each in assigned))
    if not ips:
        raise PeerError(
            f"the plugins of network {attachment.network.name} gave {IFNAME} no address"
        )
    raw = attachment.result.to_json(attachment.network.cni_version)
    return NetworkResult(ips=ips, raw=raw, netns_path=attachment.netns_path)


def _namespace_of(attachment: Attachment, alternative: str | None) -> str:
    """Return the path of the namespace that plugins got for ADD; empty if it no longer exists."""
    name = attachment.netns_path if is_name(attachment.netns_path) else ""
    paths = (path for path in (name, alternative) if path)
    return next((path for path in paths if _namespace_id(path) == attachment.netns_id), "")


def _namespace_id(path: str) -> str:
    """Return device and inode of the file at `path`; empty if there is none."""
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
