"""Merges the responses of plugins to one request, and stores which plugin owns each field.

`container` and `limits` include the changes of all plugins merged so far, and the next plugin gets
both. The result is `adjustment`, `updates` of other containers, and `evictions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cri_server.api import nri_pb2 as api
from cri_server.nri.convert import CPU, CPU_SETS, MEMORY
from cri_server.nri.owners import REMOVED, Owners
from cri_server.store.model import copy
from pyrunc.errors import Error, PeerError

MEMORY_FIELDS = {name: field.number for name, field in MEMORY.items()}
CPU_FIELDS = {name: field.number for name, field in CPU.items()}
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
    """Return KEY if `key` is `-KEY`, which asks for the removal of KEY; else None."""
    return key[1:] if key.startswith(REMOVED) else None


class Merge:
    """Merges the responses of all plugins to one request.

    - `container`: for CreateContainer, the container to create.
    - `updated`, `limits`: for UpdateContainer, the container's id and its new limits.

    Other requests (StopContainer, Synchronize) have none of these arguments.
    """

    def __init__(
        self,
        *,
        container: api.Container | None = None,
        updated: str = "",
        limits: api.LinuxResources | None = None,
    ) -> None:
        self._is_creation = container is not None
        self.container, self.limits = container or api.Container(), limits
        self.adjustment = api.ContainerAdjustment()
        self.updates: dict[str, api.ContainerUpdate] = {}
        self.evictions: list[api.ContainerEviction] = []
        self.owners = Owners()
        self._updated = updated

    def add(self, plugin: str, response: Any) -> None:
        """Merge a plugin's response to CreateContainer, UpdateContainer, StopContainer or
        Synchronize.

        Raises Conflict when another plugin has set the same field, PeerError when the plugin
        updates the container that is being created. An update with `ignore_failure` that conflicts
        is dropped instead.
        """
        if self._is_creation and response.HasField("adjust"):
            self._adjust(plugin, response.adjust)
        for update in response.update:
            self._update(plugin, update)
        self.evictions += getattr(response, "evict", ())

    # -- the container to create

    def _adjust(self, plugin: str, adjustment: api.ContainerAdjustment) -> None:
        current, result = self.container, self.adjustment
        self._pairs(
            plugin, api.Annotations, adjustment.annotations, result.annotations, current.annotations
        )
        self._entries(
            plugin, api.Mounts, adjustment.mounts, result.mounts, current.mounts, "destination"
        )
        self._environment(plugin, adjustment.env)
        self._arguments(plugin, list(adjustment.args))
        self._hooks(plugin, adjustment.hooks)
        if adjustment.HasField("linux"):
            self._linux(plugin, adjustment.linux)
        self._rlimits(plugin, adjustment.rlimits)
        for device in adjustment.CDI_devices:
            self.owners.claim(current.id, api.CdiDevices, plugin, device.name)
            result.CDI_devices.append(device)

    def _linux(self, plugin: str, adjustment: api.LinuxContainerAdjustment) -> None:
        identifier, current, result = self.container.id, self.container.linux, self.adjustment.linux
        self._entries(
            plugin, api.Devices, adjustment.devices, result.devices, current.devices, "path"
        )
        if adjustment.HasField("resources"):
            targets = [current.resources, result.resources]
            self._resources(plugin, identifier, adjustment.resources, targets)
            for target in targets:
                target.devices.extend(adjustment.resources.devices)
        if adjustment.cgroups_path:
            self.owners.claim(identifier, api.CgroupsPath, plugin)
            current.cgroups_path = result.cgroups_path = adjustment.cgroups_path
        for name, field in WHOLE_FIELDS.items():
            if adjustment.HasField(name):  # type: ignore[arg-type]
                self.owners.claim(identifier, field, plugin)
                getattr(result, name).CopyFrom(getattr(adjustment, name))
                if name != "memory_policy":  # not a field of Container
                    getattr(current, name).CopyFrom(getattr(adjustment, name))
        self._namespaces(plugin, adjustment.namespaces)
        self._pairs(plugin, api.Sysctl, adjustment.sysctl, result.sysctl, current.sysctl)
        self._pairs(
            plugin,
            api.LinuxNetDevices,
            adjustment.net_devices,
            result.net_devices,
            current.net_devices,
        )
        if adjustment.HasField("rdt"):
            self._rdt(plugin, adjustment.rdt)

    def _pairs(self, plugin: str, field: int, changes: Any, result: Any, current: Any) -> None:
        """Merge `changes`, a map in a plugin's response, into the maps `result` (of the adjustment)
        and `current` (of the container). The key `-KEY` removes KEY; `-KEY` and KEY in one response
        replace KEY's value. `field`: the map's number in `api.Field`. Raises Conflict when another
        plugin has set the key."""
        for key in changes:
            name = removal(key)
            if name is not None:
                self.owners.clear(self.container.id, field, plugin, name)
                current.pop(name, None)
                result.pop(name, None)
                _set(result, key, changes[key])
        for key in changes:
            if removal(key) is None:
                self.owners.claim(self.container.id, field, plugin, key)
                _set(current, key, changes[key])
                _set(result, key, changes[key])
                result.pop(REMOVED + key, None)

    def _entries(
        self, plugin: str, field: int, changes: Any, result: Any, current: Any, key: str
    ) -> None:
        """Merge `changes`, a list in a plugin's response, into the lists `result` (of the
        adjustment) and `current` (of the container). `key`: the field with an element's name; an
        element named `-NAME` removes the element NAME. `field`: the list's number in `api.Field`.
        Raises Conflict when another plugin has set the element."""
        if not changes:
            return
        names = {getattr(entry, key) for entry in changes}
        removed = {name for name in (removal(n) for n in names) if name is not None}
        for removed_name in removed:
            self.owners.clear(self.container.id, field, plugin, removed_name)
        _keep(result, lambda entry: getattr(entry, key) not in removed)
        _keep(current, lambda entry: getattr(entry, key) not in removed | names)
        for entry in changes:
            name = removal(getattr(entry, key))
            if name is None:
                self.owners.claim(self.container.id, field, plugin, getattr(entry, key))
                result.append(entry)
                current.append(entry)
            elif name not in names:
                result.append(entry)

    def _environment(self, plugin: str, variables: Sequence[api.KeyValue]) -> None:
        """Merge environment variables by name. Converts the container's variables from NAME=VALUE
        to the pairs that plugins send, and back."""
        if not variables:
            return
        lines = {line.partition("=")[0]: line for line in self.container.env}
        current = [
            api.KeyValue(key=key, value=line.partition("=")[2]) for key, line in lines.items()
        ]
        self._entries(plugin, api.Env, variables, self.adjustment.env, current, "key")
        self.container.env[:] = [f"{entry.key}={entry.value}" for entry in current]

    def _arguments(self, plugin: str, arguments: list[str]) -> None:
        """Replace the container's process arguments. Raises Conflict if another plugin has set
        them, unless `arguments` begins with an empty word, which is dropped."""
        if not arguments:
            return
        if not arguments[0]:
            self.owners.clear(self.container.id, api.Args, plugin)
            arguments = arguments[1:]
        self.owners.claim(self.container.id, api.Args, plugin)
        self.adjustment.args[:] = arguments
        self.container.args[:] = arguments

    def _hooks(self, plugin: str, hooks: api.Hooks) -> None:
        if hooks.ByteSize():
            self.adjustment.hooks.MergeFrom(hooks)
            self.container.hooks.MergeFrom(hooks)
            self.owners.add(self.container.id, api.OciHooks, plugin)

    def _namespaces(self, plugin: str, namespaces: Iterable[api.LinuxNamespace]) -> None:
        for namespace in namespaces:
            kind = removal(namespace.type)
            name = namespace.type if kind is None else kind
            self.owners.claim(self.container.id, api.Namespace, plugin, name)
            current = self.container.linux.namespaces
            _keep(current, lambda entry, name=name: entry.type != name)  # type: ignore[misc]
            if kind is None:
                current.append(namespace)
            self.adjustment.linux.namespaces.append(namespace)

    def _rdt(self, plugin: str, rdt: api.LinuxRdt) -> None:
        result = self.adjustment.linux.rdt
        # The removal comes first, so that a plugin can replace the whole object in one response.
        if rdt.remove:
            for field in RDT_FIELDS.values():
                self.owners.clear(self.container.id, field, plugin)
            result.Clear()
            result.remove = True
        for name, field in RDT_FIELDS.items():
            if rdt.HasField(name):  # type: ignore[arg-type]
                self.owners.claim(self.container.id, field, plugin)
                getattr(result, name).CopyFrom(getattr(rdt, name))

    def _rlimits(self, plugin: str, limits: Iterable[api.POSIXRlimit]) -> None:
        for limit in limits:
            self.owners.claim(self.container.id, api.Rlimits, plugin, limit.type)
            _keep(
                self.container.rlimits,
                lambda entry, kind=limit.type: entry.type != kind,  # type: ignore[misc]
            )
            self.container.rlimits.append(limit)
            self.adjustment.rlimits.append(limit)

    # -- resources of this and of other containers

    def _update(self, plugin: str, request: api.ContainerUpdate) -> None:
        identifier = request.container_id
        if self._is_creation and identifier == self.container.id:
            raise PeerError(
                f"NRI plugin {plugin} must adjust, not update, the container that is being created"
            )
        if identifier == self._updated:
            assert self.limits is not None
            target = self.limits
        else:
            update = self.updates.get(identifier)
            if update is None:
                update = api.ContainerUpdate(
                    container_id=identifier, ignore_failure=request.ignore_failure
                )
                self.updates[identifier] = update
            update.ignore_failure = update.ignore_failure and request.ignore_failure
            target = update.linux.resources
        # An update with `ignore_failure` is applied as a whole or not at all.
        before, owners = copy(target), self.owners.snapshot(identifier)
        try:
            self._resources(plugin, identifier, request.linux.resources, [target])
        except Error:
            if not request.ignore_failure:
                raise
            target.CopyFrom(before)
            self.owners.restore(identifier, owners)

    def _resources(
        self,
        plugin: str,
        identifier: str,
        changes: api.LinuxResources,
        targets: list[api.LinuxResources],
    ) -> None:
        """Copy each resource field that is set in `changes` to all `targets`, and make `plugin` its
        owner in the container `identifier`. Raises Conflict."""
        parts: tuple[tuple[Callable[[Any], Any], Mapping[str, api.Field]], ...] = (
            (lambda resources: resources.memory, MEMORY_FIELDS),
            (lambda resources: resources.cpu, CPU_FIELDS),
            (lambda resources: resources, CLASS_FIELDS),
        )
        for part, fields in parts:
            for name, field in fields.items():
                if part(changes).HasField(name):
                    self.owners.claim(identifier, field, plugin)
                    for target in targets:
                        getattr(part(target), name).CopyFrom(getattr(part(changes), name))
        for name, field in CPU_SETS.items():
            if getattr(changes.cpu, name):
                self.owners.claim(identifier, field, plugin)
                for target in targets:
                    setattr(target.cpu, name, getattr(changes.cpu, name))
        for limit in changes.hugepage_limits:
            self.owners.claim(identifier, api.HugepageLimits, plugin, limit.page_size)
            for target in targets:
                size = limit.page_size
                _keep(
                    target.hugepage_limits,
                    lambda entry, size=size: entry.page_size != size,  # type: ignore[misc]
                )
                target.hugepage_limits.append(limit)
        for key, value in changes.unified.items():
            self.owners.claim(identifier, api.CgroupsUnified, plugin, key)
            for target in targets:
                target.unified[key] = value


def _set(pairs: Any, key: str, value: Any) -> None:
    """Set an entry of a map; maps of messages do not support item assignment."""
    if isinstance(value, str):
        pairs[key] = value
    else:
        pairs[key].CopyFrom(value)


def _keep(entries: Any, predicate: Callable[[Any], bool]) -> None:
    """Remove from `entries`, a repeated field, each entry for which `predicate` returns False."""
    remaining = [entry for entry in entries if predicate(entry)]
    del entries[:]
    entries.extend(remaining)
