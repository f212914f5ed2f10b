"""Opens the descriptors that a launch inherits: namespaces, cgroup, start socket. Also compiles the
seccomp filter.

The compilers of containers and pause processes use these functions, with the runtime's rights and
in its namespaces.
"""

from __future__ import annotations

import os
from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_STREAM
from _socket import socket as _Socket
from errno import EPERM

from pyrunc.compile import host
from pyrunc.errors import InvalidSpec, KernelError
from pyrunc.kernel.fd import close_all, short_path
from pyrunc.kernel.namespace import open_namespace
from pyrunc.plan.model import LoadFilter
from pyrunc.spec.check import settings_by_namespace
from pyrunc.spec.model import KERNEL_NAMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.compile.requests import CgroupChoice
    from pyrunc.spec.model import Linux, Spec
    from pyrunc.undo import Undo

START_SOCKET = "start.sock"
PINNED = "pinned:"  # replaces a namespace's path; the launching process adds the descriptor


class NamedDescriptors:
    """The descriptors that a launched process inherits, by their names in the plan. A context
    manager: the end of its `with` block closes all of them. The launched process has its own
    copies."""

    __slots__ = ("numbers",)

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def take(self, name: str, number: int) -> int:
        """Add the descriptor `number` under `name` and return it. `close` will close it."""
        self.numbers[name] = number
        return number

    def __enter__(self) -> NamedDescriptors:
        return self

    def close(self) -> None:
        close_all(self.numbers.values())
        self.numbers.clear()

    def __exit__(self, *error: object) -> None:
        self.close()


def open_namespaces(linux: Linux, descriptors: NamedDescriptors) -> None:
    """Open the namespaces that have a path and check their kind. Leave out those with a `PINNED`
    path, because the launching process adds their descriptors."""
    for entry in linux.namespaces:
        if entry.path and not entry.path.startswith(PINNED):
            number = open_namespace(entry.path, KERNEL_NAMES[entry.type])
            descriptors.take(f"namespace:{entry.type}", number)


def refuse_settings_of_the_host(spec: Spec, descriptors: NamedDescriptors) -> None:
    """Raise InvalidSpec if the container joins a namespace of the host by path, and a sysctl,
    hostname, domainname or netDevice of the configuration would change this namespace."""
    for kind, path in settings_by_namespace(spec).items():
        joined = descriptors.numbers.get(f"namespace:{kind}")
        if joined is None:
            continue
        ours = os.stat(f"/proc/thread-self/ns/{KERNEL_NAMES[kind]}").st_ino
        # Two paths of one namespace have one inode (namespaces(7)), so a bind of the host's
        # namespace is recognised as well.
        if os.fstat(joined).st_ino == ours:
            raise InvalidSpec(path, f"needs a {kind} namespace other than the host's")


def make_cgroup(
    container_id: str,
    linux: Linux,
    annotations: Mapping[str, str],
    choice: CgroupChoice | None,
    descriptors: NamedDescriptors,
    undo: Undo,
    *,
    existing: Cgroup | None = None,
) -> tuple[Cgroup | None, list[str]]:
    """Make the container's cgroup, write its limits, and open it as the descriptor `cgroup`.
    Returns the cgroup and warnings. If `choice` is None, does nothing and returns no cgroup.

    `existing`: use this cgroup instead of making one; `undo` does not remove it.
    """
    if choice is None:
        return None, []
    from pyrunc.cgroups.naming import place

    resources = linux.resources or {}
    cgroup = existing or place(linux.cgroups_path, container_id, choice.driver)
    if existing is None:
        cgroup.create(resources, annotations)
        undo.push(f"cgroup {cgroup.path}", cgroup.remove)
    # Before the clone, which counts against pids.max and memory.max: no process of the container
    # ever runs without its limits.
    warnings = cgroup.apply(resources, choice.missing_controllers) if resources else []
    descriptors.take("cgroup", cgroup.open_directory())
    return cgroup, warnings


def filter_devices(cgroup: Cgroup, linux: Linux) -> None:
    """Load the device rules on the cgroup; without rules only the default nodes are allowed. In a
    user namespace, does nothing when the kernel refuses the filter (EPERM). Raises KernelError."""
    # Also without rules: CAP_MKNOD, which containers have by default, would open the host's disks.
    rules = (linux.resources or {}).get("devices") or ()
    try:
        cgroup.set_devices(rules)
    except KernelError as error:
        # The load needs CAP_SYS_ADMIN, or CAP_BPF and CAP_NET_ADMIN, of the machine's user
        # namespace. Without these no device can be made either.
        if error.errno != EPERM or not host.constant_facts().in_user_namespace:
            raise


def open_start_socket(state_dir: str, undo: Undo) -> int:
    """Open the socket `start.sock` in `state_dir`, on which the container waits for `start`.
    `undo` gets a step that removes this file. Raises KernelError."""
    with short_path(state_dir) as path:
        listening = _Socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
        try:
            listening.bind(f"{path}/{START_SOCKET}")
            undo.push("start socket", os.unlink, f"{state_dir}/{START_SOCKET}")
            # One `start` connects at a time, because it holds the container's lock.
            listening.listen(1)
            return listening.detach()
        except OSError as error:
            listening.close()
            raise KernelError.of(error, "bind", f"'{state_dir}/{START_SOCKET}'") from None


def compiled_filter(seccomp: Mapping[str, Any] | None) -> LoadFilter | None:
    """Compile the OCI object `linux.seccomp` to the operation that loads its filter; None when the
    filter would allow every call. Raises InvalidSpec, Unsupported, KernelError."""
    if not seccomp:
        return None
    from pyrunc.seccomp.compiler import compile as compile_filter

    compiled = compile_filter(seccomp)
    if compiled is None:
        return None
    return LoadFilter(compiled.program, compiled.flags, compiled.notifies)
