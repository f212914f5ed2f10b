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

    `lowered`: the plan's program. `descriptors`: by their names in the plan; the caller closes them
    afterwards, and `stdio` and `preserve_fds`, which become 3, 4, … `pinned`: name in the plan ->
    name of the mount or namespace that the launching process pins; it adds a clone of the mount, or
    the namespace, to `descriptors`. `stdio_owner`: the uid on the host that becomes the owner of
    stdio. `own_nulls`: replace null devices among stdio by a private one.

    `args`: the command line, for errors of execve. `id`, `bundle` (absolute), `oci_version`,
    `annotations` and `status` are the container's, for the state that hooks and agents read.
    `container_pid`: the container's first process, if the new process is another one. `cgroup`: the
    process's group; None = ours.
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
