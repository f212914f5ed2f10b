"""What several plugins ask for, one after the other, made one wish, with an owner for each field.

A plugin sees what those before it have changed: `container` and `wanted` are kept up to date. The
wish is `adjustment`, `updates` of other containers and `evictions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cri_server.api import nri_pb2 as api
from cri_server.nri.owners import REMOVED, Owners
from pyrunc.errors import Error, PeerError

MEMORY_FIELDS = {
    "limit": api.MemLimit,
    "reservation": api.MemReservation,
    "swap": api.MemSwapLimit,
    "kernel": api.MemKernelLimit,
    "kernel_tcp": api.MemTCPLimit,
    "swappiness": api.MemSwappiness,
    "disable_oom_killer": api.MemDisableOomKiller,
    "use_hierarchy": api.MemUseHierarchy,
}
CPU_FIELDS = {
    "shares": api.CPUShares,
    "quota": api.CPUQuota,
    "period": api.CPUPeriod,
    "realtime_runtime": api.CPURealtimeRuntime,
    "realtime_period": api.CPURealtimePeriod,
}
CPU_SET_FIELDS = {"cpus": api.CPUSetCPUs, "mems": api.CPUSetMems}
CLASS_FIELDS = {"blockio_class": api.BlockioClass, "rdt_class": api.RdtClass, "pids": api.PidsLimit}
WHOLE_FIELDS = {
    "oom_score_adj": api.OomScoreAdj,
    "io_priority": api.IoPriority,
    "seccomp_policy": api.SeccompPolicy,
    "scheduler": api.LinuxSched,
    "memory_policy": api.MemoryPolicy,
}
RDT_FIELDS = {
    "clos_id": api.RdtClosID,
    "schemata": api.RdtSchemata,
    "enable_monitoring": api.RdtEnableMonitoring,
}


def removal(key: str) -> str | None:
    """The key that `-KEY` asks to remove, None for an ordinary one."""
    return key[1:] if key.startswith(REMOVED) else None


class Merge:
    """The wishes of one request: to create `container`, to update it to `wanted`, or neither (a
    stop, a synchronization)."""

    def __init__(
        self,
        *,
        container: api.Container | None = None,
        updated: str = "",
        wanted: api.LinuxResources | None = None,
    ) -> None:
        self.container, self.wanted = container, wanted
        self.adjustment = api.ContainerAdjustment()
        self.updates: dict[str, api.ContainerUpdate] = {}
        self.evictions: list[api.ContainerEviction] = []
        self.owners = Owners()
        self._updated = updated

    def add(self, plugin: str, response: Any) -> None:
        """What `plugin` answered: a response of CreateContainer, UpdateContainer, StopContainer or
        Synchronize.

        Raises Conflict, PeerError (a wish that cannot be).
        """
        if self.container is not None and response.HasField("adjust"):
            self._adjust(plugin, response.adjust)
        for update in response.update:
            self._update(plugin, update)
        self.evictions += getattr(response, "evict", ())

    # -- the container that is being created

    def _adjust(self, plugin: str, given: api.ContainerAdjustment) -> None:
        assert self.container is not None
        current, result = self.container, self.adjustment
        self._pairs(
            plugin, api.Annotations, given.annotations, result.annotations, current.annotations
        )
        self._entries(
            plugin, api.Mounts, given.mounts, result.mounts, current.mounts, "destination"
        )
        self._environment(plugin, given.env)
        self._arguments(plugin, list(given.args))
        self._hooks(plugin, given.hooks)
        if given.HasField("linux"):
            self._linux(plugin, given.linux)
        self._rlimits(plugin, given.rlimits)
        for device in given.CDI_devices:
            self.owners.claim(current.id, api.CdiDevices, plugin, device.name)
            result.CDI_devices.append(device)

    def _linux(self, plugin: str, given: api.LinuxContainerAdjustment) -> None:
        assert self.container is not None
        identifier, current, result = self.container.id, self.container.linux, self.adjustment.linux
        self._entries(plugin, api.Devices, given.devices, result.devices, current.devices, "path")
        if given.HasField("resources"):
            targets = [current.resources, result.resources]
            self._resources(plugin, identifier, given.resources, targets)
            for target in targets:
                target.devices.extend(given.resources.devices)
        if given.cgroups_path:
            self.owners.claim(identifier, api.CgroupsPath, plugin)
            current.cgroups_path = result.cgroups_path = given.cgroups_path
        for name, field in WHOLE_FIELDS.items():
            if given.HasField(name):  # type: ignore[arg-type]
                self.owners.claim(identifier, field, plugin)
                getattr(result, name).CopyFrom(getattr(given, name))
                if name != "memory_policy":  # which a container's message does not have
                    getattr(current, name).CopyFrom(getattr(given, name))
        self._namespaces(plugin, given.namespaces)
        self._pairs(plugin, api.Sysctl, given.sysctl, result.sysctl, current.sysctl)
        self._pairs(
            plugin, api.LinuxNetDevices, given.net_devices, result.net_devices, current.net_devices
        )
        if given.HasField("rdt"):
            self._rdt(plugin, given.rdt)

    def _pairs(self, plugin: str, field: int, given: Any, result: Any, current: Any) -> None:
        """Maps: `-KEY` removes, and with KEY beside it replaces."""
        assert self.container is not None
        for key in given:
            name = removal(key)
            if name is not None:
                self.owners.clear(self.container.id, field, plugin, name)
                current.pop(name, None)
                result.pop(name, None)
                _set(result, key, given[key])
        for key in given:
            if removal(key) is None:
                self.owners.claim(self.container.id, field, plugin, key)
                _set(current, key, given[key])
                _set(result, key, given[key])
                result.pop(REMOVED + key, None)

    def _entries(
        self, plugin: str, field: int, given: Any, result: Any, current: Any, key: str
    ) -> None:
        """Lists whose entries have a name, in the field `key`."""
        if not given:
            return
        names = {getattr(entry, key) for entry in given}
        removed = {name for name in (removal(n) for n in names) if name is not None}
        for gone in removed:
            self._clear_entry(plugin, field, gone)
        _keep(result, lambda entry: getattr(entry, key) not in removed)
        _keep(current, lambda entry: getattr(entry, key) not in removed | names)
        for entry in given:
            name = removal(getattr(entry, key))
            if name is None:
                self._claim_entry(plugin, field, getattr(entry, key))
                result.append(entry)
                current.append(entry)
            elif name not in names:
                result.append(entry)

    def _environment(self, plugin: str, given: Sequence[api.KeyValue]) -> None:
        """As `_entries`, where the container has lines."""
        assert self.container is not None
        if not given:
            return
        lines = {line.partition("=")[0]: line for line in self.container.env}
        current = [
            api.KeyValue(key=key, value=line.partition("=")[2]) for key, line in lines.items()
        ]
        self._entries(plugin, api.Env, given, self.adjustment.env, current, "key")
        self.container.env[:] = [f"{entry.key}={entry.value}" for entry in current]

    def _clear_entry(self, plugin: str, field: int, name: str) -> None:
        assert self.container is not None
        self.owners.clear(self.container.id, field, plugin, name)

    def _claim_entry(self, plugin: str, field: int, name: str) -> None:
        assert self.container is not None
        self.owners.claim(self.container.id, field, plugin, name)

    def _arguments(self, plugin: str, given: list[str]) -> None:
        """An empty first word takes over what another plugin has set."""
        assert self.container is not None
        if not given:
            return
        if not given[0]:
            self.owners.clear(self.container.id, api.Args, plugin)
            given = given[1:]
        self.owners.claim(self.container.id, api.Args, plugin)
        self.adjustment.args[:] = given
        self.container.args[:] = given

    def _hooks(self, plugin: str, given: api.Hooks) -> None:
        assert self.container is not None
        if given.ByteSize():
            self.adjustment.hooks.MergeFrom(given)
            self.container.hooks.MergeFrom(given)
            self.owners.add(self.container.id, api.OciHooks, plugin)

    def _namespaces(self, plugin: str, given: Iterable[api.LinuxNamespace]) -> None:
        assert self.container is not None
        for namespace in given:
            kind = removal(namespace.type)
            name = namespace.type if kind is None else kind
            self.owners.claim(self.container.id, api.Namespace, plugin, name)
            current = self.container.linux.namespaces
            _keep(current, lambda entry, name=name: entry.type != name)  # type: ignore[misc]
            if kind is None:
                current.append(namespace)
            self.adjustment.linux.namespaces.append(namespace)

    def _rdt(self, plugin: str, given: api.LinuxRdt) -> None:
        assert self.container is not None
        result = self.adjustment.linux.rdt
        if given.remove:
            for field in RDT_FIELDS.values():
                self.owners.clear(self.container.id, field, plugin)
            result.Clear()
            result.remove = True
        for name, field in RDT_FIELDS.items():
            if given.HasField(name):  # type: ignore[arg-type]
                self.owners.claim(self.container.id, field, plugin)
                getattr(result, name).CopyFrom(getattr(given, name))

    def _rlimits(self, plugin: str, given: Iterable[api.POSIXRlimit]) -> None:
        assert self.container is not None
        for limit in given:
            self.owners.claim(self.container.id, api.Rlimits, plugin, limit.type)
            _keep(self.container.rlimits, lambda entry, kind=limit.type: entry.type != kind)  # type: ignore[misc]
            self.container.rlimits.append(limit)
            self.adjustment.rlimits.append(limit)

    # -- resources of this and of other containers

    def _update(self, plugin: str, given: api.ContainerUpdate) -> None:
        identifier = given.container_id
        if self.container is not None and identifier == self.container.id:
            raise PeerError(f"NRI plugin {plugin} updates the container that is being created")
        if identifier == self._updated:
            assert self.wanted is not None
            target = self.wanted
        else:
            update = self.updates.get(identifier)
            if update is None:
                update = api.ContainerUpdate(
                    container_id=identifier, ignore_failure=given.ignore_failure
                )
                self.updates[identifier] = update
            update.ignore_failure = update.ignore_failure and given.ignore_failure
            target = update.linux.resources
        before, owners = api.LinuxResources(), self.owners.snapshot(identifier)
        before.CopyFrom(target)
        try:
            self._resources(plugin, identifier, given.linux.resources, [target])
        except Error:
            if not given.ignore_failure:
                raise
            target.CopyFrom(before)
            self.owners.restore(identifier, owners)

    def _resources(
        self,
        plugin: str,
        identifier: str,
        given: api.LinuxResources,
        targets: list[api.LinuxResources],
    ) -> None:
        """What is set in `given` is set in each of `targets`."""
        parts: tuple[tuple[Callable[[Any], Any], Mapping[str, api.Field]], ...] = (
            (lambda resources: resources.memory, MEMORY_FIELDS),
            (lambda resources: resources.cpu, CPU_FIELDS),
            (lambda resources: resources, CLASS_FIELDS),
        )
        for part, fields in parts:
            for name, field in fields.items():
                if part(given).HasField(name):
                    self.owners.claim(identifier, field, plugin)
                    for target in targets:
                        getattr(part(target), name).CopyFrom(getattr(part(given), name))
        for name, field in CPU_SET_FIELDS.items():
            if getattr(given.cpu, name):
                self.owners.claim(identifier, field, plugin)
                for target in targets:
                    setattr(target.cpu, name, getattr(given.cpu, name))
        for limit in given.hugepage_limits:
            self.owners.claim(identifier, api.HugepageLimits, plugin, limit.page_size)
            for target in targets:
                size = limit.page_size
                _keep(target.hugepage_limits, lambda entry, size=size: entry.page_size != size)  # type: ignore[misc]
                target.hugepage_limits.append(limit)
        for key, value in given.unified.items():
            self.owners.claim(identifier, api.CgroupsUnified, plugin, key)
            for target in targets:
                target.unified[key] = value


def _set(pairs: Any, key: str, value: Any) -> None:
    """Maps of messages have no item assignment."""
    if isinstance(value, str):
        pairs[key] = value
    else:
        pairs[key].CopyFrom(value)


def _keep(entries: Any, wanted: Callable[[Any], bool]) -> None:
    """Drop the entries of a list or repeated field that are not wanted."""
    kept = [entry for entry in entries if wanted(entry)]
    del entries[:]
    entries.extend(kept)
