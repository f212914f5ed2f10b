"""Translates a Pod manifest to CRI messages as kubelet does."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import ownership
from cri_server.cli.manifest import check, dns, host_names, pod_model, volumes
from cri_server.cli.manifest.expand import environment, expand, undefined
from cri_server.containers import log_rotation
from pyrunc.errors import InvalidSpec
from pyrunc.spec.default import MASKED_PATHS, READONLY_PATHS

HOSTNAME_LIMIT = 63
LOCALHOST_PROFILES = Path("/var/lib/kubelet/seccomp")
CPU_PERIOD_US = 100_000  # kubelet's
# kubelet's paths for the proc mount type Default (pkg/securitycontext) are runc's and two more
MASKED = [*MASKED_PATHS, "/proc/interrupts", "/sys/devices/virtual/powercap"]
PROPAGATION = {
    "None": api.PROPAGATION_PRIVATE,
    "HostToContainer": api.PROPAGATION_HOST_TO_CONTAINER,
    "Bidirectional": api.PROPAGATION_BIDIRECTIONAL,
}
PROFILES = {
    "RuntimeDefault": api.SecurityProfile.RuntimeDefault,
    "Unconfined": api.SecurityProfile.Unconfined,
    "Localhost": api.SecurityProfile.Localhost,
}


def sandbox(pod: pod_model.PodManifest, folder: Path) -> api.PodSandboxConfig:
    """Return CRI's configuration of the pod's sandbox. `folder`: the pod's folder, for its logs."""
    metadata, spec = pod.metadata, pod.spec
    config = api.PodSandboxConfig(
        metadata=api.PodSandboxMetadata(
            name=metadata.name,
            namespace=metadata.namespace,
            uid=metadata.uid or os.urandom(16).hex(),
        ),
        hostname="" if spec.host_network else spec.hostname or _hostname(metadata.name),
        log_directory=str(folder / "logs"),
        labels={
            **metadata.labels,
            ownership.MARK: ownership.RUN,
            "io.kubernetes.pod.name": metadata.name,
            "io.kubernetes.pod.namespace": metadata.namespace,
        },
        annotations=metadata.annotations,
    )
    if spec.dns_policy == "None" or spec.dns_config is not None:
        config.dns_config.CopyFrom(
            dns.config(spec.dns_config or pod_model.PodDnsManifest(), own=spec.dns_policy == "None")
        )
    for container in spec.containers:
        for port in container.ports:
            config.port_mappings.add(
                protocol=port.protocol,
                container_port=port.container_port,
                host_port=port.container_port if spec.host_network else port.host_port,
                host_ip=port.host_ip,
            )
    if spec.host_network:
        del config.port_mappings[:]
    _sandbox_security(config.linux, spec)
    return config


def _hostname(name: str) -> str:
    """Return the pod's name as a valid hostname: at most 63 characters, and no `-` or `.` at the
    end."""
    return name[:HOSTNAME_LIMIT].rstrip("-.")


def _sandbox_security(linux: api.LinuxPodSandboxConfig, spec: pod_model.PodSpec) -> None:
    security = linux.security_context
    _namespaces(security.namespace_options, spec)
    security.privileged = any(c.security_context.privileged for c in _all(spec))
    security.seccomp.profile_type = api.SecurityProfile.RuntimeDefault
    for sysctl in spec.security_context.sysctls:
        linux.sysctls[sysctl.name] = sysctl.value


def _namespaces(options: api.NamespaceOption, spec: pod_model.PodSpec) -> None:
    options.network = api.NODE if spec.host_network else api.POD
    options.ipc = api.NODE if spec.host_ipc else api.POD
    options.pid = (
        api.NODE if spec.host_pid else api.POD if spec.share_process_namespace else api.CONTAINER
    )


def _all(spec: pod_model.PodSpec) -> list[pod_model.ContainerManifest]:
    return [*spec.init_containers, *spec.containers]


def container(
    pod: pod_model.PodManifest,
    spec: pod_model.ContainerManifest,
    image: api.Image,
    folder: Path,
    addresses: Sequence[str] = (),
) -> api.ContainerConfig:
    """Return CRI's configuration of a container. `addresses`: the pod's addresses. Creates missing
    subPaths of the container's mounts. Raises InvalidSpec; WrongState or KernelError if a subPath
    cannot be used."""
    of_status = {"podIP": "".join(addresses[:1]), "podIPs": ",".join(addresses)}
    values = environment((e.name, of_status.get(e.status, e.value)) for e in spec.env)
    labels = {
        ownership.MARK: ownership.RUN,
        "io.kubernetes.container.name": spec.name,
        "io.kubernetes.pod.name": pod.metadata.name,
        "io.kubernetes.pod.namespace": pod.metadata.namespace,
    }
    if spec.restart_policy:
        labels[ownership.SIDECAR] = "true"
    elif spec in pod.spec.init_containers:
        labels[ownership.INIT] = "true"
    annotations = {
        ownership.GRACE: str(pod.spec.termination_grace_period_seconds),
        log_rotation.ANNOTATION: str(check.log_limits(pod.metadata)),
    }
    if spec.ports:
        annotations[ownership.PORTS] = _named_ports(spec)
    if any(e.status for e in spec.env):
        annotations[ownership.ADDRESSES] = ",".join(addresses)
    config = api.ContainerConfig(
        metadata=api.ContainerMetadata(name=spec.name),
        image=api.ImageSpec(image=image.id, user_specified_image=spec.image),
        command=[expand(word, values) for word in spec.command],
        args=[expand(word, values) for word in spec.args],
        working_dir=spec.working_dir,
        envs=[api.KeyValue(key=name, value=value.encode()) for name, value in values.items()],
        log_path=f"{spec.name}.log",
        stdin=spec.stdin,
        stdin_once=spec.stdin_once,
        tty=spec.tty,
        labels=labels,
        annotations=annotations,
    )
    named = {v.name: v for v in pod.spec.volumes}
    for mount in spec.volume_mounts:
        config.mounts.add(
            container_path=mount.mount_path,
            host_path=volumes.source(named[mount.name], sub_path(mount, values), folder),
            readonly=mount.read_only or named[mount.name].files is not None,
            propagation=PROPAGATION[mount.mount_propagation],
            recursive_read_only=mount.recursive_read_only != "Disabled",
        )
    host_names.mount(config, folder)
    _resources(config.linux.resources, spec.resources)
    _security(config.linux.security_context, pod.spec, spec)
    _user(config.linux.security_context, pod.spec, spec, image)
    return config


