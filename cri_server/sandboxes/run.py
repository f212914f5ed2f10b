"""RunPodSandbox: a shim, a pause process of the pod's namespaces and, beside it, the pod's network,
or nothing at all."""

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
from cri_server.config.model import Containers
from cri_server.network.model import Dns, PodNetwork, PortMapping
from cri_server.observability import events
from cri_server.observability.timeline.trace import graft
from cri_server.operations.steps import Beside, Step, Steps
from cri_server.operations.tasks import gather, shield_until_done
from cri_server.pod import orphans
from cri_server.sandboxes import sysctls
from cri_server.security.selinux import labels
from cri_server.services import Services
from cri_server.spec import groups, mounts, namespaces, pod_files, resources, security
from cri_server.status import sandbox as status
from cri_server.store import disk
from cri_server.store.facts import Process
from cri_server.store.model import Sandbox, sandbox_name
from pyrunc.compile.descriptors import CgroupChoice
from pyrunc.errors import AlreadyExists, Error, InvalidArgument, KernelError, Unsupported
from pyrunc.kernel.full import disk_errors
from pyrunc.shim import messages
from pyrunc.shim.files import PauseFile

log = logging.getLogger(__name__)

PAUSE_OOM_SCORE_ADJ = -998
SANDBOX_ID = re.compile(r"\b[0-9a-f]{64}\b")
MODES = {api.POD: "new", api.CONTAINER: "new", api.NODE: "host"}


@dataclass(slots=True)
class Work:
    """A sandbox that is being made."""

    services: Services
    config: api.PodSandboxConfig
    sandbox: Sandbox
    hostname: str
    namespace: str = ""  # where the shim has the pod's network namespace


async def run(services: Services, config: api.PodSandboxConfig, handler: str) -> str:
    """The id of a READY sandbox. The same request again joins the running one or returns what it
    made.

    Raises InvalidArgument, AlreadyExists (the name is taken by another configuration), and what its
    steps raise.
    """
    check(config)
    check_hostname(config, services.node.hostname)
    check_handler(services, config, handler)
    name = sandbox_name(config.metadata)
    found = services.index.sandboxes.named(name)
    if found is not None:
        return _again(found, config)
    return await services.running.join(
        ("run", name), lambda: _run(services, config, handler), request=config
    )


def _again(found: Sandbox, config: api.PodSandboxConfig) -> str:
    if found.config == config and found.state == api.SANDBOX_READY:
        return found.id
    why = "is not ready" if found.config == config else "has another configuration"
    age_s = (time.time_ns() - found.created_at_ns) / 1e9
    raise AlreadyExists(
        f"sandbox {found.id} of the same name, namespace, uid and attempt {why} ({age_s:.0f} s old)"
    )


def check_hostname(config: api.PodSandboxConfig, host: str) -> None:
    """Raises InvalidArgument for a name that a pod with the node's network, and so its UTS
    namespace, cannot have."""
    on_host = config.linux.security_context.namespace_options.network == api.NODE
    if on_host and config.hostname not in ("", host):
        raise InvalidArgument(
            f"hostname {config.hostname[:80]!r}: a pod on the node's network has the node's name, {host!r}"
        )


def check_handler(services: Services, config: api.PodSandboxConfig, handler: str) -> None:
    """Raises InvalidArgument for a handler that there is not, Unsupported for what it cannot do."""
    found = handlers.require(services.config, handler)
    if found.binary and namespaces.has_user_namespace(
        config.linux.security_context.namespace_options
    ):
        raise Unsupported(
            f"pods with users of their own cannot have the runtime handler {handler!r}"
        )


def check(config: api.PodSandboxConfig) -> None:
    """What is wrong whatever the host is. Raises InvalidArgument."""
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
        config=config,
        runtime_handler=handler,
        created_at_ns=time.time_ns(),
        boot_id=services.node.boot_id,
        cgroup_parent=parent,
        cgroups_path=groups.path(parent, identifier, driver),
    )
    name = pod_files.hostname(config, identifier, services.node.hostname)
    services.pending.add(identifier)
    try:
        with labelled(services, sandbox):
            await STEPS.run(Work(services, config, sandbox, name))
            services.index.sandboxes.add(sandbox)
    finally:
        services.pending.discard(identifier)
    status.publish(services, sandbox, sandbox.id, events.CREATED)
    status.publish(services, sandbox, sandbox.id, events.STARTED)
    return identifier


@contextlib.contextmanager
def labelled(services: Services, sandbox: Sandbox) -> Iterator[None]:
    """Give the sandbox its SELinux labels; its level is nobody else's, also while it is in no list
    yet. Raises InvalidArgument."""
    policy = services.node.selinux
    if policy is None:
        yield
        return
    taken = {other.selinux.level for other in services.index.sandboxes}
    with services.selinux_levels.reserved(taken) as level:
        asked = sandbox.config.linux.security_context.selinux_options
        sandbox.selinux = labels.of_sandbox(policy, asked, level)
        yield


