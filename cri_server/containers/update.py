"""UpdateContainerResources: changes a running container's cgroup, and the container's spec and
record."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.containers import launch
from cri_server.operations.steps import Step, Steps
from cri_server.operations.tasks import finish_in_thread
from cri_server.services import Services
from cri_server.spec import groups, resources
from cri_server.store import disk
from cri_server.store.model import Container
from pyrunc import atomic_file
from pyrunc.errors import InvalidArgument, WrongState
from pyrunc.kernel import cgroup
from pyrunc.kernel.full import disk_errors


@dataclass(slots=True)
class UpdateContext:
    """A container whose limits change. `before`: the old limits, to be restored after a failure."""

    services: Services
    container: Container
    changes: api.LinuxContainerResources
    merged: api.LinuxContainerResources
    before: api.LinuxContainerResources


async def update(services: Services, reference: str, changes: api.LinuxContainerResources) -> None:
    """Change a container's limits. Fields of `changes` that are zero leave their limits unchanged.
    Raises NotFound, WrongState (exited), InvalidArgument, KernelError."""
    container = services.index.containers.get(reference)
    resources.check(changes)
    _require_not_exited(container)
    await apply(services, container, await services.observer.update_container(container, changes))
    await services.observer.updated_container(container)


def _require_not_exited(container: Container) -> None:
    if container.state not in (api.CONTAINER_CREATED, api.CONTAINER_RUNNING):
        raise WrongState(f"container {container.id} has exited")


async def apply(
    services: Services, container: Container, changes: api.LinuxContainerResources
) -> None:
    """Change the limits of `container` without calling NRI plugins. Fields of `changes` that are
    zero leave their limits unchanged. Raises WrongState (exited), InvalidArgument, KernelError."""
    async with container.lock:
        _require_not_exited(container)
        merged = resources.merge(container.resources, changes)
        resources.check(merged)
        await STEPS.run(UpdateContext(services, container, changes, merged, container.resources))


async def write_cgroup(context: UpdateContext) -> None:
    if context.container.running:
        # Shielded, because the undo must not run before the write has ended.
        await finish_in_thread(lambda: _write(context, context.merged, context.changes))


async def restore_cgroup(context: UpdateContext) -> None:
    if context.container.running:
        await asyncio.to_thread(_write, context, context.before, context.before)


def _write(
    context: UpdateContext, whole: api.LinuxContainerResources, changed: api.LinuxContainerResources
) -> None:
    """Write the cgroup files of the limits in `changed`. `whole`: all limits of the container after
    the change. If `changed` has memory or swap, both are written from `whole`. Raises KernelError,
    and InvalidArgument for a memory limit below the usage."""
    settings = context.services.config.cgroup
    group = groups.place(context.container.cgroups_path, context.container.id)
    limits = resources.to_oci(changed)
    if "memory" in limits:
        # OCI's `swap` is memory and swap together, memory.swap.max their difference, so it changes
        # with either.
        limits["memory"] = resources.to_oci(whole)["memory"]
        _refuse_less_than_used(group.directory, limits["memory"].get("limit", 0))
    with launch.limit_errors(context.container):
        group.update(limits, settings.missing_controllers)


def _refuse_less_than_used(directory: str, limit_bytes: int) -> None:
    """Raise InvalidArgument for a memory limit below the usage: the OOM killer would end the
    container."""
    used = cgroup.read(directory, "memory.current")
    # cgroup v1 refused such a limit with EBUSY; v2 takes it, and kills where reclaiming does not
    # suffice (memory.max in Linux' cgroup-v2.rst; `checkBeforeUpdate` of runtime-spec).
    if used is not None and 0 < limit_bytes < int(used):
        raise InvalidArgument(
            f"memory limit {limit_bytes} is less than the {int(used)} bytes in use"
        )


async def write_spec(context: UpdateContext) -> None:
    await launch.drop(context.services, context.container)
    _change_spec(context, context.merged)


async def restore_spec(context: UpdateContext) -> None:
    _change_spec(context, context.before)


def _change_spec(context: UpdateContext, limits: api.LinuxContainerResources) -> None:
    path = str(context.services.paths.container_state(context.container.id) / "config.json")
    with disk_errors("write", path):
        spec: dict[str, Any] = atomic_file.read_json(path)
        oci_resources = resources.without_hugepages(
            resources.to_oci(limits), context.services.node.cgroup_controllers
        )
        spec["linux"]["resources"] = resources.replace(spec["linux"]["resources"], oci_resources)
        spec["process"]["oomScoreAdj"] = resources.clamp_oom_score_adj(
            limits.oom_score_adj, context.services.node.oom_score_adj_floor
        )
        atomic_file.write_json(path, spec)


async def save(context: UpdateContext) -> None:
    context.container.resources = context.merged
    await disk.save_container(context.services.paths, context.container)


async def restore_record(context: UpdateContext) -> None:
    if context.container.resources is not context.before:
        context.container.resources = context.before
        await disk.save_container(context.services.paths, context.container)


STEPS: Steps[UpdateContext] = Steps(
    "update_container",
    [
        Step("cgroup", write_cgroup, restore_cgroup),
        Step("spec", write_spec, restore_spec),
        Step("record", save, restore_record),
    ],
)
