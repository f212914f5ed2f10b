"""Sandboxes and containers as the server stores them: their requests, decisions about them, and the
facts from which their states are derived.

The record on disk holds the request and the decisions. CRI messages are stored in protobuf's wire
form, so fields that this version does not know survive, and decoding takes microseconds.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message

from cri_server.api import api_pb2 as api
from cri_server.operations.locks import Gate
from cri_server.security.selinux.labels import NONE as NO_LABELS
from cri_server.security.selinux.labels import SelinuxLabels
from cri_server.store.encoded import CachedEncoding
from cri_server.store.facts import ProcessIdentity
from cri_server.store.records import ContainerRecord, SandboxRecord
from pyrunc.atomic_file import DamagedRecord
from pyrunc.records import Record
from pyrunc.shim.messages import Exit as Exit

SandboxName = tuple[str, str, str, int]
ContainerName = tuple[str, str, int]
# Fields whose type or name differs between record and object. The record has the field `pause`
# under the key `holder`, which other versions of the server read.
_SANDBOX_CONVERTED = ("config", "holder", "selinux")
_CONTAINER_CONVERTED = ("config", "user", "resources")
AnyMessage = TypeVar("AnyMessage", bound=Message)


def copy(message: AnyMessage) -> AnyMessage:
    """Copy a CRI message. A part of a request must be stored as a copy: the part itself would keep
    the whole request in memory, 10 KiB instead of 2 for a small container."""
    copied = type(message)()
    copied.CopyFrom(message)
    return copied


def pack(message: Any) -> str:
    """Encode a CRI message as text, for a record or an answer in JSON."""
    return base64.b64encode(message.SerializeToString()).decode()


def unpack(kind: Any, text: str) -> Any:
    """Decode the text of `pack` to a message of class `kind`. Raises DamagedRecord."""
    try:
        return kind.FromString(base64.b64decode(text, validate=True))
    except Exception as error:
        raise DamagedRecord(f"not a {kind.__name__}: {error}") from None


@dataclass(eq=False, slots=True)
class Sandbox:
    """A pod's sandbox. `phase`: `ready`; `stopping` while StopPodSandbox runs; `stopped` after
    StopPodSandbox."""

    id: str
    config: api.PodSandboxConfig
    runtime_handler: str
    created_at_ns: int
    boot_id: str
    cgroup_parent: str
    cgroups_path: str
    phase: str = "ready"
    ips: list[str] = field(default_factory=list)
    network: str = "none"  # none, host, attached, released
    netns_path: str = ""
    pause: ProcessIdentity | None = None
    shim: ProcessIdentity | None = None
    selinux: SelinuxLabels = NO_LABELS
    # Facts and coordination, not recorded.
    pause_alive: bool = False
    reachable: bool = False
    stop_published: bool = False
    gate: Gate = field(default_factory=Gate)
    on_disk: asyncio.Lock = field(default_factory=asyncio.Lock)
    removed: bool = False  # the record is deleted, and must not be written again
    cached_entry: CachedEncoding = field(default_factory=CachedEncoding)
    cached_status: CachedEncoding = field(default_factory=CachedEncoding)
    cached_stats: CachedEncoding = field(default_factory=CachedEncoding)

    @property
    def name(self) -> SandboxName:
        """Return the sandbox's unique name: name, namespace, uid and attempt."""
        return sandbox_name(self.config.metadata)

    @property
    def options(self) -> api.NamespaceOption:
        """Return the namespace options of the RunPodSandbox request."""
        return self.config.linux.security_context.namespace_options

    @property
    def host_network(self) -> bool:
        return bool(self.options.network == api.NODE)

    @property
    def state(self) -> int:
        """Return SANDBOX_READY while the phase is `ready` and the pause process lives, else
        SANDBOX_NOTREADY."""
        ready = self.phase == "ready" and self.pause_alive
        return api.SANDBOX_READY if ready else api.SANDBOX_NOTREADY

    def to_record(self) -> SandboxRecord:
        return SandboxRecord(
            **_shared(self, SandboxRecord, _SANDBOX_CONVERTED),
            config=pack(self.config),
            holder=self.pause,
            selinux=[self.selinux.process, self.selinux.mount],
        )

    @classmethod
    def from_record(cls, record: SandboxRecord) -> Sandbox:
        """Make a sandbox from its record. Raises DamagedRecord."""
        try:
            labels = SelinuxLabels(*record.selinux)
        except TypeError:
            raise DamagedRecord(
                f"sandbox record: selinux is {record.selinux!r}, not two labels"
            ) from None
        return cls(
            **_shared(record, SandboxRecord, _SANDBOX_CONVERTED),
            config=unpack(api.PodSandboxConfig, record.config),
            pause=record.holder,
            selinux=labels,
        )


