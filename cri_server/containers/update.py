"""UpdateContainerResources: the cgroup of a running container, the spec of a created one, and the
record of both."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.containers import launch
from cri_server.operations.steps import Step, Steps
from cri_server.operations.tasks import shield_until_done
from cri_server.services import Services
from cri_server.spec import groups, resources
from cri_server.store import disk
from cri_server.store.model import Container
from pyrunc import atomic_file
from pyrunc.errors import InvalidArgument, WrongState
from pyrunc.kernel import cgroup as tree
from pyrunc.kernel.full import disk_errors


@dataclass(slots=True)
class Work:
    """A container whose limits change; the fields of `before` are what to go back to."""

    services: Services
    container: Container
    wanted: api.LinuxContainerResources
    merged: api.LinuxContainerResources
    before: api.LinuxContainerResources


async def update(services: Services, reference: str, wanted: api.LinuxContainerResources) -> None:
    """Fields that are zero stay as they are. Raises NotFound, WrongState (exited), InvalidArgument,
    KernelError."""
    container = services.index.containers.get(reference)
    resources.check(wanted)
    _expect_alive(container)
    await apply(services, container, await services.observer.update_container(container, wanted))
    await services.observer.updated_container(container)


def _expect_alive(container: Container) -> None:
    if container.state not in (api.CONTAINER_CREATED, api.CONTAINER_RUNNING):
        raise WrongState(f"container {container.id} has exited")


async def apply(
    services: Services, container: Container, wanted: api.LinuxContainerResources
) -> None:
    """As `update`, for a container at hand, without asking plugins."""
    async with container.lock:
        _expect_alive(container)
        merged = resources.merge(container.resources, wanted)
        resources.check(merged)
        await STEPS.run(Work(services, container, wanted, merged, container.resources))


async def write_cgroup(work: Work) -> None:
    if work.container.running:
        # its undo comes after it
        await shield_until_done(asyncio.to_thread(_write, work, work.merged, work.wanted))


async def restore_cgroup(work: Work) -> None:
    if work.container.running:
        await asyncio.to_thread(_write, work, work.before, work.before)


def _write(
    work: Work, whole: api.LinuxContainerResources, changed: api.LinuxContainerResources
) -> None:
    """The kernel files of what changed; memory and swap go together, whichever was asked for."""
    settings = work.services.config.cgroup
    group = groups.place(work.container.cgroups_path, work.container.id)
    limits = resources.to_oci(changed)
    if "memory" in limits:
        limits["memory"] = resources.to_oci(whole)["memory"]
        _refuse_less_than_used(group.directory, limits["memory"].get("limit", 0))
    with launch.limits_named(work.container):
        group.update(limits, settings.missing_controllers)


def _refuse_less_than_used(directory: str, limit_bytes: int) -> None:
    """Shrinking below what is used would end the container by the OOM killer."""
    used = tree.read(directory, "memory.current")
    if used is not None and 0 < limit_bytes < int(used):
        raise InvalidArgument(
            f"memory limit {limit_bytes} is less than the {int(used)} bytes in use"
        )


async def write_spec(work: Work) -> None:
    await launch.drop(work.services, work.container)
    _change_spec(work, work.merged)


async def restore_spec(work: Work) -> None:
    _change_spec(work, work.before)


def _change_spec(work: Work, limits: api.LinuxContainerResources) -> None:
    path = str(work.services.paths.container_state(work.container.id) / "config.json")
    with disk_errors("write", path):
        spec: dict[str, Any] = atomic_file.read_json(path)
        found = resources.without_hugepages(
            resources.to_oci(limits), work.services.node.cgroup_controllers
        )
        found["devices"] = spec["linux"]["resources"].get("devices", [])
        spec["linux"]["resources"] = found
        spec["process"]["oomScoreAdj"] = resources.clamp_oom_score_adj(
            limits.oom_score_adj, work.services.node.oom_score_adj_floor
        )
        atomic_file.write_json(path, spec)


async def save(work: Work) -> None:
    work.container.resources = work.merged
    await disk.save_container(work.services.paths, work.container)


async def unsave(work: Work) -> None:
    if work.container.resources is not work.before:
        work.container.resources = work.before
        await disk.save_container(work.services.paths, work.container)


STEPS: Steps[Work] = Steps(
    "update_container",
    [
        Step("cgroup", write_cgroup, restore_cgroup),
        Step("spec", write_spec, restore_spec),
        Step("record", save, unsave),
    ],
)
