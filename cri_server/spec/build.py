"""Builds a container's OCI spec. Errors of the request or the image are raised here, at
CreateContainer; StartContainer runs this spec unchanged."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.config.model import ContainersConfig
from cri_server.images.formats.manifest import ImageConfig
from cri_server.node.host import NodeFacts, loaded_apparmor_profiles
from cri_server.security.selinux.labels import NONE as NO_LABELS
from cri_server.security.selinux.labels import SelinuxLabels
from cri_server.spec import (
    block_io,
    capabilities,
    cdi,
    groups,
    hooks,
    mounts,
    namespaces,
    path_length,
    process,
    rdt,
    resource_classes,
    resources,
    security,
    user,
)
from cri_server.spec.sources import HostDevice
from cri_server.store.model import ResolvedUser
from pyrunc.errors import InvalidArgument

OCI_VERSION = "1.2.0"
DENY_ALL = {"allow": False, "access": "rwm"}
ALLOW_ALL = {"allow": True, "access": "rwm"}


@dataclass(slots=True)
class Inputs:
    """Everything that a container's spec depends on. The server has resolved the host paths of the
    mounts and devices. `files`: the folder with the pod's hosts, hostname and resolv.conf.
    `mounted_home`: if a mount covers the image's /etc/passwd, the user's home according to the
    covering file; else None."""

    container_id: str
    config: api.ContainerConfig
    sandbox: api.PodSandboxConfig
    image: ImageConfig
    accounts: user.Accounts
    requested_mounts: list[mounts.MountRequest]
    devices: list[HostDevice]
    files: str
    hostname: str
    pause_pid: int
    target_pid: int
    cgroup_parent: str
    node: NodeFacts
    available_capabilities: int
    kubernetes: dict[str, str]
    default_apparmor: str = ""
    edits: list[cdi.CdiEdits] = field(default_factory=list)
    settings: ContainersConfig = field(default_factory=ContainersConfig)
    hooks: list[hooks.ConfiguredHook] = field(default_factory=list)
    labels: SelinuxLabels = NO_LABELS
    mounted_home: str | None = None


@dataclass(frozen=True, slots=True)
class Built:
    """A container's OCI spec, and the user and groups that ContainerStatus reports."""

    spec: dict[str, Any]
    user: ResolvedUser


def check(config: api.ContainerConfig, sandbox: api.PodSandboxConfig) -> None:
    """Check the fields of a CreateContainer request that depend on neither the image nor the host.
    Raises InvalidArgument."""
    if not config.metadata.name:
        raise InvalidArgument("config.metadata.name is empty")
    security_context = config.linux.security_context
    if security_context.privileged and not sandbox.linux.security_context.privileged:
        raise InvalidArgument("a privileged container needs a privileged sandbox")
    namespaces.check_container(
        security_context.namespace_options, sandbox.linux.security_context.namespace_options
    )
    resources.check(config.linux.resources)
    for name in ("masked_paths", "readonly_paths"):
        for number, path in enumerate(getattr(security_context, name)):
            path_length.check(path, f"config.linux.security_context.{name}[{number}]")
            if not path.startswith("/") or "\0" in path:
                raise InvalidArgument(f"masked or read-only path {path!r} is not absolute")
    cdi.names([device.name for device in config.CDI_devices], config.annotations)


def build(inputs: Inputs) -> Built:
    """Build the container's OCI spec as a JSON object. Raises InvalidArgument for an error of the
    request or the image, Unsupported for an AppArmor profile on a host without AppArmor."""
    context = inputs.config.linux.security_context
    user_ids = user.resolve(context, inputs.image.user, inputs.accounts)
    # Only HOME: names and groups are those of the image, as under containerd.
    if inputs.mounted_home is not None:
        user_ids = replace(user_ids, home=inputs.mounted_home)
    granted = capabilities.to_oci(
        context, inputs.available_capabilities, inputs.settings.default_capabilities
    )
    spec: dict[str, Any] = {
        "ociVersion": OCI_VERSION,
        "process": _process(inputs, user_ids, granted),
        "root": {"path": "rootfs", "readonly": bool(context.readonly_rootfs)},
        "mounts": _mounts(inputs),
        "linux": _linux(inputs, granted["bounding"]),
        "annotations": _annotations(inputs),
    }
    cdi.apply(spec, inputs.edits)
    if inputs.hooks:
        annotations = {
            **inputs.sandbox.annotations,
            **inputs.config.annotations,
            **spec["annotations"],
        }
        has_binds = any(mount.request.host_path for mount in inputs.requested_mounts)
        hooks.apply(spec, inputs.hooks, annotations, has_binds)
    return Built(spec, user_ids)


