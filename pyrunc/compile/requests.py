"""The records in which a caller describes what to compile. The server imports them without the
planner, which needs 2 MiB."""

from __future__ import annotations

from pyrunc.compile.image_mount import MountedImage
from pyrunc.records import Record, RecordFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.ipc import Message


class CgroupChoice(Record):
    """How the cgroup is made: `driver` cgroupfs or systemd; `missing_controllers` error or warn."""

    driver: str = "cgroupfs"
    missing_controllers: str = "error"


class Overlay(Record):
    """An overlay as the container's root; `lower` top first, or `image` in place of it. Without
    `upper` it is read-only."""

    lower: Sequence[str] = ()
    upper: str = ""
    work: str = ""
    volatile: bool = False
    image: MountedImage | None = None


class PauseRequest(RecordFile):
    """The request for a pod's pause process, as the server writes it to the sandbox's folder.

    `namespaces`: type (`network`, `ipc`, `uts`, `pid`, `user`) -> `new`, an absolute path to join,
    `pinned` for one that the launching process adds (`Launch.pinned`), or `host` or `none` for the
    caller's. The mount namespace is always its own. A new user namespace needs the mappings, OCI's
    `{containerID, hostID, size}` objects, and owns the others. `shm_size_bytes` and `shm_owner`,
    uid and gid, are of the /dev/shm that belongs to a new ipc namespace, `mount_label` is its
    SELinux label. `selinux_label`: the process's; `program_label`: of the program's file, a memfd
    without a label by which a policy would let a process enter its domain.
    """

    name, earlier_name = "pause.json", "holder.json"
    namespaces: dict[str, str]
    cgroup: CgroupChoice = CgroupChoice()
    hostname: str = ""
    uid_mappings: Sequence[dict[str, int]] = ()
    gid_mappings: Sequence[dict[str, int]] = ()
    sysctls: dict[str, str] | None = None
    cgroups_path: str = ""
    oom_score_adj: int | None = None
    seccomp: Message | None = None
    shm_size_bytes: int = 0
    shm_owner: Sequence[int] = (0, 0)
    selinux_label: str = ""
    mount_label: str = ""
    program_label: str = ""
