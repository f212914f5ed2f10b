"""A pod's checkpoint: the names of its files, and which archive is which container's."""

from __future__ import annotations

import re

import msgspec

from cri_server import typed
from pyrunc.errors import InvalidArgument

OPTIONS, DUMP, SHM = "pod.options", "pod.dump", "devshm-checkpoint.tar"
VERSION = 1
LIMIT_BYTES = 1 << 20
_ID = re.compile(r"[0-9a-f]{64}")


class Options(msgspec.Struct):
    """pod.options, as checkpointctl has it (lib/metadata.go, CheckpointedPodOptions): container
    names -> ids."""

    containers: dict[str, str]
    annotations: dict[str, str] = {}
    version: int = VERSION

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)


def decode(content: bytes) -> Options:
    """What `encode` wrote. Raises InvalidArgument."""
    try:
        found = typed.decode(content, Options)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the checkpoint's {OPTIONS}: {error}") from None
    if found.version != VERSION:
        raise InvalidArgument(
            f"the checkpoint's {OPTIONS} has version {found.version}, not {VERSION}"
        )
    for identifier in found.containers.values():
        if not _ID.fullmatch(identifier):
            raise InvalidArgument(
                f"the checkpoint's {OPTIONS}: {identifier[:80]!r} is no container's id"
            )
    return found


def archive(container_id: str) -> str:
    """The name of a container's archive."""
    return f"{container_id}.tar"