def _named_ports(container: pod_model.ContainerManifest) -> str:
    ports = [
        {"name": p.name, "containerPort": p.container_port, "protocol": p.protocol}
        for p in container.ports
    ]
    return json.dumps(ports)


def sub_path(mount: pod_model.VolumeMount, values: dict[str, str]) -> str:
    """Return the mount's subPath, or its subPathExpr expanded with the environment `values`. Raises
    InvalidSpec."""
    if not mount.sub_path_expr:
        return mount.sub_path
    missing = undefined(mount.sub_path_expr, values)
    if missing:
        raise InvalidSpec(
            "subPathExpr", f"{mount.sub_path_expr!r}: {missing[0]!r} is not in the environment"
        )
    expanded = expand(mount.sub_path_expr, values)
    check.sub_path(expanded, f"subPathExpr {mount.sub_path_expr!r}")
    return expanded


def _resources(target: api.LinuxContainerResources, resources: pod_model.Resources) -> None:
    path = "resources"
    request = resources.requests.cpu if resources.requests.cpu is not None else resources.limits.cpu
    if request is not None:
        # the kernel's minima: 2 shares (cpu.weight 1), and a quota of 1 ms
        target.cpu_shares = max(2, int(pod_model.quantity(request, path) * 1024))
    if resources.limits.cpu is not None:
        target.cpu_period = CPU_PERIOD_US
        target.cpu_quota = max(
            1000, int(pod_model.quantity(resources.limits.cpu, path) * CPU_PERIOD_US)
        )
    if resources.limits.memory is not None:
        target.memory_limit_in_bytes = int(pod_model.quantity(resources.limits.memory, path))


def _security(
    target: api.LinuxContainerSecurityContext,
    spec: pod_model.PodSpec,
    container: pod_model.ContainerManifest,
) -> None:
    security, pods = container.security_context, spec.security_context
    _namespaces(target.namespace_options, spec)
    target.privileged = security.privileged
    target.readonly_rootfs = security.read_only_root_filesystem
    target.no_new_privs = not security.allow_privilege_escalation
    target.capabilities.add_capabilities.extend(security.capabilities.add)
    target.capabilities.drop_capabilities.extend(security.capabilities.drop)
    target.supplemental_groups.extend(pods.supplemental_groups)
    if pods.fs_group is not None:
        # kubelet adds it, too: a process that is not in the group of its volumes could not write to
        # them.
        target.supplemental_groups.append(pods.fs_group)
    profile = (
        security.seccomp_profile or pods.seccomp_profile or pod_model.Profile(type="RuntimeDefault")
    )
    target.seccomp.profile_type = PROFILES[profile.type]
    if profile.localhost_profile:
        target.seccomp.localhost_ref = str(LOCALHOST_PROFILES / profile.localhost_profile)
    # containerd clears these paths of privileged containers, too.
    if not security.privileged:
        target.masked_paths.extend(MASKED)
        target.readonly_paths.extend(READONLY_PATHS)


def _user(
    target: api.LinuxContainerSecurityContext,
    spec: pod_model.PodSpec,
    container: pod_model.ContainerManifest,
    image: api.Image,
) -> None:
    """Set user and group in `target`, from the container's security context or else the pod's. If
    only a group is set, sets the image's user too, because CRI does not accept a group alone.
    Raises InvalidSpec if runAsNonRoot is set and the user would be root."""
    security, pods = container.security_context, spec.security_context
    user = security.run_as_user if security.run_as_user is not None else pods.run_as_user
    group = security.run_as_group if security.run_as_group is not None else pods.run_as_group
    if security.run_as_non_root if security.run_as_non_root is not None else pods.run_as_non_root:
        _refuse_root(container.name, user, image)
    if user is not None:
        target.run_as_user.value = user
    elif group is not None and image.username:
        target.run_as_username = image.username
    elif group is not None:
        target.run_as_user.value = image.uid.value
    if group is not None:
        target.run_as_group.value = group


def _refuse_root(name: str, user: int | None, image: api.Image) -> None:
    if user is None and image.username:
        raise InvalidSpec(
            "runAsNonRoot",
            f"container {name}: the image's user {image.username!r} is a name: set runAsUser",
        )
    if (image.uid.value if user is None else user) == 0:
        raise InvalidSpec("runAsNonRoot", f"container {name} would run as root")
