"""The server from start to end: what it opens, in which order, and that it answers only once it
knows what is there.

The event loop never forks, blocks on foreign storage or enters a namespace: two zygotes fork
(shims; errands), threads wait for disks. Ending the server, in whatever way, leaves pods as they
are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cri_server.config import Config
from cri_server.containers.rotate_logs import rotating
from cri_server.containers.sessions import Sessions
from cri_server.images import layer_maker
from cri_server.images.service import ImageService as Images
from cri_server.network.service import Network
from cri_server.node import host
from cri_server.observability import debug, events, meters
from cri_server.observability.events import Events
from cri_server.observability.logs import fields
from cri_server.observability.timeline.export import Exporter
from cri_server.operations.tasks import together
from cri_server.pod.keeper import KeeperWatch
from cri_server.pod.processes import ShimProcesses
from cri_server.pod.shims import Shims
from cri_server.recovery import live_networks, recover
from cri_server.reload import Read, certificate_folders, configure_log, default_network, reloading
from cri_server.rpc import methods, verbs
from cri_server.rpc.admin import Admin
from cri_server.rpc.image import ImageService
from cri_server.rpc.image_admin import ImageAdmin
from cri_server.rpc.runtime import RuntimeService
from cri_server.rpc.server import Server
from cri_server.services import Services
from cri_server.status import sandbox as status
from cri_server.store import disk, file_system
from cri_server.store.claim import claimed
from cri_server.store.index import Index
from cri_server.store.model import Container, Sandbox
from cri_server.store.paths import Paths
from cri_server.streaming.server import StreamingServer
from cri_server.streaming.tls import Tls
from cri_server.systemd import notify
from cri_server.systemd.descriptor_store import DescriptorStore, receive
from cri_server.zygote.client import Zygote
from pyrunc.errors import Error, WrongState

log = logging.getLogger(__name__)

RECONCILE_INTERVAL_S = 10.0
THREADS = 32
SHIM_MODULES = ["pyrunc.shim.main"]
ERRAND_MODULES = [
    "cri_server.zygote.jobs",
    "cri_server.security.selinux.relabel",
    *layer_maker.ERRAND_MODULES,
    "cni_plugins.errand",
]


def serve(config: Config, read: Read) -> None:
    """Run the server until SIGTERM or SIGINT; `read` answers SIGHUP. Raises Error when it cannot
    start."""
    configure_log(config)
    stored = DescriptorStore(receive(os.environ))
    prepare_process()
    debug.enable_signal()
    asyncio.run(_serve(config, read, stored))


def prepare_process() -> None:
    """umask, no core dumps (they hold pull secrets), as many descriptors as permitted.

    Hard limits stay: a container may be given one of them, and raising one again may not be
    permitted.
    """
    os.umask(0o022)
    for number, soft in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, None)):
        hard = resource.getrlimit(number)[1]
        resource.setrlimit(number, (hard if soft is None else soft, hard))


async def _serve(config: Config, read: Read, stored: DescriptorStore) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="disk"))
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    changed = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, changed.set)
    async with contextlib.AsyncExitStack() as stack:
        services = open_services(config, stack, stored)
        await _unless(stopping, _start(services, read, changed, stack))
        await stopping.wait()
        log.info("stopping; pods stay")


async def _unless(stopping: asyncio.Event, starting: Coroutine[Any, Any, None]) -> None:
    """A start may take minutes, for imports or images; who ends the server meanwhile does not wait
    for it. Raises what it raises."""
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
    config = services.config
    await together(services.images.start(), recover(services))  # both wait for the kernel
    _begin(services)
    await open_nri(services, stack)
    streaming = await open_streaming(config, services, stack)
    server = await open_grpc(config, services, streaming, stack)
    await open_metrics(config, services, server, streaming, stack)
    await asyncio.gather(*(zygote.ready() for zygote in services.zygotes.values()))
    await services.shims.processes.ready()
    await services.shims.replace_outdated()
    await stack.enter_async_context(_reconciling(services))
    await stack.enter_async_context(rotating(services))
    await stack.enter_async_context(reloading(services, read, changed))
    await stack.enter_async_context(notify.supervised())
    log.info("serving at %s", config.server.listen)
    await stack.enter_async_context(_afterwards(config))


def _begin(services: Services) -> None:
    """Have processes import that nobody has asked for yet: as late as this, since their imports
    take the processor from those questions that a kubelet asks first, and as early as this, since
    after those it asks for pods."""
    for zygote in services.zygotes.values():
        zygote.begin()
    if services.keeper is not None:
        services.keeper.begin()
    services.shims.processes.begin()


def open_services(
    config: Config, stack: contextlib.AsyncExitStack, stored: DescriptorStore
) -> Services:
    """Everything the verbs need; closed by `stack` in reverse."""
    paths = stack.enter_context(claimed(config.root, config.state))
    file_system.check(paths)
    facts = host.probe(config)
    zygote, errands = _open_zygotes(paths, stack)
    index = Index()
    shims = Shims(ShimProcesses(zygote, paths.shims, config.shims.count), paths, index)
    shims.time_operations(config.timeline.operations)
    stack.callback(shims.disconnect)
    images = _open_images(config, paths, index, errands, stored, stack)
    given, folder = config.network, paths.root / "network"
    network = Network(
        given.conf_dir,
        given.bin_dir,
        str(folder),
        errands,
        netns_dir=given.netns_dir,
        default=default_network(config, paths.root),
    )
    stack.callback(network.close)
    services = Services(
        config,
        facts,
        paths,
        index,
        images,
        network,
        shims,
        errands,
        Events(),
    )
    services.zygotes = {"shims": zygote, "errands": errands}
    services.keeper = KeeperWatch(paths.state, lambda: _renew(zygote, shims))
    stack.push_async_callback(services.keeper.close)
    shims.on_moved = lambda sandbox: _moved(services, sandbox)
    shims.on_exit = lambda sandbox, container: _on_exit(services, sandbox, container)
    stack.callback(services.timeline.flush)
    if config.tracing.endpoint:
        services.tracing = Exporter(config.tracing.endpoint, config.tracing.sampling)
        stack.push_async_callback(services.tracing.close)
    services.trash.empty_soon()
    stack.push_async_callback(services.trash.close)
    stack.push_async_callback(_settle, services)
    return services


def _open_zygotes(paths: Paths, stack: contextlib.AsyncExitStack) -> tuple[Zygote, Zygote]:
    """For shims, which have the keeper above them, and for errands."""
    zygote, errands = Zygote(SHIM_MODULES, keeper=str(paths.state)), Zygote(ERRAND_MODULES)
    stack.push_async_callback(zygote.close)
    stack.push_async_callback(errands.close)
    return zygote, errands


def _open_images(
    config: Config,
    paths: Paths,
    index: Index,
    errands: Zygote,
    stored: DescriptorStore,
    stack: contextlib.AsyncExitStack,
) -> Images:
    images = Images(
        paths.images,
        certificate_folders(config),
        config.images.pinned,
        errands,
        no_progress_timeout_s=config.registry.no_progress_timeout_s,
        in_use=index.users_of,
        store=config.images.store,
        keep_blobs=config.images.keep_blobs,
        descriptors=stored,
    )
    images.policy = config.registry.signature_policy
    stack.push_async_callback(images.close)
    return images


async def _renew(zygote: Zygote, shims: Shims) -> None:
    """The keeper was replaced: the next pods get shims below the new one."""
    await zygote.renew()
    await shims.processes.renew()


async def _moved(services: Services, sandbox: Sandbox) -> None:
    """Another shim has the pod, under another process number: what names it is written anew."""
    await services.network.moved(sandbox.id, sandbox.netns_path)
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
    if not container.starting:
        status.publish(services, sandbox, container.id, events.STOPPED)
        if services.nri is not None and container.exit is not None:
            services.nri.stopped(container)


async def open_nri(services: Services, stack: contextlib.AsyncExitStack) -> None:
    """Start plugins and listen for others, where that is asked for."""
    if services.config.nri.enabled:
        from cri_server.nri.service import Nri

        services.nri = Nri(services)
        stack.push_async_callback(services.nri.close)
        await services.nri.start()


async def open_streaming(
    config: Config, services: Services, stack: contextlib.AsyncExitStack
) -> StreamingServer:
    """The HTTP server of exec, attach and port-forward."""
    given = config.streaming
    tls = (
        Tls(given.tls_certificate, given.tls_key, given.tls_client_ca)
        if given.tls_certificate
        else None
    )
    server = StreamingServer(Sessions(services), given.host, given.port, tls=tls)
    try:
        await server.start()
    except OSError as error:
        place = f"streaming.host {config.streaming.host}, streaming.port {config.streaming.port}"
        raise WrongState(f"{place}: {error.strerror or error}") from None
    stack.push_async_callback(server.close)
    return server


async def open_grpc(
    config: Config, services: Services, streaming: StreamingServer, stack: contextlib.AsyncExitStack
) -> Server:
    """Listen on the unix socket."""
    calls = methods.table(
        RuntimeService=RuntimeService(services, streaming), ImageService=ImageService(services)
    )
    table = verbs.observed(
        services, {**calls, **Admin(services, streaming).table(), **ImageAdmin(services).table()}
    )
    server = Server(
        config.socket_path,
        table,
        owner=(config.server.socket_uid, config.server.socket_gid),
        mode=int(config.server.socket_mode, 8),
    )
    await server.start()
    stack.push_async_callback(server.stop, config.server.shutdown_timeout_s)
    return server


async def open_metrics(
    config: Config,
    services: Services,
    server: Server,
    streaming: StreamingServer,
    stack: contextlib.AsyncExitStack,
) -> None:
    """Serve the server's own numbers where they are asked for."""
    if not config.metrics.address:
        return
    from cri_server.observability.telemetry import routes
    from cri_server.observability.telemetry.snapshot import Source

    endpoint = routes.endpoint(config.metrics.address, Source(services, server, streaming))
    await endpoint.start()
    stack.push_async_callback(endpoint.close)
    log.info("metrics at %s", config.metrics.address)


