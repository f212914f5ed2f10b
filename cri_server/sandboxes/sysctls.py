"""Checks a pod's sysctls. Accepts only sysctls of the pod's own namespaces, because any other
sysctl would change the host."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from cri_server.api import api_pb2 as api
from cri_server.config.model import PodsConfig
from cri_server.spec import namespaces
from pyrunc.errors import InvalidArgument, KernelError

IPC = (
    "kernel.msgmax",
    "kernel.msgmnb",
    "kernel.msgmni",
    "kernel.sem",
    "kernel.shmall",
    "kernel.shmmax",
    "kernel.shmmni",
    "kernel.shm_rmid_forced",
)
REFUSED_ERRNOS = (
    errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ERANGE, errno.E2BIG,
    errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EOPNOTSUPP,
)  # fmt: skip
IPC_PREFIX, NET_PREFIX = "fs.mqueue.", "net."


def check(requested: Mapping[str, str], options: api.NamespaceOption) -> None:
    """Check a pod's sysctls. Raises InvalidArgument for a malformed key or value, for a sysctl that
    is not namespaced, and for a sysctl of a namespace that the pod shares with the host."""
    for key, value in requested.items():
        name = dotted(key)
        if any(part in ("", ".", "..") for part in key.replace("/", ".").split(".")) or "\0" in key:
            raise InvalidArgument(f"sysctl {key!r} is not a valid name")
        # A value must not be read as several sysctls: CRI-O gave `1+kernel.core_pattern=…` to a
        # helper that split it at the plus sign (CVE-2022-0811).
        if "\n" in value or "\0" in value:
            raise InvalidArgument(
                f"sysctl {key!r}: the value must be a single line without NUL bytes"
            )
        if name in IPC or name.startswith(IPC_PREFIX):
            _require_pod_namespace(key, "IPC", options.ipc)
        elif name.startswith(NET_PREFIX):
            _require_pod_namespace(key, "network", options.network)
        else:
            raise InvalidArgument(f"sysctl {key!r} is not namespaced")


def with_defaults(
    requested: Mapping[str, str], options: api.NamespaceOption, pods: PodsConfig
) -> dict[str, str]:
    """Return the requested sysctls, and the configured defaults for all other keys. A pod with host
    networking gets no defaults, because they would change the host."""
    defaults: dict[str, str] = {}
    if options.network != api.NODE:
        if pods.unprivileged_ports:
            # containerd sets both by default since 2.0 (enable_unprivileged_ports, _icmp).
            defaults["net.ipv4.ip_unprivileged_port_start"] = "0"
        if pods.unprivileged_ping and not namespaces.has_user_namespace(options):
            # Kernels from before June 2023 take no higher group (GID_T_MAX, include/net/ping.h),
            # and none takes a range with groups that a user namespace does not map.
            defaults["net.ipv4.ping_group_range"] = "0 2147483647"
    overridden = {dotted(key) for key in requested}
    return {key: value for key, value in defaults.items() if key not in overridden} | dict(
        requested
    )


def concern_network(requested: Mapping[str, str]) -> bool:
    """Return whether one of the sysctls belongs to the network namespace. Such a sysctl may name an
    interface that exists only after CNI plugins have run."""
    return any(dotted(key).startswith(NET_PREFIX) for key in requested)


def is_refused(error: KernelError) -> bool:
    """Return whether the kernel refused a sysctl, because it does not exist or the value is
    invalid."""
    return error.call == "sysctl" and error.errno in REFUSED_ERRNOS


def dotted(key: str) -> str:
    """Return the sysctl's name with dots as separators. If the first separator in `key` is a slash,
    exchange slashes and dots, as sysctl(8) does: `net/ipv4/tcp_rmem` becomes `net.ipv4.tcp_rmem`,
    and `net/ipv4/conf/eth0.1/x` becomes `net.ipv4.conf.eth0/1.x`."""
    dot, slash = key.find("."), key.find("/")
    if slash >= 0 and (dot < 0 or slash < dot):
        return key.translate({ord("."): "/", ord("/"): "."})
    return key


def _require_pod_namespace(key: str, what: str, mode: int) -> None:
    if mode == api.NODE:
        raise InvalidArgument(
            f"sysctl {key!r} would change the host: the pod uses the host's {what} namespace"
        )
