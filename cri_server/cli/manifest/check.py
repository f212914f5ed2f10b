"""Checks a manifest beyond types: names, ranges, and forbidden combinations of fields. The rules
are Kubernetes' (pkg/apis/core/validation)."""

from __future__ import annotations

import ipaddress
import posixpath
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from cri_server.cli.manifest import pod_model
from cri_server.cli.manifest.pod_model import (
    ContainerManifest,
    PodManifest,
    PodSpec,
    Profile,
    Resources,
    VolumeMount,
    quantity,
)
from cri_server.containers import log_rotation
from cri_server.containers.log_rotation import RotationLimits
from pyrunc.errors import InvalidSpec

Item = TypeVar("Item")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(rf"{LABEL.pattern}(\.{LABEL.pattern})*")
SEARCHED = re.compile(SUBDOMAIN.pattern.replace("a-z0-9]", "a-z0-9_]"))  # such as _tcp.example.org
QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
# A port's name is an IANA service name: 15 characters, a letter, no `--` (RFC 6335, section 5.1).
PORT_NAME = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# Kubernetes permits all printable ASCII but `=` (RelaxedEnvironmentVariableValidation).
VARIABLE = re.compile(r"[ -<>-~]+")
SYSCTL = re.compile(r"([a-z0-9]([-_a-z0-9]*[a-z0-9])?[./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?")
LABEL_LIMIT, SUBDOMAIN_LIMIT, PORT_NAME_LIMIT = 63, 253, 15
ID_LIMIT = (1 << 31) - 1  # Kubernetes' limit of user and group ids
CPUS_LIMIT = 1 << 20
ANNOTATIONS_LIMIT_BYTES = 256 << 10
NAMESERVERS_LIMIT, SEARCHES_LIMIT = 3, 32  # a resolver uses three: resolv.conf(5)


def pod(pod: PodManifest) -> None:
    """Check a pod. Raises InvalidSpec with the path of the first error."""
    _metadata(pod.metadata)
    spec = pod.spec
    if not spec.containers:
        raise InvalidSpec("spec.containers", "is empty")
    _volumes(spec)
    containers = list(_indexed("spec.containers", spec.containers))
    named = [*_indexed("spec.initContainers", spec.init_containers), *containers]
    _unique_names(named)
    for path, container in named:
        _container(container, path, spec)
    for path, container in containers:
        if container.restart_policy:
            raise InvalidSpec(
                f"{path}.restartPolicy", "is allowed only in initContainers, for sidecars"
            )
    _host_ports(containers, spec)
    _pod_security(spec)
    _host_and_dns(spec)


def _metadata(metadata: pod_model.Metadata) -> None:
    _name(metadata.name, "metadata.name", "a pod's name", SUBDOMAIN, SUBDOMAIN_LIMIT)
    _name(metadata.namespace, "metadata.namespace", "a namespace", LABEL, LABEL_LIMIT)
    for group in ("labels", "annotations"):
        for key in getattr(metadata, group):
            # Kubernetes folds the keys of annotations before it checks them, but not those of
            # labels.
            _key(key.lower() if group == "annotations" else key, f"metadata.{group}")
    for key, value in metadata.labels.items():
        if value:
            _name(value, f"metadata.labels.{key}", "a label's value", QUALIFIED, LABEL_LIMIT)
    if (
        sum(len(f"{k}{v}".encode()) for k, v in metadata.annotations.items())
        > ANNOTATIONS_LIMIT_BYTES
    ):
        raise InvalidSpec(
            "metadata.annotations", f"have more than {ANNOTATIONS_LIMIT_BYTES} bytes in total"
        )
    log_limits(metadata)


