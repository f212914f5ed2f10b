"""Describes a launch: all data that one new process needs to start. The compiler makes a `Launch`,
and `launch.run` carries it out."""

from __future__ import annotations

from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.program.model import LoweredProgram


class Launch(Value):
    """One process, ready to be started. The caller closes all descriptors after the launch, also
    those of `stdio`.

    - `lowered`: the compiled program of the plan
    - `descriptors`: name in the plan -> descriptor
    - `args`: the command line, for errors of execve
    - `preserve_fds`: descriptors that become 3, 4, … in the process
    - `pinned`: name in the plan -> name of a mount or namespace that the launching process has
      pinned. That process adds a clone of the mount, or the namespace, to `descriptors`.
    - `stdio_owner`: uid on the host that becomes the owner of stdio's files
    - `own_nulls`: replace null devices among stdio by a private one
    - `id`, `bundle` (absolute), `oci_version`, `annotations`, `status`: the container's values for
      the OCI state that hooks and seccomp agents read
    - `container_pid`: for an exec, the container's first process
    - `cgroup`, for the first process of a container or pod: its cgroup. None: the process stays in
      the runtime's cgroup.
    - `cgroup`, for an exec: set if the new process may follow the container's first process when
      the kernel refuses the cgroup in `descriptors` (`enter_steps`). None: the exec then fails.
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
