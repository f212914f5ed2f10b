"""The fields of sandboxes' and containers' records on disk, besides their version.

CRI messages are texts: base64 of their wire form (`model.pack`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cri_server.store.facts import ProcessIdentity
from pyrunc.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class SandboxRecord(Record):
    """`sandboxes/ID.json`, the fields of `model.Sandbox`. `selinux`: the process's and the mounts'
    label, which older versions' records lack."""

    id: str
    config: str
    runtime_handler: str
    created_at_ns: int
    boot_id: str
    cgroup_parent: str
    cgroups_path: str
    phase: str
    ips: Sequence[str]
    network: str
    netns_path: str
    # The pause process: the key has this name in the records of earlier versions, too.
    holder: ProcessIdentity | None
    shim: ProcessIdentity | None
    selinux: Sequence[str] = ()

    @classmethod
    def label(cls) -> str:
        return "sandbox record"


class ContainerRecord(Record):
    """`containers/ID.json`, the fields of `model.Container`. `user`: uid, gid, a list of groups,
    home."""

    id: str
    sandbox_id: str
    config: str
    created_at_ns: int
    boot_id: str
    image_id: str
    image_ref: str
    image_name: str
    user: Sequence[Any]
    stop_signal: str
    log_path: str
    cgroups_path: str
    resources: str
    mounted_images: dict[str, str]

    @classmethod
    def label(cls) -> str:
        return "container record"