def log_limits(metadata: pod_model.Metadata) -> RotationLimits:
    """Return the limits of log rotation: from the pod's annotation `io.pyrunc.log-rotation`, such
    as `10Mi 5` (the size of a file, the number of files), else kubelet's defaults. Raises
    InvalidSpec."""
    text = metadata.annotations.get(log_rotation.ANNOTATION)
    if text is None:
        return RotationLimits()
    path = f"metadata.annotations[{log_rotation.ANNOTATION}]"
    size, _, files = text.partition(" ")
    if not (re.fullmatch("[0-9]{1,6}", files) and int(files) >= log_rotation.LEAST_FILES):
        raise InvalidSpec(
            path, f"{text!r}: expected a size and a number of files, at least 2, such as 10Mi 5"
        )
    return RotationLimits(int(quantity(size, path)), int(files))


def _key(key: str, path: str) -> None:
    prefix, slash, name = key.rpartition("/")
    if slash:
        _name(prefix, f"{path}.{key}", "a key's prefix", SUBDOMAIN, SUBDOMAIN_LIMIT)
    _name(name, f"{path}.{key}", "a key", QUALIFIED, LABEL_LIMIT)


def _volumes(spec: PodSpec) -> None:
    volumes = list(_indexed("spec.volumes", spec.volumes))
    for path, volume in volumes:
        _name(volume.name, f"{path}.name", "a volume's name", LABEL, LABEL_LIMIT)
        if [volume.host_path, volume.empty_dir, volume.files].count(None) != 2:
            raise InvalidSpec(
                path,
                "expected one of hostPath, emptyDir, configMap, secret, downwardAPI and projected",
            )
        if volume.host_path is not None:
            _host_path(volume.host_path.path, f"{path}.hostPath.path")
    _unique_names(volumes)


def _container(container: ContainerManifest, path: str, spec: PodSpec) -> None:
    _name(container.name, f"{path}.name", "a container's name", LABEL, LABEL_LIMIT)
    if not container.image or container.image != container.image.strip():
        raise InvalidSpec(f"{path}.image", f"{container.image!r} is not an image's name")
    for where, variable in _indexed(f"{path}.env", container.env):
        if not VARIABLE.fullmatch(variable.name):
            raise InvalidSpec(f"{where}.name", f"{variable.name!r} is not a variable's name")
    _ports(container, path)
    _resources(container.resources, f"{path}.resources")
    _mounts(container, path, {v.name for v in spec.volumes})
    _security(container.security_context, f"{path}.securityContext")


def _ports(container: ContainerManifest, path: str) -> None:
    ports = list(_indexed(f"{path}.ports", container.ports))
    for where, port in ports:
        if port.name:
            _name(port.name, f"{where}.name", "a port's name", PORT_NAME, PORT_NAME_LIMIT)
        for key, value, least in (
            ("containerPort", port.container_port, 1),
            ("hostPort", port.host_port, 0),
        ):
            if not least <= value <= 65535:
                raise InvalidSpec(f"{where}.{key}", f"{value} is not a port")
        if port.host_ip:
            _address(port.host_ip, f"{where}.hostIP")
    _unique_names([(where, port) for where, port in ports if port.name])


def _host_ports(named: list[tuple[str, ContainerManifest]], spec: PodSpec) -> None:
    taken: list[tuple[str, tuple[object, ...]]] = []
    for path, container in named:
        for place, port in _indexed(f"{path}.ports", container.ports):
            where = f"{place}.hostPort"
            if spec.host_network and port.host_port not in (0, port.container_port):
                raise InvalidSpec(
                    where, f"{port.host_port} differs from containerPort, which hostNetwork forbids"
                )
            number = port.container_port if spec.host_network else port.host_port
            if number:
                taken.append((where, (number, port.protocol, port.host_ip)))
    _once(taken, "is used twice")


def _resources(resources: Resources, path: str) -> None:
    for key, largest in (("cpu", CPUS_LIMIT), ("memory", pod_model.LARGEST)):
        limit, request = getattr(resources.limits, key), getattr(resources.requests, key)
        maximum = None if limit is None else quantity(limit, f"{path}.limits.{key}")
        if maximum is not None and maximum > largest:
            raise InvalidSpec(f"{path}.limits.{key}", f"{limit!r} is too large")
        if request is not None:
            amount = quantity(request, f"{path}.requests.{key}")
            if amount > largest:
                raise InvalidSpec(f"{path}.requests.{key}", f"{request!r} is too large")
            if maximum is not None and amount > maximum:
                raise InvalidSpec(
                    f"{path}.requests.{key}", f"{request} is more than the limit of {limit}"
                )


