"""The files that a server writes for its shims, and reads again itself: `launch.json` beside a
container's config.json, `pause.json` in a sandbox's folder. A later version reads them too."""

from __future__ import annotations

from pyrunc.compile.descriptors import CgroupChoice
from pyrunc.compile.image_mount import Image
from pyrunc.compile.sources import Overlay
from pyrunc.records import Record, RecordFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.ipc import Message


class OtherRuntime(Record):
    """An OCI runtime: its command line. `systemd`: it is to ask systemd for the cgroup."""

    binary: str
    arguments: Sequence[str] = ()
    systemd: bool = False


class Place(Record):
    """A mount of a container without a launch: its `place` below the container's folder, and what
    is attached there: what the pod has `pinned` by this name, an image, the layers of an image
    volume, top first, or the `source` that the server has looked up, a file or folder of the host
    whose path has no link."""

    place: str
    pinned: str | None = None
    image: Image | None = None
    lower: Sequence[str] = ()
    source: str = ""


class RestoreFolders(Record):
    """A container that CRIU brings back: `images` and `work` are folders, `options` those of
    `checkpoint.CriuOptions`."""

    images: str
    work: str
    options: Message


class LaunchFile(RecordFile):
    """How a container is launched, beside its specification. `image_volumes`, `layer_volumes`:
    mounted and unpacked images by the names that binds have as sources; `settled`: sources whose
    real paths the server has looked up: a link there is an error when they are opened again;
    `runtime` or `restore`: who does it in place of us, with `places`."""

    name = "launch.json"
    rootfs: Overlay
    cgroup: CgroupChoice
    sandbox: str = ""
    tty: bool = False
    stdin: bool = False
    stdin_once: bool = False
    log_path: str | None = None
    log_directory: str | None = None
    image_volumes: dict[str, Image] | None = None
    layer_volumes: dict[str, Overlay] | None = None
    settled: Sequence[str] = ()
    runtime: OtherRuntime | None = None
    restore: RestoreFolders | None = None
    places: Sequence[Place] = ()

    @property
    def other_runtime(self) -> OtherRuntime | None:
        """None for a container of ours."""
        return self.runtime and self.runtime.replace(systemd=self.cgroup.driver == "systemd")
