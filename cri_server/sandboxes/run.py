"""RunPodSandbox: assigns a pod to a shim, then starts its pause process and attaches its network at
the same time. After a failure all begun steps are undone."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address as parse_address

from cri_server.api import api_pb2 as api
from cri_server.config import handlers
from cri_server.network.model import PodNetwork, PortMapping
from cri_server.observability import events
from cri_server.operations.steps import Parallel, Step, Steps
from cri_server.operations.tasks import gather
from cri_server.sandboxes import sysctls
from cri_server.security.selinux import labels
from cri_server.services import Services
from cri_server.spec import groups, mounts, namespaces, pod_files, resources, security
from cri_server.status import sandbox as status
from cri_server.store import disk
from cri_server.store.model import Sandbox, copy, sandbox_name
from pyrunc.compile.requests import CgroupChoice, PauseRequest
from pyrunc.errors import AlreadyExists, Error, InvalidArgument, KernelError, Unsupported
from pyrunc.kernel.full import disk_errors
from pyrunc.shim import messages

log = logging.getLogger(__name__)

# The value of containerd and CRI-O (kubelet's PodInfraOOMAdj): the kernel kills every container
# (-997 and above) before the pause process, and the pause process before kubelet (-999).
PAUSE_OOM_SCORE_ADJ = -998
SANDBOX_ID = re.compile(r"\b[0-9a-f]{64}\b")
MODES = {api.POD: "new", api.CONTAINER: "new", api.NODE: "host"}


@dataclass(slots=True)
class RunContext:
    """A sandbox that is being created."""

    services: Services
    config: api.PodSandboxConfig
    sandbox: Sandbox
    hostname: str
    namespace: str = ""  # path of the pod's network namespace, which the shim holds


async def run(services: Services, config: api.PodSandboxConfig, handler: str) -> str:
    """Run a sandbox and return its id when it is READY. A repeated call waits for the first call,
    or returns the id of the READY sandbox with the same configuration.

    Raises InvalidArgument, AlreadyExists (a sandbox of this name has another configuration or is
    not READY), and the errors of its steps.
    """
    check(config)
    check_hostname(config, services.node.hostname)
    check_handler(services, config, handler)
    name = sandbox_name(config.metadata)
    existing = services.index.sandboxes.find_by_name(name)
    if existing is not None:
        return _existing_id(existing, config)
    # kubelet repeats a call that timed out with the same metadata. containerd refuses the second
    # one as "reserved" until the first has ended, which may be minutes (containerd issue 4604).
    return await services.running.join(
        ("run", name), lambda: _run(services, config, handler), request=config
    )


def _existing_id(existing: Sandbox, config: api.PodSandboxConfig) -> str:
    if existing.config == config and existing.state == api.SANDBOX_READY:
        return existing.id
    why = "is not ready" if existing.config == config else "has another configuration"
    age_s = (time.time_ns() - existing.created_at_ns) / 1e9
    raise AlreadyExists(
        f"sandbox {existing.id} has the same name, namespace, uid and attempt, but {why}"
        f" ({age_s:.0f} s old)"
    )


def check_hostname(config: api.PodSandboxConfig, host: str) -> None:
    """Raise InvalidArgument if a pod with host networking requests a hostname other than the
    host's: the pod uses the host's UTS namespace."""
    on_host = config.linux.security_context.namespace_options.network == api.NODE
    if on_host and config.hostname not in ("", host):
        raise InvalidArgument(
            f"hostname {config.hostname[:80]!r}: a pod with host networking has the host's name,"
            f" {host!r}"
        )


def check_handler(services: Services, config: api.PodSandboxConfig, handler: str) -> None:
    """Raise InvalidArgument for an unknown runtime handler, Unsupported for a handler that cannot
    run the pod."""
    runtime = handlers.require(services.config, handler)
    if runtime.binary and namespaces.has_user_namespace(
        config.linux.security_context.namespace_options
    ):
        raise Unsupported(f"runtime handler {handler!r} cannot run pods with a user namespace")


def check(config: api.PodSandboxConfig) -> None:
    """Check the parts of the RunPodSandbox request that depend on neither the node nor the runtime
    handler. Raises InvalidArgument."""
    metadata = config.metadata
    if not config.HasField("metadata") or not (
        metadata.name and metadata.namespace and metadata.uid
    ):
        raise InvalidArgument("config.metadata: name, namespace and uid are required")
    if config.log_directory and not config.log_directory.startswith("/"):
        raise InvalidArgument(f"log_directory {config.log_directory!r} is not absolute")
    options = config.linux.security_context.namespace_options
    namespaces.check_sandbox(options)
    sysctls.check(config.linux.sysctls, options)
    pod_files.resolv_conf(config)
    _port_mappings(config)


async def _run(services: Services, config: api.PodSandboxConfig, handler: str) -> str:
    identifier = os.urandom(32).hex()
    driver = services.node.cgroup_driver
    parent = groups.parent(
        config.linux.cgroup_parent, driver, services.config.cgroup.default_parent
    )
    sandbox = Sandbox(
        id=identifier,
        config=copy(config),
        runtime_handler=handler,
        created_at_ns=time.time_ns(),
        boot_id=services.node.boot_id,
        cgroup_parent=parent,
        cgroups_path=groups.path(parent, identifier, driver),
    )
    name = pod_files.hostname(config, identifier, services.node.hostname)
    # Else a reconciliation of the network would detach this pod, which is not in the index yet.
    services.pending.add(identifier)
    try:
        with labelled(services, sandbox):
            await STEPS.run(RunContext(services, config, sandbox, name))
            services.index.sandboxes.add(sandbox)
    finally:
        services.pending.discard(identifier)
    status.publish(services, sandbox, sandbox.id, events.CREATED)
    status.publish(services, sandbox, sandbox.id, events.STARTED)
    return identifier


@contextlib.contextmanager
def labelled(services: Services, sandbox: Sandbox) -> Iterator[None]:
    """Give the sandbox SELinux labels with a level that no other pod has. The level is reserved
    only during the `with` block, so the caller must add the sandbox to the server's index in this
    block.

    Raises InvalidArgument for invalid SELinux options, ResourceExhausted when all levels are used.
    """
    policy = services.node.selinux
    if policy is None:
        yield
        return
    taken = {other.selinux.level for other in services.index.sandboxes}
    with services.selinux_levels.reserved(taken) as level:
        options = sandbox.config.linux.security_context.selinux_options
        sandbox.selinux = labels.of_sandbox(policy, options, level)
        yield


async def make_state(context: RunContext) -> None:
    """Make the sandbox's state folder. If the server dies before it writes the record, recovery
    finds the folder without a record and removes the sandbox."""
    folder = context.services.paths.sandbox_state(context.sandbox.id)
    with disk_errors("mkdir", str(folder)):
        # The folder is on a tmpfs, so mkdir cannot block the loop.
        folder.mkdir(mode=0o700)


async def write_files(context: RunContext) -> None:
    """Write resolv.conf, hostname and hosts (the pod's containers mount them) and pause.json (the
    shim compiles the pause process from it)."""
    record = pause_request(context)
    folder = context.services.paths.sandbox_state(context.sandbox.id)
    await disk.write_in_thread(lambda: _write_files(context, record), folder)


def _write_files(context: RunContext, request: PauseRequest) -> None:
    paths = context.services.paths
    folder, root = paths.sandbox_state(context.sandbox.id), paths.sandbox_root(context.sandbox.id)
    with disk_errors("write", str(folder)):
        root.mkdir(mode=0o700)
        # On the disk, not on the tmpfs with pause.json: containers may write to these files, and
        # could fill the host's memory (similar to CVE-2020-8557).
        pod_files.write(
            root,
            context.config,
            context.hostname,
            namespaces.root_of(context.sandbox.options),
            context.sandbox.selinux.mount,
        )
        request.write(folder)
    if context.config.log_directory:
        pod_files.make_log_directory(context.config.log_directory)


async def remove_state(context: RunContext) -> None:
    services = context.services
    await disk.delete_sandbox_folders(services.paths, services.trash, context.sandbox.id)


def pause_request(context: RunContext) -> PauseRequest:
    """Return the content of pause.json: the shim compiles the pause process from it."""
    security_context = context.config.linux.security_context
    options = security_context.namespace_options
    config = context.services.config
    settings = handlers.settings(config, context.sandbox.runtime_handler)
    profile = security.seccomp_profile(_sandbox_seccomp(security_context))
    users = namespaces.id_maps(options)
    # The label of the program has no categories, so every pod's pause process may execute it.
    policy = context.services.node.selinux
    labels = context.sandbox.selinux
    return PauseRequest(
        # A pod with host networking is in the host's UTS namespace, where sethostname(2) would
        # rename the node.
        hostname="" if options.network == api.NODE else context.hostname,
        namespaces={
            "network": messages.PINNED if has_pinned_network(options) else MODES[options.network],
            "ipc": MODES[options.ipc],
            "uts": MODES[options.network],
            # New also for CONTAINER: a container that requests no mode uses POD, and joins this
            # namespace.
            "pid": "none" if options.pid == api.NODE else "new",
            **({"user": "new"} if users else {}),
        },
        uid_mappings=users.get("uidMappings", []),
        gid_mappings=users.get("gidMappings", []),
        sysctls=sysctls.with_defaults(context.config.linux.sysctls, options, config.pods),
        cgroups_path=context.sandbox.cgroups_path,
        cgroup=CgroupChoice(context.services.node.cgroup_driver, config.cgroup.missing_controllers),
        oom_score_adj=resources.clamp_oom_score_adj(
            PAUSE_OOM_SCORE_ADJ, context.services.node.oom_score_adj_floor
        ),
        seccomp=security.seccomp_object(profile, [], settings.seccomp_profile),
        shm_size_bytes=mounts.SHM_SIZE_BYTES,
        shm_owner=namespaces.root_of(options),
        selinux_label=labels.process if policy else "",
        mount_label=labels.mount if policy else "",
        program_label=str(policy.file) if policy else "",
    )


def has_pinned_network(options: api.NamespaceOption) -> bool:
    """Return whether the shim makes the pod's network namespace before the pause process starts.

    False for a pod with a user namespace: there the clone(2) of the pause process makes the network
    namespace, so that the pod's root owns it. False also for host networking.
    """
    return options.network != api.NODE and not namespaces.id_maps(options)


def _sandbox_seccomp(context: api.LinuxSandboxSecurityContext) -> api.LinuxSandboxSecurityContext:
    """Return a copy of the security context without `privileged`: seccomp confines the pause
    process even if the pod's containers are privileged."""
    plain = copy(context)
    plain.privileged = False
    return plain


