"""Which labels a pod and its containers get: what CRI asks for, over what the policy has for
containers.

The containers of a pod have one level, so that they share files and what is in the pod's
namespaces; other pods have others. Host namespaces change nothing: such a pod stays confined unless
it asks for another type, as under containerd.
"""

from __future__ import annotations

from dataclasses import dataclass

from cri_server.api import api_pb2 as api
from cri_server.security.selinux.context import Context, check, is_asked, parse
from cri_server.security.selinux.policy import Policy


@dataclass(frozen=True, slots=True)
class Labels:
    """What a process enters, and what its files get. Empty: none."""

    process: str = ""
    mount: str = ""

    @property
    def level(self) -> str:
        """The level of the files, which is the pod's."""
        context = parse(self.mount)
        return context.level if context is not None else ""


NONE = Labels()


def of_sandbox(policy: Policy, asked: api.SELinuxOption, level: str) -> Labels:
    """A pod's: its pause process is confined also where the pod is privileged. `level`: where none
    is asked for.

    Raises InvalidArgument.
    """
    check(asked)
    return _made(policy, asked, level)


def of_container(policy: Policy, context: api.LinuxContainerSecurityContext, pod: Labels) -> Labels:
    """A container's: the pod's, unless it asks for its own, which is at the pod's level if it names
    none. A privileged one is not confined; its files are the pod's. Raises InvalidArgument."""
    asked = context.selinux_options
    check(asked)
    if context.privileged:
        return Labels(str(policy.privileged) if policy.privileged is not None else "", pod.mount)
    return _made(policy, asked, pod.level) if is_asked(asked) else pod


def _made(policy: Policy, asked: api.SELinuxOption, level: str) -> Labels:
    """User and level are the files', too; role and type are the process's."""
    level = (asked.level or level) if policy.has_levels else ""
    process, file = policy.process, policy.file
    user = asked.user
    return Labels(
        str(
            Context(
                user or process.user, asked.role or process.role, asked.type or process.type, level
            )
        ),
        str(Context(user or file.user, file.role, file.type, level)),
    )