def _process(
    inputs: Inputs, user_ids: ResolvedUser, granted: dict[str, list[str]]
) -> dict[str, Any]:
    config, image = inputs.config, inputs.image
    context = config.linux.security_context
    result: dict[str, Any] = {
        "terminal": bool(config.tty),
        "user": {"uid": user_ids.uid, "gid": user_ids.gid, "additionalGids": list(user_ids.groups)},
        "args": process.argv(config.command, config.args, image.entrypoint, image.cmd),
        "env": process.environment(
            image.env,
            process.cri_envs(config),
            hostname=inputs.hostname,
            tty=bool(config.tty),
            home=user_ids.home,
        ),
        "cwd": process.working_dir(config.working_dir, image.working_dir),
        "capabilities": granted,
        "noNewPrivileges": bool(context.no_new_privs),
        "oomScoreAdj": resources.clamp_oom_score_adj(
            config.linux.resources.oom_score_adj, inputs.node.oom_score_adj_floor
        ),
    }
    if inputs.node.limits:
        result["rlimits"] = process.rlimits(inputs.node.limits)
    profile = security.apparmor_name(
        security.apparmor_profile(context),
        enabled=inputs.node.apparmor,
        default=inputs.default_apparmor,
        loaded=loaded_apparmor_profiles() if inputs.node.apparmor else set(),
    )
    if profile:
        result["apparmorProfile"] = profile
    if inputs.labels.process:
        result["selinuxLabel"] = inputs.labels.process
    return result


def _options(inputs: Inputs) -> api.NamespaceOption:
    return namespaces.effective(
        inputs.config.linux.security_context.namespace_options,
        inputs.sandbox.linux.security_context.namespace_options,
    )


def _mounts(inputs: Inputs) -> list[dict[str, Any]]:
    context, options = inputs.config.linux.security_context, _options(inputs)
    sandbox_options = inputs.sandbox.linux.security_context.namespace_options
    default = mounts.defaults(
        inputs.files,
        ipc=options.ipc,
        shared_shm=sandbox_options.ipc != api.NODE,
        privileged=bool(context.privileged),
        readonly_root=bool(context.readonly_rootfs),
        writable_cgroup=inputs.settings.cgroup_writable
        and not namespaces.has_user_namespace(sandbox_options),
        sysfs_bind=namespaces.has_user_namespace(sandbox_options)
        and sandbox_options.network == api.NODE,
    )
    return mounts.merge(default, inputs.requested_mounts)


def _linux(inputs: Inputs, granted: list[str]) -> dict[str, Any]:
    context = inputs.config.linux.security_context
    privileged = bool(context.privileged)
    limits = resources.without_hugepages(
        resources.to_oci(inputs.config.linux.resources), inputs.node.cgroup_controllers
    )
    annotations = inputs.config.metadata.name, inputs.sandbox.annotations, inputs.config.annotations
    if io_class := resource_classes.find(block_io.KIND, *annotations):
        limits["blockIO"] = block_io.to_oci(inputs.settings.block_io_classes, io_class)
    limits["devices"] = _device_rules(inputs.devices, privileged)
    result: dict[str, Any] = {
        "namespaces": namespaces.entries(
            _options(inputs), inputs.pause_pid, inputs.target_pid, privileged=privileged
        ),
        "resources": limits,
        "cgroupsPath": groups.path(
            inputs.cgroup_parent, inputs.container_id, groups.driver_of(inputs.cgroup_parent)
        ),
        "maskedPaths": [] if privileged else list(context.masked_paths),
        "readonlyPaths": [] if privileged else list(context.readonly_paths),
    }
    if rdt_class := resource_classes.find(rdt.KIND, *annotations):
        result["intelRdt"] = rdt.to_oci(inputs.settings.rdt_classes, rdt_class)
    if inputs.devices:
        result["devices"] = _devices(inputs)
    filters = security.seccomp_object(
        security.seccomp_profile(context), granted, inputs.settings.seccomp_profile
    )
    if filters is not None:
        result["seccomp"] = filters
    result.update(namespaces.id_maps(context.namespace_options))
    if inputs.labels.mount:
        result["mountLabel"] = inputs.labels.mount
    propagation = mounts.root_propagation(inputs.requested_mounts)
    if propagation:
        result["rootfsPropagation"] = propagation
    return result


def _devices(inputs: Inputs) -> list[dict[str, Any]]:
    """Return the OCI object `linux.devices`. A device node has the owner that it has on the host.
    With the setting `device_ownership` it belongs to RunAsUser and RunAsGroup instead, unless the
    container is privileged or these ids are 0."""
    uid = gid = 0
    context = inputs.config.linux.security_context
    if inputs.settings.device_ownership and not context.privileged:
        uid, gid = max(0, context.run_as_user.value), max(0, context.run_as_group.value)
    return [
        {"path": d.path, **d.to_oci(), "uid": uid or d.uid, "gid": gid or d.gid}
        for d in inputs.devices
    ]


def _device_rules(devices: list[HostDevice], privileged: bool) -> list[dict[str, Any]]:
    if privileged:
        return [ALLOW_ALL]
    return [DENY_ALL] + [cdi.device_rule(device.to_oci(), device.access) for device in devices]


def _annotations(inputs: Inputs) -> dict[str, str]:
    """Return the spec's annotations: those of the pod and of the container, as far as the
    configuration permits them, and containerd's keys `io.kubernetes.cri.…`. Other tools read these
    keys from a bundle."""
    return {
        # Selected ones only: runc passes org.systemd.property.* on to systemd, which acts as root
        # of the node (CVE-2024-3154).
        **_select(inputs.sandbox.annotations, inputs.settings.pod_annotations),
        **_select(inputs.config.annotations, inputs.settings.container_annotations),
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.container-name": inputs.config.metadata.name,
        "io.kubernetes.cri.image-name": inputs.config.image.image,
        **inputs.kubernetes,
    }


def _select(annotations: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    return {
        key: value
        for key, value in annotations.items()
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
    }
