"""The pod network: attaches pods with the command ADD of a chain of CNI plugins, and detaches them
with DEL. Stores a record of each attachment for its DEL.

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
from cri_server.operations.tasks import finish_in_thread, shield_until_done
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
    """Attaches the node's pods to the network of the lexically first configuration file in a
    folder, or to the built-in network.

    - `conf_dir`: folder of *.conflist, *.conf and *.json.
    - `bin_dir`: folders of CNI executables, separated by `:`. An executable takes precedence over
      pyrunc's plugin of the same name.
    - `state_dir`: folder of the attachments' records (created, 0700).
    - `jobs`: the zygote, which forks the processes that run plugins.
    - `netns_dir`: folder of the bind mounts of the pods' network namespaces (module `names`).
    - `default`: a conflist object that is used while `conf_dir` holds no configuration
      (`configuration.builtin_network`). None: the network is not ready then.
    - `timeout_s`: the time limit of one foreign plugin, and of a group of consecutive pyrunc
      plugins.
    """

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
        # Two servers may share a network's leases and rules (tests, benchmarks): the scope tells GC
        # to which server a pod belongs.
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
        """Change the folder of configurations, the folders of executables and the built-in network
        for later calls. Attached pods keep the configuration of their ADD."""
        self._configuration.replace(conf_dir, default)
        self._plugins.bin_dirs = _folders(bin_dir)

    async def status(self) -> Readiness:
        """Return the condition `NetworkReady`. The plugins' STATUS is cached, for ten seconds when
        the network is ready and for two when it is not."""
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
                capabilities = node_capabilities(ranges)
                try:
                    await self._plugins.status(configured.network, capabilities, _STATUS_TIMEOUT_S)
                except (Error, OSError) as error:
                    ready = Readiness(False, _NOT_READY, str(error))
                    self._status = (now + _UNREADY_TTL_S, key, ready)
                else:
                    self._status = (now + _STATUS_TTL_S, key, Readiness(True))
            return self._status[2]

    async def attached(self) -> list[str]:
        """Return the ids of the sandboxes with a recorded attachment."""
        attachments, _ = await asyncio.to_thread(self._attachments.all)
        return [attachment.sandbox_id for attachment in attachments]

    async def leases(self) -> list[LeaseUsage]:
        """Return how many addresses of the configured network are leased, by IP version. Raises
        OSError."""
        network = self._read_configuration().network
        return [] if network is None else await asyncio.to_thread(usage, network)

    async def attach(self, pod: PodNetwork, *, durable: bool = True) -> NetworkResult:
        """Bind-mount the pod's network namespace in `netns_dir`, set loopback up and run ADD of the
        chain; return the addresses. After a failure run DEL, then raise the error. If DEL fails,
        too, the attachment stays recorded, and the caller must call `detach`.

        With `durable` the attachment's record is on disk when this returns. Without `durable` the
        record is written in the background, and the caller must call `wait_written`: if the server
        is killed before the write, the next server does not know the pod's addresses.

        Raises:

        - WrongState: no network is configured, or another pod has the host port.
        - InvalidArgument: a name, annotation or host port is invalid.
        - NotFound: the network namespace does not exist.
        - AlreadyExists: the sandbox is attached already.
        - PeerError: a plugin failed or gave an invalid answer.
        - ResourceExhausted: no address left, or the disk is full.
        - KernelError: the namespace cannot be bind-mounted, or the record not written.
        - DeadlineExceeded.
        """
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
                attached = replace(attachment, result=await self._add(attachment, progress))
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
        """Wait until the attachment's record is on disk, after `attach` without `durable`. Raises
        ResourceExhausted, KernelError; the caller must then call `detach`."""
        writing = self._writing.pop(sandbox_id, None)
        if writing is not None:
            await writing

    async def detach(self, sandbox_id: str, netns_path: str | None = None) -> None:
        """Run DEL of the chain with the configuration that ADD had, and remove the bind mount of
        the network namespace. Does nothing for an unknown or detached sandbox. The pod's interfaces
        are down afterwards, and disappear with the namespace.

        Plugins get the same CNI_NETNS as for ADD. `netns_path`: another path of the namespace, used
        if the bind mount is gone, for example because an administrator has removed it.

        Raises PeerError, DeadlineExceeded, DamagedRecord; record and bind mount then still exist.
        Raises KernelError or OSError when the bind mount or the record cannot be removed. The
        caller must call again after each error.
        """
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
        """Detach like `detach`, but drop the attachment even if plugins fail; return their error
        messages.

        Call this for a pod that cannot be removed otherwise, because a plugin no longer exists or
        the record is damaged. What a failed plugin has stored, such as an address lease, stays
        until the plugin's GC.
        """
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
                "network of sandbox %s was released although a CNI plugin failed: %s",
                sandbox_id,
                line,
            )
        return lines

    def has_record(self, sandbox_id: str) -> bool:
        """Return whether the sandbox has a record, even a damaged one. If so, the caller must call
        `detach`."""
        return self._attachments.has(sandbox_id)

    async def _load(self, sandbox_id: str) -> Attachment | None:
        attachment = self._attachments.cached(sandbox_id)
        if attachment is None and self._attachments.has(sandbox_id):
            attachment = await asyncio.to_thread(self._attachments.read, sandbox_id)
        return attachment

    def _remove(self, attachment: Attachment) -> None:
        """Remove the bind mount of the pod's network namespace, then the attachment's record.
        Called after DEL. Raises OSError, KernelError."""
        # The record is removed last: after a kill in between the attachment is detached again.
        name = attachment.netns_path
        remove_name(name if is_name(name) else self._names.path_of(attachment.sandbox_id))
        self._attachments.remove(attachment.sandbox_id)

    async def update_path(self, sandbox_id: str, netns_path: str) -> None:
        """Record the new path of the pod's network namespace after another shim has taken over the
        pod. Does nothing if the recorded path is the namespace's bind mount, which stays valid.
        Raises ResourceExhausted, KernelError."""
        _check_id(sandbox_id)
        async with self._turns.of(sandbox_id):
            attachment = await self._load(sandbox_id)
            if attachment is not None and not is_name(attachment.netns_path):
                await self._store(attachment.with_path(netns_path))

    async def result_of(self, sandbox_id: str) -> NetworkResult | None:
        """Return the result of the sandbox's attachment, also after a restart of the server; None
        if the sandbox is not attached."""
        attachment = await self._load(sandbox_id)
        return None if attachment is None or attachment.result is None else _result(attachment)

    async def reconcile(self, live_sandbox_ids: Callable[[], Iterable[str]]) -> list[str]:
        """Detach each recorded sandbox that `live_sandbox_ids` does not return, run GC, and restore
        nftables rules that another program has removed. Return a message for each problem that
        remains. Errors of plugins become such messages and are not raised.

        Before the caller attaches a sandbox, `live_sandbox_ids` must return it already. GC runs
        only at the first call, and at the next call after a failed DEL or a failed GC.
        """
        attachments, problems = await asyncio.to_thread(self._attachments.all)
        # Called after the records are read, because a sandbox may be attached meanwhile.
        live = set(live_sandbox_ids())
        for attachment in attachments:
            if attachment.sandbox_id not in live and not self._turns.busy(attachment.sandbox_id):
                try:
                    await self.detach(attachment.sandbox_id)
                except (Error, OSError) as error:
                    problems.append(
                        f"cannot detach the network of sandbox {attachment.sandbox_id}: {error}"
                    )
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
        """Return why no pod can be attached to the configured network; "" if pods can be
        attached. Runs no plugin."""
        if configured.network is None:
            return configured.problem
        missing = self._plugins.missing(configured.network)
        return (
            f"{configured.source}: CNI plugin {missing[0]!r} is not in {self._plugins.folders}"
            if missing
            else ""
        )

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
        """Run ADD of the chain; return its result. If the chain has a foreign plugin, write the
        attachment's record before ADD."""
        # Avoid the wait for the disk if possible: it takes half the time of an attach on a busy
        # machine (p50 0.52).
        if not self._plugins.runs_only_builtin(attachment.network):
            await self._store(attachment)
        return await self._plugins.add(attachment, progress)

    async def _store(self, attachment: Attachment) -> None:
        """Write the attachment's record in a thread, and wait for the end of the write even when
        cancelled. Raises ResourceExhausted, KernelError."""
        with disk_errors("write", "the network's record"):
            # A thread cannot be stopped: a roll-back that overtook it would leave the record
            # behind.
            await finish_in_thread(lambda: self._attachments.write(attachment))

    async def _roll_back(self, attachment: Attachment, error: BaseException) -> None:
        """Run DEL after a failed ADD, and remove the namespace's bind mount and the record. If DEL
        fails, too, add a note to `error`, and record how many plugins were started, for a later
        `detach`."""
        try:
            await self._plugins.delete(attachment, attachment.netns_path)
            await asyncio.to_thread(self._remove, attachment)
        except (Error, OSError) as second:
            self._must_collect = True
            error.add_note(f"the roll-back failed too: {second}")
            with contextlib.suppress(Error):  # the first record is on disk in any case
                await self._store(attachment)

    async def _collect(self) -> list[str]:
        """Run GC for the configured network and for each network with attachments, while no other
        call runs plugins. Return a message for each problem. If a record is damaged, no GC runs,
        because the pod of that record would lose its address."""
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
                    problems.append(
                        f"cannot release unused addresses of network {network.name}: {error}"
                    )
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
    """Locks that order the calls of NetworkService. During a `with` block of `of(sandbox_id)` no
    other call for this sandbox runs. During a `with` block of `alone()` no call for any sandbox
    runs."""

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
        """Wake all waiting tasks. This method awaits nothing, so that no cancellation can interrupt
        it."""
        # Not an asyncio.Condition: a second cancellation while it takes its lock again would leave
        # the lock unacquired. All waiters have this event; later ones get the new one.
        self._changed.set()
        self._changed = asyncio.Event()


def _folders(bin_dir: str) -> tuple[str, ...]:
    """Return the folders in `bin_dir`, a list separated by `:`, without empty ones."""
    return tuple(folder for folder in bin_dir.split(":") if folder)


def _warnings(configured: ConfiguredNetwork) -> set[str]:
    """Return the problems of the configuration folder that must be logged. An empty folder is not
    logged, because kubelet reports it."""
    return {
        *configured.skipped,
        *([configured.problem] if configured.source and configured.problem else []),
    }


def _result(attachment: Attachment) -> NetworkResult:
    """Return the pod's addresses in the plugins' order, and the chain's result. Raises PeerError if
    the pod's interface has no address."""
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
    """Return a path of the network namespace in which ADD set up the pod's network: the bind mount,
    else `alternative`. Return "" if neither path has that namespace's device and inode."""
    name = attachment.netns_path if is_name(attachment.netns_path) else ""
    paths = (path for path in (name, alternative) if path)
    return next((path for path in paths if _namespace_id(path) == attachment.netns_id), "")


def _namespace_id(path: str) -> str:
    """Return the device and inode numbers of the file at `path`; empty if there is no file."""
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