@dataclass(frozen=True, slots=True)
class ResolvedUser:
    """The user and groups of a container's process, as resolved in its image."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str = ""


@dataclass(eq=False, slots=True)
class Container:
    """A container of a sandbox. Its state is derived from `started_at_ns`, `exit` and `lost`."""

    id: str
    sandbox_id: str
    config: api.ContainerConfig
    created_at_ns: int
    boot_id: str
    image_id: str
    image_ref: str
    image_name: str
    user: ResolvedUser
    stop_signal: str
    log_path: str
    cgroups_path: str
    resources: api.LinuxContainerResources
    mounted_images: dict[str, str] = field(default_factory=dict)  # container path -> image id
    # Facts and coordination, not recorded.
    process: ProcessIdentity | None = None
    started_at_ns: int = 0
    exit: Exit | None = None
    lost: bool = False
    created_in: ProcessIdentity | None = None  # the shim that compiled it
    has_cgroup: bool = False  # its cgroup existed after the compilation
    starting: bool = False  # while True, StartContainer publishes the exit, after the start
    start_sent: bool = False  # a shim was asked to start the container, and may have done so
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    on_disk: asyncio.Lock = field(default_factory=asyncio.Lock)
    removed: bool = False  # the record is deleted, and must not be written again
    cached_entry: CachedEncoding = field(default_factory=CachedEncoding)
    cached_status: CachedEncoding = field(default_factory=CachedEncoding)
    cached_stats: CachedEncoding = field(default_factory=CachedEncoding)

    @property
    def name(self) -> ContainerName:
        """Return the container's unique name: sandbox, name and attempt."""
        return (self.sandbox_id, self.config.metadata.name, self.config.metadata.attempt)

    @property
    def state(self) -> int:
        if self.exit is not None:
            return api.CONTAINER_EXITED
        if self.lost:
            return api.CONTAINER_UNKNOWN
        return api.CONTAINER_RUNNING if self.started_at_ns else api.CONTAINER_CREATED

    @property
    def running(self) -> bool:
        return self.state == api.CONTAINER_RUNNING

    def set_exit(self, exit: Exit) -> None:
        """Set the exit and wake all tasks that wait for it. Does nothing if the exit is already
        set."""
        if self.exit is None:
            self.exit = exit
            self.lost = False
        self.exited.set()

    def to_record(self) -> ContainerRecord:
        return ContainerRecord(
            **_shared(self, ContainerRecord, _CONTAINER_CONVERTED),
            config=pack(self.config),
            user=[self.user.uid, self.user.gid, list(self.user.groups), self.user.home],
            resources=pack(self.resources),
        )

    @classmethod
    def from_record(cls, record: ContainerRecord) -> Container:
        """Make a container from its record. Raises DamagedRecord."""
        try:
            uid, gid, groups, home = record.user
            user = ResolvedUser(uid, gid, tuple(groups), home)
        except (TypeError, ValueError):
            raise DamagedRecord(
                f"container record: user is {record.user!r}, not uid, gid, groups, home"
            ) from None
        return cls(
            **_shared(record, ContainerRecord, _CONTAINER_CONVERTED),
            config=unpack(api.ContainerConfig, record.config),
            user=user,
            resources=unpack(api.LinuxContainerResources, record.resources),
        )


def _shared(source: object, kind: type[Record], converted: Sequence[str]) -> dict[str, Any]:
    """Return, by name, the fields that a record and its sandbox or container have in common.

    - `source`: the record, sandbox or container whose fields are returned.
    - `kind`: the record's class.
    - `converted`: the names of fields that differ in type or name; they are left out.
    """
    return {name: getattr(source, name) for name in kind.__annotations__ if name not in converted}


def sandbox_name(metadata: api.PodSandboxMetadata) -> SandboxName:
    return (metadata.name, metadata.namespace, metadata.uid, metadata.attempt)
