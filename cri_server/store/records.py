"""Defines the records of sandboxes and containers on disk. A record also has a version.

CRI messages are stored as text: base64 of their wire form (`model.pack`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cri_server.store.facts import ProcessIdentity
from pyrunc.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class SandboxRecord(Record):
    """The record `sandboxes/ID.json`, with fields of `model.Sandbox`. `selinux`: the process's
    label and the mounts' label; empty in the records of older versions."""

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
    # The pause process: other versions read it under this name.
    holder: ProcessIdentity | None
    shim: ProcessIdentity | None
    selinux: Sequence[str] = ()

    @classmethod
    def label(cls) -> str:
        return "sandbox record"


class ContainerRecord(Record):
    """The record `containers/ID.json`, with fields of `model.Container`. `user`: a list of uid,
    gid, list of groups, and home."""

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
