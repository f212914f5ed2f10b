"""Sandboxes and containers in the server: their requests, decisions about them, and facts from
which states are derived.

The record on disk holds the request and the decisions. CRI messages are stored in their wire form:
fields unknown to this version survive, and decoding takes microseconds.
"""

from __future__ import annotations

import asyncio
import base64
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
from pyrunc.shim.messages import Exit as Exit

SandboxName = tuple[str, str, str, int]
ContainerName = tuple[str, str, int]
AnyMessage = TypeVar("AnyMessage", bound=Message)


def copy(message: AnyMessage) -> AnyMessage:
    """Copy a CRI message. A part of a request would keep the memory of the whole request: 10 KiB
    in place of 2 for a small container."""
    copied = type(message)()
    copied.CopyFrom(message)
    return copied


def pack(message: Any) -> str:
    """Encode a CRI message as text for a record."""
    return base64.b64encode(message.SerializeToString()).decode()


def unpack(kind: Any, text: str) -> Any:
    """Decode the text of `pack` to a message of class `kind`. Raises DamagedRecord."""
    try:
        return kind.FromString(base64.b64decode(text, validate=True))
    except Exception as error:
        raise DamagedRecord(f"not a {kind.__name__}: {error}") from None


@dataclass(eq=False, slots=True)
class Sandbox:
    """A pod's sandbox. `phase`: `ready`, or `stopped` once StopPodSandbox can no longer be
    undone."""

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
    removed: bool = False  # the record; it must not be written again
    cached_entry: CachedEncoding = field(default_factory=CachedEncoding)
    cached_status: CachedEncoding = field(default_factory=CachedEncoding)
    cached_stats: CachedEncoding = field(default_factory=CachedEncoding)

    @property
    def name(self) -> SandboxName:
        """The unique key: name, namespace, uid and attempt."""
        return sandbox_name(self.config.metadata)

    @property
    def options(self) -> api.NamespaceOption:
        """The namespace options of the request."""
        return self.config.linux.security_context.namespace_options

    @property
    def host_network(self) -> bool:
        return bool(self.options.network == api.NODE)

    @property
    def state(self) -> int:
        """READY only while it is not stopped and its pause process lives."""
        ready = self.phase == "ready" and self.pause_alive
        return api.SANDBOX_READY if ready else api.SANDBOX_NOTREADY

    def to_record(self) -> SandboxRecord:
        return SandboxRecord(
            id=self.id,
            config=pack(self.config),
            runtime_handler=self.runtime_handler,
            created_at_ns=self.created_at_ns,
            boot_id=self.boot_id,
            cgroup_parent=self.cgroup_parent,
            cgroups_path=self.cgroups_path,
            phase=self.phase,
            ips=self.ips,
            network=self.network,
            netns_path=self.netns_path,
            holder=self.pause,
            shim=self.shim,
            selinux=[self.selinux.process, self.selinux.mount],
        )

    @classmethod
    def from_record(cls, record: SandboxRecord) -> Sandbox:
        """Convert a record. Raises DamagedRecord."""
        try:
            labels = SelinuxLabels(*record.selinux)
        except TypeError:
            raise DamagedRecord(
                f"sandbox record: selinux is {record.selinux!r}, not two labels"
            ) from None
        return cls(
            id=record.id,
            config=unpack(api.PodSandboxConfig, record.config),
            runtime_handler=record.runtime_handler,
            created_at_ns=record.created_at_ns,
            boot_id=record.boot_id,
            cgroup_parent=record.cgroup_parent,
            cgroups_path=record.cgroups_path,
            phase=record.phase,
            ips=list(record.ips),
            network=record.network,
            netns_path=record.netns_path,
            pause=record.holder,
            shim=record.shim,
            selinux=labels,
        )


@dataclass(frozen=True, slots=True)
class User:
    """The container process's user, resolved in its image."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str = ""


@dataclass(eq=False, slots=True)
class Container:
    """A container of a sandbox. Its state follows from `started_at_ns`, `exit`, and whether its
    shim can be reached."""

    id: str
    sandbox_id: str
    config: api.ContainerConfig
    created_at_ns: int
    boot_id: str
    image_id: str
    image_ref: str
    image_name: str
    user: User
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
    has_cgroup: bool = False  # its cgroup exists since then
    starting: bool = False  # StartContainer then reports an exit, after its own event
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    on_disk: asyncio.Lock = field(default_factory=asyncio.Lock)
    removed: bool = False  # the record; as a sandbox's
    cached_entry: CachedEncoding = field(default_factory=CachedEncoding)
    cached_status: CachedEncoding = field(default_factory=CachedEncoding)
    cached_stats: CachedEncoding = field(default_factory=CachedEncoding)

    @property
    def name(self) -> ContainerName:
        """The unique key: sandbox, name and attempt."""
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

    def ended(self, how: Exit) -> None:
        """Record the exit; the first one counts."""
        if self.exit is None:
            self.exit = how
            self.lost = False
        self.exited.set()

    def to_record(self) -> ContainerRecord:
        return ContainerRecord(
            id=self.id,
            sandbox_id=self.sandbox_id,
            config=pack(self.config),
            created_at_ns=self.created_at_ns,
            boot_id=self.boot_id,
            image_id=self.image_id,
            image_ref=self.image_ref,
            image_name=self.image_name,
            user=[self.user.uid, self.user.gid, list(self.user.groups), self.user.home],
            stop_signal=self.stop_signal,
            log_path=self.log_path,
            cgroups_path=self.cgroups_path,
            resources=pack(self.resources),
            mounted_images=self.mounted_images,
        )

    @classmethod
    def from_record(cls, record: ContainerRecord) -> Container:
        """Convert a record. Raises DamagedRecord."""
        try:
            uid, gid, groups, home = record.user
            user = User(uid, gid, tuple(groups), home)
        except (TypeError, ValueError):
            raise DamagedRecord(
                f"container record: user is {record.user!r}, not uid, gid, groups, home"
            ) from None
        return cls(
            id=record.id,
            sandbox_id=record.sandbox_id,
            config=unpack(api.ContainerConfig, record.config),
            created_at_ns=record.created_at_ns,
            boot_id=record.boot_id,
            image_id=record.image_id,
            image_ref=record.image_ref,
            image_name=record.image_name,
            user=user,
            stop_signal=record.stop_signal,
            log_path=record.log_path,
            cgroups_path=record.cgroups_path,
            resources=unpack(api.LinuxContainerResources, record.resources),
            mounted_images=record.mounted_images,
        )


def sandbox_name(metadata: api.PodSandboxMetadata) -> SandboxName:
    return (metadata.name, metadata.namespace, metadata.uid, metadata.attempt)
