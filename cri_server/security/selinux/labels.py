"""Chooses the SELinux labels of a pod and its containers. The request sets fields of a label; the
policy's label for containers supplies the other fields.

All containers of a pod have the same level, so they share files and the objects in the pod's
namespaces. Different pods have different levels. A pod with host namespaces is confined like any
other, as under containerd, unless it requests another type.
"""

from __future__ import annotations

from dataclasses import dataclass

from cri_server.api import api_pb2 as api
from cri_server.security.selinux.context import SelinuxContext, check, is_set, parse
from cri_server.security.selinux.policy import SelinuxPolicy


@dataclass(frozen=True, slots=True)
class SelinuxLabels:
    """The SELinux labels of a process and of the files that it may write. An empty string means no
    label."""

    process: str = ""
    mount: str = ""

    @property
    def level(self) -> str:
        """Return the level in the files' label; empty if there is no label. All containers of a pod
        have this level."""
        context = parse(self.mount)
        return context.level if context is not None else ""


NONE = SelinuxLabels()


def of_sandbox(policy: SelinuxPolicy, options: api.SELinuxOption, level: str) -> SelinuxLabels:
    """Return the labels of a pod's pause process and files. SELinux confines the pause process even
    in a privileged pod. `level` applies unless `options` request another level.

    Raises InvalidArgument for invalid `options`.
    """
    check(options)
    return _build(policy, options, level)


def of_container(
    policy: SelinuxPolicy, context: api.LinuxContainerSecurityContext, pod: SelinuxLabels
) -> SelinuxLabels:
    """Return the labels of a container.

    The process of a privileged container is unconfined, and its files have the pod's label. Any
    other container has the pod's labels if `context` has no SELinux options. Otherwise it has the
    policy's labels, changed by these options. If the options lack a level, the level is the pod's.

    Raises InvalidArgument for an invalid option.
    """
    options = context.selinux_options
    check(options)
    if context.privileged:
        return SelinuxLabels(
            str(policy.privileged) if policy.privileged is not None else "", pod.mount
        )
    return _build(policy, options, pod.level) if is_set(options) else pod


def _build(policy: SelinuxPolicy, options: api.SELinuxOption, level: str) -> SelinuxLabels:
    """Return the policy's labels, changed by the requested fields and `level`. User and level apply
    to the labels of the process and of its files, role and type only to that of the process."""
    level = (options.level or level) if policy.has_levels else ""
    process, file = policy.process, policy.file
    user = options.user
    return SelinuxLabels(
        str(
            SelinuxContext(
                user or process.user,
                options.role or process.role,
                options.type or process.type,
                level,
            )
        ),
        str(SelinuxContext(user or file.user, file.role, file.type, level)),
    )
