"""Classes with which a caller describes what to compile. The server imports them without the
planner, which needs 2 MiB."""

from __future__ import annotations

from pyrunc.compile.image_mount import MountedImage
from pyrunc.records import Record, RecordFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.ipc import Message


def keyring_name(container_id: str) -> str:
    """Return the name of a container's session keyring, which is the same as under runc."""
    return f"_ses.{container_id}"


class CgroupChoice(Record):
    """How the runtime makes a cgroup.

    - `driver`: `cgroupfs` or `systemd`
    - `missing_controllers`: the reaction to a limit whose controller is not on the v2 tree: `error`
      or `warn`
    """

    driver: str = "cgroupfs"
    missing_controllers: str = "error"


class Overlay(Record):
    """An overlay as the container's root. Without `upper` and `work` the overlay is read-only.

    - `lower`: paths of the lower layers, top first
    - `image`: an image whose mount is the lower layer, instead of `lower`
    """

    lower: Sequence[str] = ()
    upper: str = ""
    work: str = ""
    volatile: bool = False
    image: MountedImage | None = None


class PauseRequest(RecordFile):
    """The request for a pod's pause process, which the server writes to the sandbox's folder.

    - `namespaces`: type (`network`, `ipc`, `uts`, `pid`, `user`) -> one of the values below. The
      process always gets a new mount namespace. A new user namespace owns the other new namespaces.
    - `uid_mappings`, `gid_mappings`: OCI's `{containerID, hostID, size}` objects, for a new user
      namespace
    - `shm_size_bytes`, `shm_owner` (uid, gid), `mount_label` (SELinux): for the /dev/shm of a new
      ipc namespace
    - `selinux_label`: the SELinux label of the process
    - `program_label`: the SELinux label of the memfd with the executable `pause`. A policy may
      forbid that a memfd with the default label starts the process's domain.

    Values of `namespaces`:

    - `new`: make a new namespace
    - an absolute path: join this namespace
    - `pinned`: join the namespace that the launching process adds (`Launch.pinned`)
    - `host` or `none`: stay in the launching process's namespace
    """

    # Earlier builds of version 0.1.0 write this file under the name holder.json.
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