async def _settle(services: Services) -> None:
    """Let running operations end, so that little is left to recovery."""
    left = await services.running.settle(services.config.server.shutdown_timeout_s)
    for name in left:
        log.warning("still running at the end: %s", name)
    await services.shims.drain()


@contextlib.asynccontextmanager
async def _afterwards(config: Config) -> AsyncIterator[None]:
    """Beside the first calls, so that they do not wait for it: import what serves sessions, log
    what is wrong with this machine."""
    working = asyncio.create_task(asyncio.to_thread(_work_afterwards, config))
    try:
        yield
    finally:
        await asyncio.wait([working])


def _work_afterwards(config: Config) -> None:
    from cri_server.doctor.examine import complain
    from cri_server.doctor.model import Host
    from cri_server.streaming import connection  # noqa: F401

    complain(Host(config))


@contextlib.asynccontextmanager
async def _reconciling(services: Services) -> AsyncIterator[None]:
    """While inside: every few seconds, networks without a pod are released and lost host rules put
    back."""
    task = asyncio.create_task(_reconcile(services))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _reconcile(services: Services) -> None:
    while True:
        try:
            for problem in await services.network.reconcile(live_networks(services)):
                log.warning("network: %s", problem)
        except Error as error:
            log.warning("network: %s", error)
        except Exception:
            log.exception("network: not expected")
        await asyncio.sleep(RECONCILE_INTERVAL_S)