def _mounts(container: ContainerManifest, path: str, volumes: set[str]) -> None:
    mounts = list(_indexed(f"{path}.volumeMounts", container.volume_mounts))
    for place, mount in mounts:
        _mount(mount, place, volumes)
        if mount.mount_propagation == "Bidirectional" and not container.security_context.privileged:
            raise InvalidSpec(
                f"{place}.mountPropagation", "Bidirectional needs a privileged container"
            )
    paths = ((f"{place}.mountPath", posixpath.normpath(m.mount_path)) for place, m in mounts)
    _once(paths, "is mounted over twice")


def _mount(mount: VolumeMount, path: str, volumes: set[str]) -> None:
    if mount.name not in volumes:
        raise InvalidSpec(f"{path}.name", f"no volume {mount.name!r} in spec.volumes")
    if not mount.mount_path.startswith("/"):
        raise InvalidSpec(f"{path}.mountPath", f"{mount.mount_path!r} is not absolute")
    # The API demands it (VolumeMount.mountPath).
    if ":" in mount.mount_path:
        raise InvalidSpec(f"{path}.mountPath", f"{mount.mount_path!r} contains ':'")
    if mount.sub_path and mount.sub_path_expr:
        raise InvalidSpec(path, "has both subPath and subPathExpr")
    sub_path(mount.sub_path, f"{path}.subPath")
    sub_path(mount.sub_path_expr, f"{path}.subPathExpr")
    if mount.recursive_read_only != "Disabled" and (
        not mount.read_only or mount.mount_propagation != "None"
    ):
        raise InvalidSpec(f"{path}.recursiveReadOnly", "needs readOnly, and no mountPropagation")


def _host_path(text: str, path: str) -> None:
    if not text.startswith("/"):
        raise InvalidSpec(path, f"{text!r} is not absolute")
    if ".." in text.split("/"):
        raise InvalidSpec(path, f"{text!r} contains '..'")


def sub_path(text: str, path: str) -> None:
    """Check that the subPath `text` is relative and without `..`. Raises InvalidSpec; `path` is the
    field in the manifest."""
    if text.startswith("/"):
        raise InvalidSpec(path, f"{text!r} is not relative")
    if ".." in text.split("/"):
        raise InvalidSpec(path, f"{text!r} contains '..'")


def _security(security: pod_model.ContainerSecurity, path: str) -> None:
    _ids({"runAsUser": security.run_as_user, "runAsGroup": security.run_as_group}, path)
    _profile(security.seccomp_profile, f"{path}.seccompProfile")
    if not security.allow_privilege_escalation:
        if security.privileged:
            raise InvalidSpec(
                f"{path}.allowPrivilegeEscalation", "cannot be false for a privileged container"
            )
        if {"SYS_ADMIN", "CAP_SYS_ADMIN"} & set(security.capabilities.add):
            raise InvalidSpec(
                f"{path}.allowPrivilegeEscalation", "cannot be false with CAP_SYS_ADMIN"
            )


def _pod_security(spec: PodSpec) -> None:
    security, path = spec.security_context, "spec.securityContext"
    _ids(
        {
            "runAsUser": security.run_as_user,
            "runAsGroup": security.run_as_group,
            "fsGroup": security.fs_group,
        },
        path,
    )
    _ids(
        {f"supplementalGroups[{i}]": group for i, group in enumerate(security.supplemental_groups)},
        path,
    )
    _profile(security.seccomp_profile, f"{path}.seccompProfile")
    sysctls = list(_indexed(f"{path}.sysctls", security.sysctls))
    for place, sysctl in sysctls:
        _name(sysctl.name, f"{place}.name", "a sysctl", SYSCTL, SUBDOMAIN_LIMIT)
    _unique_names(sysctls, "is set twice")
    if spec.host_pid and spec.share_process_namespace:
        raise InvalidSpec("spec.shareProcessNamespace", "cannot be combined with hostPID")


