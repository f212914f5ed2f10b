"""The files that the server writes for its shims: `launch.json` beside a container's config.json,
`pause.json` in a sandbox's folder. The server itself and later versions read them, too."""

from __future__ import annotations

from pyrunc.compile.image_mount import MountedImage
from pyrunc.compile.requests import CgroupChoice, Overlay
from pyrunc.records import Record, RecordFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.ipc import Message


class OtherRuntime(Record):
    """The command line of an OCI runtime other than pyrunc. `systemd`: the runtime lets systemd
    make the cgroup."""

    binary: str
    arguments: Sequence[str] = ()
    systemd: bool = False


class PreparedMount(Record):
    """A mount of a container that another runtime starts or CRIU restores. One of the fields after
    `place` names what is mounted.

    - `place`: the mount point, relative to the container's folder
    - `pinned`: the name of a mount that the shim holds for the pod
    - `image`: an image volume
    - `lower`: the layers of an unpacked image volume, top first
    - `source`: a file or folder of the host, whose path the server has resolved
    """

    place: str
    pinned: str | None = None
    image: MountedImage | None = None
    lower: Sequence[str] = ()
    source: str = ""


class RestoreFolders(Record):
    """The folders from which CRIU restores a container. `work`: CRIU's working folder; `options`:
    the fields of `checkpoint.CriuOptions`."""

    images: str
    work: str
    options: Message


class LaunchFile(RecordFile):
    """The parameters of a container's launch that are not in its config.json.

    - `image_volumes`: NAME -> mounted image, for bind mounts whose source is `pyrunc:NAME`
    - `layer_volumes`: NAME -> layers of an unpacked image, for the same purpose
    - `settled`: bind sources whose symbolic links the server has resolved. If such a path has a
      symbolic link when it is opened again, that is an error.
    - `runtime`: the other OCI runtime that starts the container
    - `restore`: the folders from which CRIU restores the container
    - `places`: mounts that the shim attaches before `runtime` or CRIU runs
    """

    name = "launch.json"
    rootfs: Overlay
    cgroup: CgroupChoice
    sandbox: str = ""
    tty: bool = False
    stdin: bool = False
    stdin_once: bool = False
    log_path: str | None = None
    log_directory: str | None = None
    image_volumes: dict[str, MountedImage] | None = None
    layer_volumes: dict[str, Overlay] | None = None
    settled: Sequence[str] = ()
    runtime: OtherRuntime | None = None
    restore: RestoreFolders | None = None
    places: Sequence[PreparedMount] = ()

    @property
    def other_runtime(self) -> OtherRuntime | None:
        """Return the other OCI runtime that starts the container; None if pyrunc starts it."""
        return self.runtime and self.runtime.replace(systemd=self.cgroup.driver == "systemd")
