"""Starts and stops the server: opens its services in order, loads pods and images, then listens.

The event loop must not block, fork or enter a namespace. So a zygote forks the shims and the jobs,
and threads wait for disks. Pods keep running when the server ends, even after SIGKILL: their shims
descend from the keeper (pause/keeper.c), a subreaper that outlives server and shims.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from cri_server.config import Config
from cri_server.containers.rotate_logs import rotate_logs
from cri_server.containers.sessions import Sessions
from cri_server.doctor.startup import log_problems
from cri_server.images.service import ImageService as Images
from cri_server.images.store import layer_maker
from cri_server.images.store.layer_jobs import LayerJobs
from cri_server.images.store.mount_store import MountStore
from cri_server.network.service import NetworkService
from cri_server.node import host
from cri_server.observability import debug, events, meters
from cri_server.observability.events import Events
from cri_server.observability.logs import fields
from cri_server.observability.timeline.export import Exporter
from cri_server.operations.tasks import background, gather
from cri_server.pod.keeper import KeeperWatch
from cri_server.pod.processes import ShimProcesses
from cri_server.pod.shims import Shims
from cri_server.recovery import live_networks, load, recover
from cri_server.reload import (
    Read,
    certificate_folders,
    configure_log,
    default_network,
    reload_on_request,
)
from cri_server.rpc import methods, verbs
from cri_server.rpc.admin import Admin
from cri_server.rpc.image import ImageHandlers
from cri_server.rpc.image_admin import ImageAdmin
from cri_server.rpc.runtime import RuntimeService
from cri_server.rpc.server import Server
from cri_server.services import Services
from cri_server.status import sandbox as status
from cri_server.store import disk, file_system
from cri_server.store.claim import claimed
from cri_server.store.index import StoreIndex
from cri_server.store.model import Container, Sandbox
from cri_server.store.paths import Paths
from cri_server.streaming.server import StreamingServer
from cri_server.streaming.tls import Tls
from cri_server.systemd import notify
from cri_server.systemd.descriptor_store import receive
from cri_server.zygote.client import Zygote
from pyrunc.errors import Error, WrongState

log = logging.getLogger(__name__)

RECONCILE_INTERVAL_S = 10.0
REPLACE_AGAIN_S = 60.0
# More than Python's default of processors + 4: threads that wait for hanging storage must not take
# the places of all others.
THREADS = 32
SHIM_MODULES = ["pyrunc.shim.main"]
JOB_MODULES = [
    "cri_server.zygote.jobs",
    "cri_server.security.selinux.relabel",
    "cri_server.doctor.job",
    *layer_maker.JOB_MODULES,
    "cni_plugins.jobs",
]


def serve(config: Config, read: Read) -> None:
    """Run the server until SIGTERM or SIGINT. On SIGHUP, call `read` and apply the configuration
    that it returns. Raises Error if the server cannot start."""
    configure_log(config)
    received = receive(os.environ)
    prepare_process()
    debug.enable_signal()
    asyncio.run(_serve(config, read, received))


def prepare_process() -> None:
    """Set the umask, forbid core dumps (they hold pull secrets) and raise RLIMIT_NOFILE."""
    os.umask(0o022)
    for number, soft in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, None)):
        # Only soft limits change: containers inherit hard limits, and raising one again needs
        # CAP_SYS_RESOURCE.
        hard = resource.getrlimit(number)[1]
        resource.setrlimit(number, (hard if soft is None else soft, hard))


async def _serve(config: Config, read: Read, received: Mapping[str, int]) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="disk"))
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    changed = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, changed.set)
    async with contextlib.AsyncExitStack() as stack:
        services = open_services(config, stack, received)
        await _run_until(stopping, _start(services, read, changed, stack))
        await stopping.wait()
        log.info("the server stops, its pods continue")


async def _run_until(stopping: asyncio.Event, starting: Coroutine[Any, Any, None]) -> None:
    """Run `starting` to its end, or cancel it when `stopping` is set. Raises any error of
    `starting`."""
    # A start may take minutes, for imports or images, and systemd kills a unit that does not stop
    # within TimeoutStopSec=.
    start, stop = asyncio.create_task(starting), asyncio.create_task(stopping.wait())
    await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
    for task in (stop, start):
        task.cancel()
    await asyncio.wait([start, stop])
    if not start.cancelled():
        start.result()


async def _start(
    services: Services, read: Read, changed: asyncio.Event, stack: contextlib.AsyncExitStack
) -> None:
    without_sandbox = load(services)
    # Concurrently, because both mostly wait for the kernel.
    await gather(services.images.start(), recover(services, without_sandbox))
    _begin_imports(services)
    await open_nri(services, stack)
    streaming = await open_streaming(services, stack)
    server = await open_grpc(services, streaming, stack)
    await open_metrics(services, server, streaming, stack)
    await services.zygote.ready()
    await services.shims.processes.ready()
    replaced = await services.shims.replace_outdated()
    for work, name in (
        (_reconcile(services), "reconcile networks"),
        (rotate_logs(services), "rotate logs"),
        (_replace_shims(services, done=replaced), "replace shims"),
        (reload_on_request(services, read, changed), "reload"),
    ):
        await stack.enter_async_context(background(work, name))
    # READY=1 comes after the socket listens: units with After=pyrunc-cri.service, such as
    # kubelet's, start then.
    await stack.enter_async_context(notify.supervised())
    log.info("serving at %s", services.config.server.listen)
    doctor = log_problems(services.zygote, services.config)
    await stack.enter_async_context(background(doctor, "doctor"))


async def _replace_shims(services: Services, *, done: bool) -> None:
    """Replace the remaining shims of another version, which could not write a log, for example on
    a full disk: try once a minute, and return when all are replaced. `done`: all are replaced
    already."""
    while not done:
        await asyncio.sleep(REPLACE_AGAIN_S)
        try:
            done = await services.shims.replace_outdated()
        except (Error, OSError) as error:
            log.warning("cannot replace shims of another version, trying again: %s", error)


def _begin_imports(services: Services) -> None:
    """Start the zygote, the keeper, and shims for the next pods, in the background. The zygote's
    imports take about 0.2 s of CPU time."""
    # Earlier imports would slow the recovery and so kubelet's first lists; later ones would slow
    # its first pods.
    services.zygote.begin()
    if services.keeper is not None:
        services.keeper.begin()
    services.shims.processes.begin()


def open_services(
    config: Config, stack: contextlib.AsyncExitStack, received: Mapping[str, int]
) -> Services:
    """Create the services that CRI calls use (images, network, shims, …). `stack` closes them in
    reverse order. `received`: descriptors from systemd's file descriptor store. Raises Error."""
    # The claim comes first: a second server with this root and another state directory would find
    # no shims, and end every pod.
    paths = stack.enter_context(claimed(config.root, config.state))
    file_system.check(paths)
    node = host.probe(config)
    # One zygote forks shims and jobs: they share many modules, and a second zygote would take
    # 3 MiB. It is a child of the keeper, because shims must descend from the keeper.
    zygote = Zygote([*SHIM_MODULES, *JOB_MODULES], keeper=str(paths.state))
    stack.push_async_callback(zygote.close)
    index = StoreIndex()
    shims = Shims(ShimProcesses(zygote, paths.shims, config.shims.count), paths, index)
    shims.time_operations(config.timeline.operations)
    stack.callback(shims.disconnect)
    images = _open_images(config, paths, index, zygote, MountStore(paths.state, received), stack)
    network = _open_network(config, paths, zygote, stack)
    services = Services(config, node, paths, index, images, network, shims, zygote, Events())
    services.keeper = KeeperWatch(paths.state, partial(_use_keeper, services))
    stack.push_async_callback(services.keeper.close)
    shims.on_moved = lambda sandbox: _moved(services, sandbox)
    shims.on_exit = lambda sandbox, container: _on_exit(services, sandbox, container)
    stack.callback(services.timeline.flush)
    if config.tracing.endpoint:
        services.tracing = Exporter(config.tracing.endpoint, config.tracing.sampling)
        stack.push_async_callback(services.tracing.close)
    services.trash.empty_soon()
    stack.push_async_callback(services.trash.close)
    stack.push_async_callback(_finish_operations, services)
    return services