async def make_state(work: Work) -> None:
    """The state folder is the intent: without a record beside it the sandbox was never finished."""
    folder = work.services.paths.sandbox_state(work.sandbox.id)
    with disk_errors("mkdir", str(folder)):
        # on a tmpfs, as the socket that is bound there next: no thread has to wait
        folder.mkdir(mode=0o700)


async def write_files(work: Work) -> None:
    """Write what the pod's containers mount, and what the shim compiles the pause process from."""
    record, folder = pause(work), work.services.paths.sandbox_state(work.sandbox.id)
    await disk.write_in_thread(lambda: _write_files(work, record), folder)


def _write_files(work: Work, pause_file: PauseFile) -> None:
    paths = work.services.paths
    folder, root = paths.sandbox_state(work.sandbox.id), paths.sandbox_root(work.sandbox.id)
    with disk_errors("write", str(folder)):
        root.mkdir(mode=0o700)
        pod_files.write(
            root,
            work.config,
            work.hostname,
            namespaces.root_of(work.sandbox.options),
            work.sandbox.selinux.mount,
        )
        pause_file.write(folder)
    if work.config.log_directory:
        pod_files.make_log_directory(work.config.log_directory)


async def remove_state(work: Work) -> None:
    await disk.delete_sandbox_folders(work.services.paths, work.sandbox.id)


def pause(work: Work) -> PauseFile:
    """What the shim reads to compile the pause process."""
    security_context = work.config.linux.security_context
    options = security_context.namespace_options
    settings = work.services.config.cgroup
    profile = security.seccomp_profile(_sandbox_seccomp(security_context))
    users = namespaces.id_maps(options)
    # Every pod's process may enter through a file without categories.
    policy, made = work.services.node.selinux, work.sandbox.selinux
    return PauseFile(
        hostname="" if options.network == api.NODE else work.hostname,
        namespaces={
            "network": messages.PINNED if has_pinned_network(options) else MODES[options.network],
            "ipc": MODES[options.ipc],
            "uts": MODES[options.network],
            # Also for CONTAINER: a container that says nothing means POD, and joins it.
            "pid": "none" if options.pid == api.NODE else "new",
            **({"user": "new"} if users else {}),
        },
        uid_mappings=users.get("uidMappings", []),
        gid_mappings=users.get("gidMappings", []),
        sysctls=sysctls.with_defaults(
            work.config.linux.sysctls, options, work.services.config.pods
        ),
        cgroups_path=work.sandbox.cgroups_path,
        cgroup=CgroupChoice(work.services.node.cgroup_driver, settings.missing_controllers),
        oom_score_adj=resources.clamp_oom_score_adj(
            PAUSE_OOM_SCORE_ADJ, work.services.node.oom_score_adj_floor
        ),
        seccomp=security.seccomp_object(profile, [], _settings(work).seccomp_profile),
        shm_size_bytes=mounts.SHM_SIZE_BYTES,
        shm_owner=namespaces.root_of(options),
        selinux_label=made.process if policy else "",
        mount_label=made.mount if policy else "",
        program_label=str(policy.file) if policy else "",
    )


def _settings(work: Work) -> Containers:
    return handlers.settings(work.services.config, work.sandbox.runtime_handler)


def has_pinned_network(options: api.NamespaceOption) -> bool:
    """Whether the shim makes the pod's network namespace, which is known before the pause process
    then. With a user namespace the pause process's clone makes it: only so the pod's root owns it.
    """
    return options.network != api.NODE and not namespaces.id_maps(options)


def _sandbox_seccomp(context: api.LinuxSandboxSecurityContext) -> api.LinuxSandboxSecurityContext:
    """The pause process is ours and needs no privilege, whatever the pod's containers may do."""
    plain = api.LinuxSandboxSecurityContext()
    plain.CopyFrom(context)
    plain.privileged = False
    return plain


async def start_shim(work: Work) -> None:
    """Have a shim serve the pod; it makes the pod's network namespace."""
    sandbox = work.sandbox
    network = has_pinned_network(sandbox.options)
    path = await shield_until_done(work.services.shims.start(sandbox, network=network))
    work.namespace = path or ""


async def end_shim(work: Work) -> None:
    await work.services.shims.shutdown(work.sandbox)


async def start_pause(work: Work) -> None:
    client = work.services.shims.get(work.sandbox)
    try:
        started = await client.start_pause()
        graft(started.parts)
    except KernelError as error:
        if sysctls.is_refused(error):
            raise InvalidArgument(error.message) from None
        raise
    work.sandbox.pause = Process(started.pid, started.start_time)
    work.namespace = started.netns_path or ""
    work.sandbox.pause_alive = True


async def end_pause(work: Work) -> None:
    client = work.services.shims.find(work.sandbox)
    if client is not None:
        await client.stop_pause()
    await orphans.kill_group(work.sandbox.cgroups_path, work.sandbox.id)
    work.sandbox.pause_alive = False


async def attach_network(work: Work) -> None:
    sandbox = work.sandbox
    if sandbox.host_network:
        sandbox.network = "host"
        return
    try:
        result = await work.services.network.attach(
            pod_network(sandbox, work.namespace), settled=False
        )
    except Error as error:
        add_pod_names(work.services, error)
        raise
    sandbox.network = "attached"
    sandbox.ips = list(result.ips)
    sandbox.netns_path = result.netns_path