def _ids(ids: dict[str, int | None], path: str) -> None:
    for key, value in ids.items():
        if value is not None and not 0 <= value <= ID_LIMIT:
            raise InvalidSpec(f"{path}.{key}", f"{value} is not in 0..{ID_LIMIT}")


def _profile(profile: Profile | None, path: str) -> None:
    if profile is None:
        return
    if (profile.type == "Localhost") != bool(profile.localhost_profile):
        raise InvalidSpec(
            f"{path}.localhostProfile", "is required with type Localhost and forbidden with others"
        )
    sub_path(profile.localhost_profile, f"{path}.localhostProfile")


def _host_and_dns(spec: PodSpec) -> None:
    if spec.hostname:
        _name(spec.hostname, "spec.hostname", "a host's name", LABEL, LABEL_LIMIT)
    for path, alias in _indexed("spec.hostAliases", spec.host_aliases):
        _address(alias.ip, f"{path}.ip")
        for place, name in _indexed(f"{path}.hostnames", alias.hostnames):
            _name(name, place, "a host's name", SUBDOMAIN, SUBDOMAIN_LIMIT)
    _ids({"terminationGracePeriodSeconds": spec.termination_grace_period_seconds}, "spec")
    _dns(spec, spec.dns_config or pod_model.PodDnsManifest())


def _dns(spec: PodSpec, dns: pod_model.PodDnsManifest) -> None:
    if spec.dns_policy == "None" and not dns.nameservers:
        raise InvalidSpec("spec.dnsConfig.nameservers", "is required with dnsPolicy None")
    for path, address in _indexed("spec.dnsConfig.nameservers", dns.nameservers):
        _address(address, path)
    for key, values, limit in (
        ("nameservers", dns.nameservers, NAMESERVERS_LIMIT),
        ("searches", dns.searches, SEARCHES_LIMIT),
    ):
        if len(values) > limit:
            raise InvalidSpec(f"spec.dnsConfig.{key}", f"has more than {limit} entries")
    for path, domain in _indexed("spec.dnsConfig.searches", dns.searches):
        if domain != ".":
            _name(domain.removesuffix("."), path, "a domain", SEARCHED, SUBDOMAIN_LIMIT)
    for path, option in _indexed("spec.dnsConfig.options", dns.options):
        if not option.name:
            raise InvalidSpec(f"{path}.name", "is empty")


def _indexed(path: str, values: Iterable[Item]) -> Iterator[tuple[str, Item]]:
    """Yield (path, value) for each value of a list, with paths such as `spec.containers[0]`."""
    for index, value in enumerate(values):
        yield f"{path}[{index}]", value


def _name(text: str, path: str, what: str, pattern: re.Pattern[str], limit: int) -> None:
    if len(text) > limit:
        raise InvalidSpec(path, f"{text[:limit]!r}… is longer than {limit} characters")
    if not pattern.fullmatch(text):
        raise InvalidSpec(path, f"{text!r} is not {what}")


def _address(text: str, path: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        raise InvalidSpec(path, f"{text!r} is not an IP address") from None


def _once(values: Iterable[tuple[str, object]], problem: str) -> None:
    """Check that no value occurs twice. `values`: pairs of path and value. Raises InvalidSpec with
    the path of the second occurrence; `problem` is the end of the message."""
    unique: set[object] = set()
    for path, value in values:
        if value in unique:
            text = value[0] if isinstance(value, tuple) else repr(value)
            raise InvalidSpec(path, f"{text} {problem}")
        unique.add(value)


def _unique_names(entries: Iterable[tuple[str, Any]], problem: str = "is used twice") -> None:
    """Check that no two items have the same `name`. `entries`: pairs of path and item. Raises
    InvalidSpec."""
    _once(((f"{path}.name", entry.name) for path, entry in entries), problem)
