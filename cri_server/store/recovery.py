"""What a started server does before it answers: read the records, ask the shims, finish what was half done.

States are derived from what is found, never taken from memory: a container that exited while nobody was there has its exit
record, one whose shim is gone is ended, and after a reboot everything has ended. A damaged record is put aside; it never
keeps the server from starting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cri_server.services import Services
from cri_server.store import disk
from cri_server.store.facts import Process, boot_time_ns, entries
from cri_server.store.model import Container, Exit, Sandbox
from pyrunc import record
from pyrunc.errors import Error, NotFound
from pyrunc.shim.client import ContainerState, ShimClient

log = logging.getLogger(__name__)

SHIM_TIMEOUT_S = 2.0
UNKNOWN, UNKNOWN_CODE = "Unknown", 255

Thing = TypeVar("Thing")


async def recover(services: Services) -> None:
    """Fill the index. Nothing that is wrong with one object concerns another."""
    paths = services.paths
    for sandbox in _load(paths.sandbox_records, Sandbox.from_record):
        services.index.sandboxes.add(sandbox)
    orphans = []
    for container in _load(paths.container_records, Container.from_record):
        known = services.index.sandboxes.find(container.sandbox_id) is not None
        services.index.containers.add(container) if known else orphans.append(container.id)
    await asyncio.gather(*(_guarded(_recover_sandbox, services, s) for s in services.index.sandboxes))
    await asyncio.gather(*(_guarded(_drop_sandbox, services, i) for i in _half_made_sandboxes(services)))
    await asyncio.gather(
        *(_guarded(_drop_container, services, i) for i in {*orphans, *_half_made_containers(services)})
    )
    log.info(
        "recovered %d sandboxes and %d containers",
        len(services.index.sandboxes),
        len(services.index.containers),
    )


def live_networks(services: Services) -> list[str]:
    """Ids of the sandboxes that hold an attachment, and of those that are being made."""
    attached = [s.id for s in services.index.sandboxes if s.network == "attached"]
    return attached + list(services.pending)


def _load(folder: Path, parse: Callable[[dict[str, Any]], Thing]) -> list[Thing]:
    found = []
    for name in entries(folder):
        if name.endswith(".tmp"):
            (folder / name).unlink()
    for identifier in disk.records_in(folder):
        path = folder / f"{identifier}.json"
        try:
            content = record.read_json(str(path))
            if content.get("id") != identifier:
                raise record.DamagedRecord(f"{path}: not the record of {identifier}")
            found.append(parse(content))
        except (Error, OSError) as error:
            log.error("record put aside: %s", error)
            _put_aside(path)
    return found


def _put_aside(path: Path) -> None:
    try:
        path.rename(path.with_suffix(".damaged"))
    except OSError as error:
        log.error("%s: %s", path, error)


async def _guarded(work: Callable[..., Any], services: Services, subject: Any) -> None:
    try:
        await work(services, subject)
    except Exception as error:
        log.exception("recovery of %s: %s", getattr(subject, "id", subject), error)


async def _recover_sandbox(services: Services, sandbox: Sandbox) -> None:
    containers = services.index.containers_of(sandbox)
    if sandbox.boot_id != services.node.boot_id:
        _ended_with_the_boot(services, containers)
        return
    for container in containers:
        services.shims.read_facts(container)
        if not services.paths.container_state(container.id).is_dir():
            container.ended(Exit(UNKNOWN_CODE, container.created_at_ns, reason=UNKNOWN))
    try:
        client = await services.shims.connect(sandbox)
        await asyncio.wait_for(_ask(client, sandbox, containers), SHIM_TIMEOUT_S)
    except NotFound:
        await services.shims.end_orphans(sandbox)
    except (Error, TimeoutError) as error:
        log.warning("sandbox %s: its shim does not answer: %s", sandbox.id, error)
        services.shims.drop(sandbox)
        sandbox.holder_alive = bool(sandbox.holder and sandbox.holder.alive())
        for container in containers:
            container.lost = container.exit is None and container.process is not None


async def _ask(client: ShimClient, sandbox: Sandbox, containers: list[Container]) -> None:
    state = await client.state()
    sandbox.holder_alive = state.holder_running
    if state.holder is not None:
        sandbox.holder = Process(state.holder.pid, state.holder.start_time)
    known = {entry.id: entry for entry in state.containers}
    for container in containers:
        if container.id in known:
            _learn(container, known[container.id])


def _learn(container: Container, entry: ContainerState) -> None:
    if entry.pid:
        container.process = Process(entry.pid, entry.start_time)
    container.started_at_ns = container.started_at_ns or entry.started_at_ns
    if entry.exit is not None:
        e = entry.exit
        container.ended(Exit(e.exit_code, e.finished_at_ns, e.oom_killed, e.reason or "", e.message or ""))


def _ended_with_the_boot(services: Services, containers: list[Container]) -> None:
    for container in containers:
        services.shims.read_facts(container)
        if container.exit is None:
            container.ended(Exit(UNKNOWN_CODE, boot_time_ns(), reason=UNKNOWN))


def _half_made_sandboxes(services: Services) -> list[str]:
    known = services.index.sandboxes
    found = set(entries(services.paths.sandbox_states))
    found |= {name for name in entries(services.paths.sandbox_records) if "." not in name}
    return [name for name in found if known.find(name) is None]


def _half_made_containers(services: Services) -> list[str]:
    known = services.index.containers
    found = set(entries(services.paths.container_states))
    found |= {name for name in entries(services.paths.container_records) if "." not in name}
    return [name for name in found if known.find(name) is None]


async def _drop_sandbox(services: Services, identifier: str) -> None:
    """A sandbox that was never finished: nobody was told its id, so it goes."""
    folder = services.paths.sandbox_state(identifier)
    netns_path = None
    try:
        client = await ShimClient.connect(folder)
        state = await asyncio.wait_for(client.state(), SHIM_TIMEOUT_S)
        netns_path = state.holder.netns_path if state.holder else None
        await services.network.detach(identifier, netns_path)
        await client.stop_holder()
        await client.shutdown()
    except (NotFound, TimeoutError):
        await services.network.detach(identifier, None)
    await services.shims.wait_for_forks(identifier)
    await services.shims.kill_group(_cgroups_path(folder), identifier)
    await disk.delete_sandbox_folders(services.paths, identifier)
    log.info("dropped sandbox %s, which was never finished", identifier)


def _cgroups_path(folder: Path) -> str:
    try:
        return str(record.read_json(str(folder / "holder.json")).get("cgroups_path", ""))
    except (Error, OSError):
        return ""


async def _drop_container(services: Services, identifier: str) -> None:
    """A container without a record or without a sandbox: it was being made or removed."""
    await disk.forget(services.paths.container_record(identifier))
    await disk.delete_container_folders(services.paths, identifier)
    log.info("dropped what was left of container %s", identifier)