async def start_shim(context: RunContext) -> None:
    """Assign the pod to a shim. The shim also makes the pod's network namespace if
    `has_pinned_network`."""
    sandbox = context.sandbox
    network = has_pinned_network(sandbox.options)
    context.namespace = await context.services.pod(sandbox).assign_shim(network=network) or ""


async def end_shim(context: RunContext) -> None:
    await context.services.pod(context.sandbox).release_shim()


async def start_pause(context: RunContext) -> None:
    try:
        context.namespace = await context.services.pod(context.sandbox).start_pause() or ""
    except KernelError as error:
        if sysctls.is_refused(error):
            raise InvalidArgument(error.message) from None
        raise


async def stop_pause(context: RunContext) -> None:
    await context.services.pod(context.sandbox).undo_start_pause()


async def attach_network(context: RunContext) -> None:
    sandbox = context.sandbox
    if sandbox.host_network:
        sandbox.network = "host"
        return
    try:
        # Not durable, because `save` syncs this record together with the sandbox's.
        result = await context.services.network.attach(
            pod_network(sandbox, context.namespace), durable=False
        )
    except Error as error:
        add_pod_names(context.services, error)
        raise
    sandbox.network = "attached"
    sandbox.ips = list(result.ips)
    sandbox.netns_path = result.netns_path


