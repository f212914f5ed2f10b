"""The names of the files in a checkpoint's archive, the same as in checkpointctl, containerd and
CRI-O.

| name | content |
|---|---|
| checkpoint/ | CRIU's images, and `descriptors.json`: the files behind descriptors 0 to 2 |
| config.dump | the container, its image and the time (checkpointctl's ContainerConfig) |
| spec.dump | the container's OCI configuration |
| status.dump, status | the container's status in CRI's form, and in containerd's form |
| rootfs-diff.tar | the files and directories of the container's writable layer |
| deleted.files | the paths that the container has removed from its image: a JSON list |
| bind.mounts | the bind mounts: a JSON list of {source, destination, file_type, permissions} |
| dump.log, stats-dump | CRIU's log and measurements |

Source: checkpointctl lib/metadata.go v1.6, containerd 2.4 container_checkpoint_linux.go, CRI-O
internal/lib/checkpoint.go.
"""

from __future__ import annotations

IMAGES = "checkpoint"
CONFIG, SPEC, STATUS, CONTAINERD_STATUS = "config.dump", "spec.dump", "status.dump", "status"
LAYER, DELETED, BIND_MOUNTS = "rootfs-diff.tar", "deleted.files", "bind.mounts"
LOG, STATISTICS = "dump.log", "stats-dump"
# Lies beside an archive's parts while the archive is made, and contains the archive's path.
UNFINISHED = "unfinished"
FILES = (CONFIG, SPEC, STATUS, CONTAINERD_STATUS, LAYER, DELETED, BIND_MOUNTS, LOG, STATISTICS)

# The manifest of a checkpoint image has one of these annotations (of checkpointctl, CRI-O, podman).
# The image's only layer has the files of a checkpoint's archive.
ANNOTATIONS = (
    "org.criu.checkpoint.container.name",
    "io.kubernetes.cri-o.annotations.checkpoint.name",
    "io.podman.annotations.checkpoint.name",
)
