"""A launch: all that one new process needs, as data. Its compiler and its starter share this record
and nothing else."""

from __future__ import annotations

from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.plan.model import Step
    from pyrunc.program.model import Program

    class LoweredProgram(Protocol):
        """A program with the numbers that its descriptors get and the parent's steps."""

        @property
        def program(self) -> Program: ...
        @property
        def numbers(self) -> Mapping[str, int]: ...
        @property
        def steps(self) -> Mapping[int, Sequence[Step]]: ...


_NOTHING: Mapping[str, str] = {}


class Launch(Value):
    """One process, ready to be started.

    `lowered`: the plan's program. `descriptors`: by the names of the plan, closed by the caller
    afterwards, like `stdio` and `preserve_fds` (which become 3, 4, …). `pinned`: more descriptors
    of the plan; each is a clone of a mount, or the namespace, that the launching process pins under
    that name. `stdio_owner`: an id of the host that becomes the owner of stdio; `own_nulls`:
    replace null devices among stdio by a private one. `args`: for the errors of execve. `id`,
    `bundle` (absolute), `oci_version` and `annotations` are the container's, for the state that
    hooks and agents read; `status` is its status meanwhile, `container_pid` its first process if
    that is not the new one. `cgroup`: the process's group; None = ours.
    """

    lowered: LoweredProgram
    descriptors: Mapping[str, int]
    stdio: Sequence[int]
    args: Sequence[str] = ("",)
    preserve_fds: Sequence[int] = ()
    pinned: Mapping[str, str] = _NOTHING
    stdio_owner: int | None = None
    own_nulls: bool = True
    id: str = ""
    bundle: str = ""
    oci_version: str = ""
    annotations: Mapping[str, str] = _NOTHING
    status: str = "creating"
    container_pid: int = 0
    cgroup: Cgroup | None = None
