"""The requests and replies of the gRPC service `pyrunc.v1.Admin`; server and command line share
these classes.

On the wire they are JSON objects. Either end may be older or newer: unknown fields are ignored, and
an unknown call is answered with UNIMPLEMENTED.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cri_server.store.garbage_item import GarbageItem
from pyrunc.records import Record, Request

if TYPE_CHECKING:
    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath

SERVICE = "pyrunc.v1.Admin"
RecordType = TypeVar("RecordType", bound=Record)


def path(call: str) -> str:
    """Return the gRPC path of `call`, a method of `pyrunc.v1.Admin`."""
    return f"/{SERVICE}/{call}"


def encode(message: Record | dict[str, Any] | None) -> bytes:
    """Encode a request or a reply; None is an empty reply."""
    fields = message.to_fields() if isinstance(message, Record) else message or {}
    return json.dumps(fields).encode()


def decode(data: bytes) -> dict[str, Any]:
    """Decode a message and return its JSON object. Raises ValueError for any other content."""
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def decoder(kind: type[RecordType]) -> Callable[[bytes], RecordType]:
    """Return a function that decodes a message to an object of class `kind`. The function raises
    ValueError if the message is not a JSON object, InvalidArgument if a field is invalid."""
    return lambda data: kind.of(decode(data))


class AdminRequest(Request):
    """A request to `pyrunc.v1.Admin`. The name of its class is the name of the call."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.call = cls.__name__


class Empty(Record):
    """An empty reply."""


# ---- images


class LoadImage(AdminRequest):
    """Load the images of an archive on the server's disk. `name`: the name for an image that has
    none in the archive. Reply: `LoadedImages`."""

    path: AbsolutePath
    name: str | None = None


class LoadedImage(Record):
    """An image of a loaded archive."""

    id: str
    repo_tags: Sequence[str]


class LoadedImages(Record):
    """The images of a loaded archive."""

    images: Sequence[LoadedImage]


class PullImage(AdminRequest):
    """Pull an image. Reply: a stream of `TransferUpdate`. `auth` is an object with the fields of
    CRI's AuthConfig, here and in the other requests."""

    image: str
    auth: Message | None = None


class PullPlatform(AdminRequest):
    """Pull the image of `platform`: OS/ARCH or OS/ARCH/VARIANT. Reply: a stream of
    `TransferUpdate`.

    This call is separate from `PullImage`, because an older server would ignore a new field of that
    call and pull the image for the server's processor.
    """

    image: str
    platform: str
    auth: Message | None = None


class PushImage(AdminRequest):
    """Push `image` under the name `target`, which includes the registry. Reply: a stream of
    `TransferUpdate`."""

    image: str
    target: str
    auth: Message | None = None


class TransferProgress(Record):
    """The progress of a pull or push. `stage`: resolving, fetching, done for a pull; compressing,
    sending, done for a push. `fetched_bytes`, `total_bytes`: sums over the blobs of all layers."""

    stage: str
    fetched_bytes: int
    total_bytes: int


class TransferUpdate(Record):
    """One message of the stream that a pull or push returns. The last message has only `id`: the id
    of the pulled image or the digest of the pushed manifest. All others have only `progress`."""

    progress: TransferProgress | None = None
    id: str | None = None


class TagImage(AdminRequest):
    """Add a name to an image. Reply: `Empty`."""

    source: str
    target: str


class SaveImages(AdminRequest):
    """Save images to an archive. Reply: a stream of its bytes."""

    images: Sequence[str]


class CheckLogin(AdminRequest):
    """Try a login at a registry. Reply: `Empty` if the registry accepts the login, else an
    error."""

    registry: str
    auth: Message | None = None


# ---- containers


class ContainerConfig(AdminRequest):
    """Get a container's configuration. Reply: `ContainerConfigs`."""

    id: str


class ContainerConfigs(Record):
    """The configurations that a container was created from, as encoded messages in base64.
    `container`: its ContainerConfig with the environment; `sandbox`: its PodSandboxConfig."""

    container: str
    sandbox: str


class PodConfig(AdminRequest):
    """Get a pod's configuration. Reply: `SandboxConfig`."""

    id: str


class SandboxConfig(Record):
    """The PodSandboxConfig of a RunPodSandboxRequest, as an encoded message in base64."""

    sandbox: str


class ExecAs(AdminRequest):
    """Run a process in a container with settings that CRI's ExecRequest lacks. Reply: `SessionUrl`.

    `user`: an object like `process.user` in an OCI configuration; `env`: NAME=VALUE, added to the
    container's environment; `cwd`: the working directory, empty for the container's own.
    """

    id: str
    command: Sequence[str]
    stdin: bool
    tty: bool
    user: Message | None = None
    env: Sequence[str] = ()
    cwd: str = ""


class SessionUrl(Record):
    """The URL of a session at the streaming server."""

    url: str


class PauseContainer(AdminRequest):
    """Freeze a container's processes. Reply: `Empty`."""

    id: str


class UnpauseContainer(AdminRequest):
    """Thaw a container's processes. Reply: `Empty`."""

    id: str


class PausedContainers(AdminRequest):
    """List paused containers. Reply: `ContainerIds`."""


class ContainerIds(Record):
    """Ids of containers."""

    ids: Sequence[str]


# ---- the server


class Timeline(AdminRequest):
    """List past calls. Reply: `Calls`.

    `pod`: selects a pod by its id, a prefix of the id, NAME or NAMESPACE/NAME; empty for all pods.
    `last`: list only this number of the latest calls. `slowest`: list only this number of the
    slowest calls, and ignore `last`. Both are 0 for no limit.
    """

    pod: str = ""
    last: int = 0
    slowest: int = 0


class Calls(Record):
    """Recorded calls, each in the format of the timeline's files (`timeline.ring.Entry`)."""

    calls: Sequence[Message]


class FollowTimeline(AdminRequest):
    """Follow the timeline. Reply: a stream of entries, beginning with the first call that ended
    after `after_ns` (nanoseconds since the epoch)."""

    pod: str = ""
    after_ns: int = 0


class ReleaseNetwork(AdminRequest):
    """Release the network of a stopped pod even if its CNI plugins fail in DEL. Reply:
    `Refusals`."""

    id: str


class Refusals(Record):
    """The errors of the CNI plugins that failed, one per line."""

    lines: Sequence[str]


class CollectGarbage(AdminRequest):
    """Remove objects on disk to which no pod, container or image refers. Reply: `GarbageItems`.

    `dry_run`: report only; `images`: also remove unused images; `force`: also release addresses
    whose CNI plugins fail in DEL.
    """

    dry_run: bool
    images: bool
    force: bool = False


class GarbageItems(Record):
    """All examined objects on disk, and the action on each."""

    items: Sequence[GarbageItem]


class DebugStacks(AdminRequest):
    """Get the stacks of all threads and tasks. Reply: `StackText`."""


class StackText(Record):
    """The stacks of all threads and tasks."""

    text: str


class DebugProfile(AdminRequest):
    """Sample the server's stacks for `seconds`. Reply: `Stacks`."""

    seconds: float


class Stacks(Record):
    """Folded stacks with counts, for a flame graph."""

    stacks: Sequence[str]