def add_pod_names(services: Services, error: Error) -> None:
    """Say which pods an error of the network means by their ids: the owner of a host port that is
    taken."""
    ids = dict.fromkeys(SANDBOX_ID.findall(error.message))
    pods = [
        pod for identifier in ids if (pod := services.index.sandboxes.find(identifier)) is not None
    ]
    if pods:
        names = [(each.id, each.config.metadata) for each in pods]
        error.add_detail(", ".join(f"{i[:12]}… is pod {m.namespace}/{m.name}" for i, m in names))


def pod_network(sandbox: Sandbox, namespace: str) -> PodNetwork:
    """What the network is told about a pod whose network namespace is at the path `namespace`. Its
    cgroup is the one that kubelet made for it, not the pause process's below that."""
    config = sandbox.config
    dns = config.dns_config
    return PodNetwork(
        sandbox_id=sandbox.id,
        name=config.metadata.name,
        namespace=config.metadata.namespace,
        uid=config.metadata.uid,
        netns_path=namespace,
        port_mappings=_port_mappings(config),
        dns=Dns(tuple(dns.servers), tuple(dns.searches), tuple(dns.options))
        if config.HasField("dns_config")
        else None,
        annotations=dict(config.annotations),
        cgroup_path=config.linux.cgroup_parent,
    )


def _port_mappings(config: api.PodSandboxConfig) -> tuple[PortMapping, ...]:
    """Those with a host port. Raises InvalidArgument."""
    found = []
    for i, mapping in enumerate(config.port_mappings):
        if not (0 <= mapping.host_port <= 65535 and 0 <= mapping.container_port <= 65535):
            raise InvalidArgument(f"port_mappings[{i}]: a port is not in 0..65535")
        try:
            protocol = api.Protocol.Name(mapping.protocol).lower()
        except ValueError:
            raise InvalidArgument(
                f"port_mappings[{i}]: unknown protocol {mapping.protocol}"
            ) from None
        if mapping.host_port:
            _check_host_port(mapping, f"port_mappings[{i}]")
            found.append(
                PortMapping(mapping.host_port, mapping.container_port, protocol, mapping.host_ip)
            )
    return tuple(found)


def _check_host_port(mapping: api.PortMapping, where: str) -> None:
    if not mapping.container_port:
        raise InvalidArgument(f"{where}: a host port without a container port")
    try:
        if mapping.host_ip and getattr(parse_address(mapping.host_ip), "scope_id", None):
            raise ValueError
    except ValueError:
        raise InvalidArgument(
            f"{where}: host_ip {mapping.host_ip[:80]!r} is not an address"
        ) from None


async def detach_network(work: Work) -> None:
    if not work.sandbox.host_network:
        await work.services.network.detach(work.sandbox.id, work.namespace or None)
        work.sandbox.network = "released"


async def tell_plugins(work: Work) -> None:
    await work.services.observer.run_pod(work.sandbox)


async def tell_plugins_of_end(work: Work) -> None:
    await work.services.observer.stop_pod(work.sandbox)
    await work.services.observer.remove_pod(work.sandbox)


async def save(work: Work) -> None:
    """The sandbox's record and the network's: two writers that wait for the disk at the same time
    wait once."""
    sandbox, services = work.sandbox, work.services
    await gather(disk.save_sandbox(services.paths, sandbox), services.network.settle(sandbox.id))


async def unsave(work: Work) -> None:
    await disk.forget(work.services.paths.sandbox_record(work.sandbox.id))


async def leave_for_removal(work: Work) -> None:
    """The roll-back did not succeed: show the sandbox as not ready, so that the caller can stop and
    remove it."""
    sandbox = work.sandbox
    sandbox.phase = "stopped"
    if work.services.network.remembers(sandbox.id):
        sandbox.network = "attached"  # DEL is still to be done
    work.services.index.sandboxes.add(sandbox)
    try:
        await disk.save_sandbox(work.services.paths, sandbox)
    except Error as error:
        log.error("sandbox %s stays in memory only: %s", sandbox.id, error)


def in_turn(work: Work) -> tuple[str, ...]:
    """Where one of pause process and network needs the other: a namespace that the pause process's
    clone makes; and settings of the network, which are written by the pause process's start, may
    name eth0 (containerd and CRI-O attach the network before they are set)."""
    if not has_pinned_network(work.sandbox.options):
        return ("pause", "network")
    return ("network", "pause") if sysctls.concern_network(work.config.linux.sysctls) else ()


STEPS: Steps[Work] = Steps(
    "run_sandbox",
    [
        Step("state", make_state, remove_state),
        Beside((Step("files", write_files), Step("shim", start_shim, end_shim))),
        Beside(
            (
                Step("pause", start_pause, end_pause),
                Step("network", attach_network, detach_network),
            ),
            in_turn,
        ),
        Step("nri", tell_plugins, tell_plugins_of_end),
        Step("record", save, unsave),
    ],
    stuck=leave_for_removal,
)