def _open_images(
    config: Config,
    paths: Paths,
    index: StoreIndex,
    zygote: Zygote,
    mounts: MountStore,
    stack: contextlib.AsyncExitStack,
) -> Images:
    images = Images(
        paths.images,
        certificate_folders(config),
        config.images.pinned,
        jobs=LayerJobs(zygote),
        no_progress_timeout_s=config.registry.no_progress_timeout_s,
        in_use=index.users_of,
        store=config.images.store,
        keep_blobs=config.images.keep_blobs,
        mounts=mounts,
    )
    images.policy = config.registry.signature_policy
    stack.push_async_callback(images.close)
    return images


def _open_network(
    config: Config, paths: Paths, zygote: Zygote, stack: contextlib.AsyncExitStack
) -> NetworkService:
    network = NetworkService(
        config.network.conf_dir,
        config.network.bin_dir,
        str(paths.root / "network"),
        zygote,
        netns_dir=config.network.netns_dir,
        default=default_network(config, paths.root),
    )
    stack.callback(network.close)
    return network


async def _use_keeper(services: Services, replaced: bool) -> None:
    """Have a new keeper store the image mounts. If this keeper replaces a dead one (`replaced`),
    also start a new zygote and new shims, which then descend from this keeper."""
    await services.images.store_mounts()
    if replaced:
        await services.zygote.renew()
        await services.shims.processes.renew()