def add_pod_names(services: Services, error: Error) -> None:
    """Add names of pods to the network error `error`: for each pod id in its message, the pod's
    name. Such a pod may, for example, own the requested host port."""
    ids = dict.fromkeys(SANDBOX_ID.findall(error.message))
    pods = [
        pod for identifier in ids if (pod := services.index.sandboxes.find(identifier)) is not None
    ]
    if pods:
        names = [(each.id, each.config.metadata) for each in pods]
        error.add_detail(", ".join(f"{i[:12]}… is pod {m.namespace}/{m.name}" for i, m in names))


def pod_network(sandbox: Sandbox, namespace: str) -> PodNetwork:
    """Return what the network service needs to attach the pod. `namespace`: the path of the pod's
    network namespace."""
    config = sandbox.config
    dns = config.dns_config
    return PodNetwork(
        sandbox_id=sandbox.id,
        name=config.metadata.name,
        namespace=config.metadata.namespace,
        uid=config.metadata.uid,
        netns_path=namespace,
        port_mappings=_port_mappings(config),
        dns={
            "servers": list(dns.servers),
            "searches": list(dns.searches),
            "options": list(dns.options),
        }
        if config.HasField("dns_config")
        else None,
        annotations=dict(config.annotations),
        # kubelet's cgroup of the pod, not the pause process's cgroup below it.
        cgroup_path=config.linux.cgroup_parent,
    )


