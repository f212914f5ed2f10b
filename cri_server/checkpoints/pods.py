"""The files of a pod's checkpoint: an archive for each container, and pod.options, which lists the
containers."""

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
    """The content of pod.options, with the fields of checkpointctl's CheckpointedPodOptions
    (lib/metadata.go). `containers` maps container names to ids."""

    containers: dict[str, str]
    annotations: dict[str, str] = {}
    version: int = VERSION


def decode(content: bytes) -> Options:
    """Decode the content of pod.options. Raises InvalidArgument."""
    try:
        options = typed.decode(content, Options)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the checkpoint's {OPTIONS}: {error}") from None
    if options.version != VERSION:
        raise InvalidArgument(
            f"the checkpoint's {OPTIONS} has version {options.version}, not {VERSION}"
        )
    # The id becomes a file's name (`archive`).
    for identifier in options.containers.values():
        if not _ID.fullmatch(identifier):
            raise InvalidArgument(
                f"the checkpoint's {OPTIONS}: {identifier[:80]!r} is not a container id"
            )
    return options


def archive(container_id: str) -> str:
    """Return the name of a container's archive in a pod's checkpoint."""
    return f"{container_id}.tar"
