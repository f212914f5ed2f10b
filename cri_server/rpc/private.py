"""Our private calls beside CRI, shared by server and command line: what they ask and answer, JSON
objects over gRPC.

Either end may be older or newer: unknown fields are ignored, and an unknown call is UNIMPLEMENTED.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pyrunc.records import Record, Request

if TYPE_CHECKING:
    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath

SERVICE = "pyrunc.v1.Admin"
Asked = TypeVar("Asked", bound=Record)


def path(call: str) -> str:
    """What gRPC calls it."""
    return f"/{SERVICE}/{call}"


def encode(value: dict[str, Any]) -> bytes:
    """A message."""
    return json.dumps(value).encode()


def decode(data: bytes) -> dict[str, Any]:
    """A message's object. Raises ValueError."""
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def encode_record(record: Record) -> bytes:
    """A record as a message."""
    return encode(record.to_fields())


def decoder(kind: type[Asked]) -> Callable[[bytes], Asked]:
    """What makes such a record of a message. It raises ValueError, InvalidArgument."""
    return lambda data: kind.of(decode(data))


class Done(Record):
    """The answer of a call that has none but that it was done."""


# ---- images


class LoadImage(Request):
    """Load an archive that the server reads; `name` for an image without one. Answered with
    `Images`."""

    call = "LoadImage"
    path: AbsolutePath
    name: str | None = None


class LoadedImage(Record):
    """An image of the archive."""

    id: str
    repo_tags: Sequence[str]


class Images(Record):
    """Those of the archive."""

    images: Sequence[LoadedImage]


class PullImage(Request):
    """Answered with `Told` again and again. `auth`, here and below: the fields of CRI's AuthConfig."""

    call = "PullImage"
    image: str
    auth: Message | None = None


class PullPlatform(Request):
    """As `PullImage`, of the image for `platform`, OS/ARCH or OS/ARCH/VARIANT. A call of its own:
    an older server ignores a field and would pull for its own processor."""

    call = "PullPlatform"
    image: str
    platform: str
    auth: Message | None = None


class PushImage(Request):
    """Send an image to the registry of `target`. Answered with `Told` again and again."""

    call = "PushImage"
    image: str
    target: str
    auth: Message | None = None


class Progress(Record):
    """See `images.model.Progress`."""

    stage: str
    fetched_bytes: int
    total_bytes: int


class Told(Record):
    """How far a pull or a push is, or, at its end, the image's id, or the manifest's digest."""

    progress: Progress | None = None
    id: str | None = None


class TagImage(Request):
    """Another name for an image. Answered with `Done`."""

    call = "TagImage"
    source: str
    target: str


class SaveImages(Request):
    """Answered with an archive, part by part."""

    call = "SaveImages"
    images: Sequence[str]


class CheckLogin(Request):
    """Answered with `Done` when the registry takes this login."""

    call = "CheckLogin"
    registry: str
    auth: Message | None = None


# ---- containers


class ContainerConfig(Request):
    """Answered with a `Configs`."""

    call = "ContainerConfig"
    id: str


class Configs(Record):
    """What CreateContainer was given, with its environment: the messages in base64."""

    container: str
    sandbox: str


class PodConfig(Request):
    """Answered with a `SandboxConfig`."""

    call = "PodConfig"
    id: str


class SandboxConfig(Record):
    """The message of RunPodSandbox, in base64."""

    sandbox: str


class ExecAs(Request):
    """Exec with what CRI's ExecRequest has no fields for: `user` as in an OCI process, `env` as
    NAME=VALUE over the container's own, `cwd` unless empty. Answered with a `Session`."""

    call = "ExecAs"
    id: str
    command: Sequence[str]
    stdin: bool
    tty: bool
    user: Message | None = None
    env: Sequence[str] = ()
    cwd: str = ""


class Session(Record):
    """Where the streaming server has it."""

    url: str


class PauseContainer(Request):
    """Answered with `Done`."""

    call = "PauseContainer"
    id: str


class UnpauseContainer(Request):
    """Answered with `Done`."""

    call = "UnpauseContainer"
    id: str


class PausedContainers(Request):
    """Answered with an `Ids`."""

    call = "PausedContainers"


class Ids(Record):
    """Of containers."""

    ids: Sequence[str]


# ---- the server


class Timeline(Request):
    """`pod`: a reference, empty for all; `last` and `slowest`: so many, 0 for all. Answered with a
    `Calls`."""

    call = "Timeline"
    pod: str = ""
    last: int = 0
    slowest: int = 0


class Calls(Record):
    """Entries as the timeline has them on disk (`timeline.ring`)."""

    calls: Sequence[Message]


class FollowTimeline(Request):
    """Answered with an entry for each call that has ended since `after_ns`, and that ends from now
    on."""

    call = "FollowTimeline"
    pod: str = ""
    after_ns: int = 0


class ReleaseNetwork(Request):
    """Give up the network of a stopped pod whose plugins refuse to detach it. Answered with
    `Refusals`."""

    call = "ReleaseNetwork"
    id: str


class Refusals(Record):
    """What plugins refused with, a line each."""

    lines: Sequence[str]


class CollectGarbage(Request):
    """`dry_run`: only tell; `images`: also those that nobody uses; `force`: also addresses whose
    plugins refuse to take them back. Answered with an `Items`."""

    call = "CollectGarbage"
    dry_run: bool
    images: bool
    force: bool = False


class Item(Record):
    """See `garbage.Item`."""

    kind: str
    name: str
    action: str
    why: str
    size_bytes: int = 0


class Items(Record):
    """What there is on disk, and what was done with it."""

    items: Sequence[Item]


class DebugStacks(Request):
    """Answered with a `Text`."""

    call = "DebugStacks"


class Text(Record):
    """What all threads and tasks are at."""

    text: str


class DebugProfile(Request):
    """Look for so long. Answered with a `Stacks`."""

    call = "DebugProfile"
    seconds: float


class Stacks(Record):
    """Lines for a flame graph."""

    stacks: Sequence[str]