async def _moved(services: Services, sandbox: Sandbox) -> None:
    """Update the pod's record, and the record of its network, after another shim has taken over the
    pod."""
    await services.network.update_path(sandbox.id, sandbox.netns_path)
    if services.paths.sandbox_record(sandbox.id).exists():
        await disk.save_sandbox(services.paths, sandbox)


def _on_exit(services: Services, sandbox: Sandbox, container: Container | None) -> None:
    if container is None:
        status.publish_stopped(services, sandbox)
        return
    if container.exit is not None:
        ended = {"exit_code": container.exit.exit_code, "reason": container.exit.cri_reason}
        meters.EXITS[container.exit.cri_reason] += 1
        facts = {**verbs.of_container(services, container), **ended}
        log.info("container ended", extra=fields.of(**facts))
        services.timeline.add(
            {"call": "container ended", "started_at_ns": container.exit.finished_at_ns, **facts}
        )
    # StartContainer of a container that ends at once publishes both events itself, in their order.
    if not container.starting:
        status.publish(services, sandbox, container.id, events.STOPPED)
        if container.exit is not None:
            services.observer.container_ended(container)


async def open_nri(services: Services, stack: contextlib.AsyncExitStack) -> None:
    """Start the NRI plugins of the plugin folder, and accept connections of external NRI plugins.
    Does nothing unless `[nri] enabled` is set."""
    if services.config.nri.enabled:
        from cri_server.nri.service import NriObserver

        nri = NriObserver(services)
        services.observer = nri
        stack.push_async_callback(nri.close)
        await nri.start()


async def open_streaming(services: Services, stack: contextlib.AsyncExitStack) -> StreamingServer:
    """Start the HTTP server for exec, attach and port-forward. Raises WrongState if it cannot
    listen at its address."""
    settings = services.config.streaming
    tls = None
    if settings.tls_certificate:
        tls = Tls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    server = StreamingServer(Sessions(services), settings.host, settings.port, tls=tls)
    try:
        await server.start()
    except OSError as error:
        address = f"streaming.host {settings.host}, streaming.port {settings.port}"
        raise WrongState(f"{address}: cannot listen: {error.strerror or error}") from None
    stack.push_async_callback(server.close)
    return server


async def open_grpc(
    services: Services, streaming: StreamingServer, stack: contextlib.AsyncExitStack
) -> Server:
    """Start the gRPC server on its unix socket."""
    calls = methods.table(
        RuntimeService=RuntimeService(services, streaming), ImageService=ImageHandlers(services)
    )
    table = verbs.observed(
        services, {**calls, **Admin(services, streaming).table(), **ImageAdmin(services).table()}
    )
    settings = services.config.server
    server = Server(
        services.config.socket_path,
        table,
        owner=(settings.socket_uid, settings.socket_gid),
        mode=int(settings.socket_mode, 8),
    )
    await server.start()
    # The stack closes in reverse order: calls end before the parts that they use.
    stack.push_async_callback(server.stop, settings.shutdown_timeout_s)
    return server


async def open_metrics(
    services: Services,
    server: Server,
    streaming: StreamingServer,
    stack: contextlib.AsyncExitStack,
) -> None:
    """Start the HTTP endpoint for Prometheus metrics. Does nothing unless `[metrics] address` is
    set."""
    address = services.config.metrics.address
    if not address:
        return
    from cri_server.observability.telemetry import routes
    from cri_server.observability.telemetry.snapshot import MetricsSource

    endpoint = routes.endpoint(address, MetricsSource(services, server, streaming))
    await endpoint.start()
    stack.push_async_callback(endpoint.close)
    log.info("metrics at %s", address)


async def _finish_operations(services: Services) -> None:
    """Wait for running operations, at most `server.shutdown_timeout_s`, so that the next start has
    less to recover."""
    unfinished = await services.running.drain(services.config.server.shutdown_timeout_s)
    for name in unfinished:
        log.warning("the server stops before this operation has ended: %s", name)
    await services.shims.drain()


async def _reconcile(services: Services) -> None:
    """Every 10 s release the networks of pods that are gone, and restore missing nftables rules."""
    while True:
        try:
            for problem in await services.network.reconcile(partial(live_networks, services)):
                log.warning("network: %s", problem)
        except Error as error:
            log.warning(
                "network: cannot release networks without a pod or restore host rules: %s", error
            )
        except Exception:
            # The loop goes on: if it ended, addresses of lost pods would stay taken until a
            # restart.
            log.exception("network: unexpected error in reconciliation")
        await asyncio.sleep(RECONCILE_INTERVAL_S)