def _port_mappings(config: api.PodSandboxConfig) -> tuple[PortMapping, ...]:
    """Check the port mappings and return those with a host port. Raises InvalidArgument."""
    mappings = []
    for i, mapping in enumerate(config.port_mappings):
        if not (0 <= mapping.host_port <= 65535 and 0 <= mapping.container_port <= 65535):
            raise InvalidArgument(
                f"port_mappings[{i}]: host_port and container_port must be in 0..65535"
            )
        try:
            protocol = api.Protocol.Name(mapping.protocol).lower()
        except ValueError:
            raise InvalidArgument(
                f"port_mappings[{i}]: unknown protocol {mapping.protocol}"
            ) from None
        if mapping.host_port:
            _check_host_port(mapping, f"port_mappings[{i}]")
            mappings.append(
                PortMapping(mapping.host_port, mapping.container_port, protocol, mapping.host_ip)
            )
    return tuple(mappings)


def _check_host_port(mapping: api.PortMapping, where: str) -> None:
    if not mapping.container_port:
        raise InvalidArgument(f"{where}: host_port without container_port")
    try:
        if mapping.host_ip and getattr(parse_address(mapping.host_ip), "scope_id", None):
            raise ValueError
    except ValueError:
        raise InvalidArgument(
            f"{where}: host_ip {mapping.host_ip[:80]!r} is not an IP address"
        ) from None


async def detach_network(context: RunContext) -> None:
    if not context.sandbox.host_network:
        await context.services.network.detach(context.sandbox.id, context.namespace or None)
        context.sandbox.network = "released"


async def notify_plugins(context: RunContext) -> None:
    await context.services.observer.run_pod(context.sandbox)


async def notify_plugins_of_removal(context: RunContext) -> None:
    await context.services.observer.stop_pod(context.sandbox)
    await context.services.observer.remove_pod(context.sandbox)


async def save(context: RunContext) -> None:
    """Save the sandbox's record and the network's record in parallel: two concurrent fsyncs share
    one wait for the disk."""
    sandbox, services = context.sandbox, context.services
    await gather(
        disk.save_sandbox(services.paths, sandbox), services.network.wait_written(sandbox.id)
    )


async def remove_record(context: RunContext) -> None:
    await disk.remove_record(context.services.paths.sandbox_record(context.sandbox.id))


async def leave_for_removal(context: RunContext) -> None:
    """List the sandbox as not ready after an undo has failed, so that the client can stop and
    remove it."""
    sandbox = context.sandbox
    sandbox.phase = "stopped"
    if context.services.network.has_record(sandbox.id):
        sandbox.network = "attached"  # its plugins still need a DEL
    context.services.index.sandboxes.add(sandbox)
    try:
        await disk.save_sandbox(context.services.paths, sandbox)
    except Error as error:
        log.error(
            "sandbox %s is listed as not ready, but its record cannot be written: %s",
            sandbox.id,
            error,
        )


def step_order(context: RunContext) -> tuple[str, ...]:
    """Return the order of the steps `pause` (starts the pause process) and `network`; empty if they
    can run at the same time.

    `pause` is first if the clone(2) that creates the pause process also makes the network
    namespace. Otherwise `network` is first if the pod has network sysctls, as in containerd and
    CRI-O. These sysctls are set when the pause process starts, and may name eth0, which the CNI
    plugins make.
    """
    if not has_pinned_network(context.sandbox.options):
        return ("pause", "network")
    return ("network", "pause") if sysctls.concern_network(context.config.linux.sysctls) else ()


STEPS: Steps[RunContext] = Steps(
    "run_sandbox",
    [
        Step("state", make_state, remove_state),
        Parallel((Step("files", write_files), Step("shim", start_shim, end_shim))),
        # RunPodSandbox took 62 ms with these steps one after the other, 40 ms in parallel
        # (measured, p50 of 25 pods on two busy processors).
        Parallel(
            (
                Step("pause", start_pause, stop_pause),
                Step("network", attach_network, detach_network),
            ),
            step_order,
        ),
        Step("nri", notify_plugins, notify_plugins_of_removal),
        Step("record", save, remove_record),
    ],
    stuck=leave_for_removal,
)
