"""Describes a checkpointed container in the formats of checkpointctl (config.dump), CRI
(status.dump) and containerd (status)."""

from __future__ import annotations

import datetime
from typing import Any

from cri_server.checkpoints import names
from cri_server.store.model import Container

RUNTIME = "pyrunc"


def files(container: Container, captured_at_ns: int, handler: str) -> dict[str, dict[str, Any]]:
    """Return the metadata files of the container's checkpoint: {file name in the archive: JSON
    object}. `captured_at_ns`: the time of the checkpoint, in nanoseconds since 1970; `handler`: the
    runtime handler."""
    return {
        names.CONFIG: _config(container, captured_at_ns, handler),
        names.STATUS: _status(container),
        names.CONTAINERD_STATUS: _containerd_status(container),
    }


def _config(container: Container, captured_at_ns: int, handler: str) -> dict[str, Any]:
    """Return the content of config.dump, checkpointctl's ContainerConfig."""
    return {
        "id": container.id,
        "name": container.config.metadata.name,
        "rootfsImage": container.image_name,
        "rootfsImageName": container.image_name,
        "rootfsImageRef": container.image_ref,
        "runtime": handler or RUNTIME,
        "createdTime": _rfc3339(container.created_at_ns),
        "checkpointedTime": _rfc3339(captured_at_ns),
    }


def _status(container: Container) -> dict[str, Any]:
    """Return CRI's ContainerStatus, with field names as Go encodes them in JSON."""
    config = container.config
    return {
        "id": container.id,
        "metadata": {"name": config.metadata.name, "attempt": config.metadata.attempt},
        "state": container.state,
        "created_at": container.created_at_ns,
        "started_at": container.started_at_ns,
        "image": {"image": container.image_name},
        "image_ref": container.image_ref,
        "image_id": container.image_id,
        "labels": dict(config.labels),
        "annotations": dict(config.annotations),
        "mounts": [
            {"container_path": m.container_path, "host_path": m.host_path, "readonly": m.readonly}
            for m in config.mounts
        ],
        "log_path": container.log_path,
    }


def _containerd_status(container: Container) -> dict[str, Any]:
    return {
        "CreatedAt": container.created_at_ns,
        "StartedAt": container.started_at_ns,
        "FinishedAt": 0,
        "ExitCode": 0,
        "Pid": container.process.pid if container.process else 0,
        "Reason": "",
        "Message": "",
    }


def _rfc3339(time_ns: int) -> str:
    # A float of time_ns / 10**9 would lose the last digits.
    when = datetime.datetime.fromtimestamp(time_ns // 10**9, datetime.UTC)
    return f"{when:%Y-%m-%dT%H:%M:%S}.{time_ns % 10**9:09d}Z"
