"""Chooses the labels of a pod and its containers: those that CRI requests, else the policy's for
containers.

The containers of a pod share one level, so that they share files and the objects in the pod's
namespaces; each pod has another. Host namespaces change nothing: such a pod stays confined unless
it requests another type, as under containerd.
"""

from __future__ import annotations

from dataclasses import dataclass

from cri_server.api import api_pb2 as api
from cri_server.security.selinux.context import SelinuxContext, check, is_set, parse
from cri_server.security.selinux.policy import SelinuxPolicy


@dataclass(frozen=True, slots=True)
class SelinuxLabels:
    """The labels of a process and of its files; empty for none."""

    process: str = ""
    mount: str = ""

    @property
    def level(self) -> str:
        """The level of the files, which is the pod's."""
        context = parse(self.mount)
        return context.level if context is not None else ""


NONE = SelinuxLabels()


def of_sandbox(policy: SelinuxPolicy, options: api.SELinuxOption, level: str) -> SelinuxLabels:
    """Return the labels of a pod; its pause process is confined even if the pod is privileged.
    `level`: the level of the labels, unless `options` request one.

    Raises InvalidArgument.
    """
    check(options)
    return _build(policy, options, level)


def of_container(
    policy: SelinuxPolicy, context: api.LinuxContainerSecurityContext, pod: SelinuxLabels
) -> SelinuxLabels:
    """Return the labels of a container: the pod's labels; or, if the container requests any field,
    labels built from its request, at the pod's level unless it requests another level. A privileged
    container is not confined; its files have the pod's label. Raises InvalidArgument."""
    options = context.selinux_options
    check(options)
    if context.privileged:
        return SelinuxLabels(
            str(policy.privileged) if policy.privileged is not None else "", pod.mount
        )
    return _build(policy, options, pod.level) if is_set(options) else pod


def _build(policy: SelinuxPolicy, options: api.SELinuxOption, level: str) -> SelinuxLabels:
    """Build the labels: user and level apply to process and files, role and type to the process."""
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
