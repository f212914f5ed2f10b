"""A launch: all that one new process needs, as data. Its compiler and its starter share this record
and nothing else."""

from __future__ import annotations

from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.program.model import LoweredProgram


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
    pinned: Mapping[str, str] = {}
    stdio_owner: int | None = None
    own_nulls: bool = True
    id: str = ""
    bundle: str = ""
    oci_version: str = ""
    annotations: Mapping[str, str] = {}
    status: str = "creating"
    container_pid: int = 0
    cgroup: Cgroup | None = None
