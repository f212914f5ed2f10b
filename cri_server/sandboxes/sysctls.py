"""Kernel settings of a pod: only those that a namespace of the pod owns; anything else would change
the host."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from cri_server.api import api_pb2 as api
from cri_server.config.model import Pods
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
REFUSALS = (
    errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ERANGE, errno.E2BIG, errno.EACCES, errno.EPERM,
    errno.ENAMETOOLONG, errno.EOPNOTSUPP,
)  # fmt: skip
IPC_PREFIX, NET_PREFIX = "fs.mqueue.", "net."


def check(asked: Mapping[str, str], options: api.NamespaceOption) -> None:
    """Raises InvalidArgument naming the setting."""
    for key, value in asked.items():
        name = dotted(key)
        if any(part in ("", ".", "..") for part in key.replace("/", ".").split(".")) or "\0" in key:
            raise InvalidArgument(f"sysctl {key!r} is not a setting's name")
        if "\n" in value or "\0" in value:
            raise InvalidArgument(f"sysctl {key!r}: the value is not one line")
        if name in IPC or name.startswith(IPC_PREFIX):
            _own(key, "IPC", options.ipc)
        elif name.startswith(NET_PREFIX):
            _own(key, "network", options.network)
        else:
            raise InvalidArgument(f"sysctl {key!r} is not namespaced")


def with_defaults(
    asked: Mapping[str, str], options: api.NamespaceOption, pods: Pods
) -> dict[str, str]:
    """What is asked for and what the configuration sets in the pod's own network beside it.

    Groups of a pod with a user namespace are not mapped that far: the kernel would refuse the
    range.
    """
    found: dict[str, str] = {}
    if options.network != api.NODE:
        if pods.unprivileged_ports:
            found["net.ipv4.ip_unprivileged_port_start"] = "0"
        if pods.unprivileged_ping and not namespaces.has_user_namespace(options):
            found["net.ipv4.ping_group_range"] = "0 2147483647"
    taken = {dotted(key) for key in asked}
    return {key: value for key, value in found.items() if key not in taken} | dict(asked)


def concern_network(asked: Mapping[str, str]) -> bool:
    """Whether a setting belongs to the pod's network; it may name an interface, which the network's
    plugins make."""
    return any(dotted(key).startswith(NET_PREFIX) for key in asked)


def is_refused(error: KernelError) -> bool:
    """Whether the kernel refused to set what was asked for: no such setting, or not a value of it."""
    return error.call == "sysctl" and error.errno in REFUSALS


def dotted(key: str) -> str:
    """The form with dots between the parts; the first separator decides which it is (sysctl(8))."""
    dot, slash = key.find("."), key.find("/")
    if slash >= 0 and (dot < 0 or slash < dot):
        return key.translate({ord("."): "/", ord("/"): "."})
    return key


def _own(key: str, what: str, mode: int) -> None:
    if mode == api.NODE:
        raise InvalidArgument(
            f"sysctl {key!r} would change the host: the pod uses the host's {what} namespace"
        )
