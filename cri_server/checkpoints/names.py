"""What a checkpoint's archive holds, by the names that checkpointctl, containerd and CRI-O know.

| name | what |
|---|---|
| checkpoint/ | CRIU's images, and `descriptors.json`: what descriptors 0 to 2 were |
| config.dump | which container of which image, and when (checkpointctl's ContainerConfig) |
| spec.dump | its OCI configuration |
| status.dump, status | CRI's status, and the same in containerd's form |
| rootfs-diff.tar | what the container has written: files and directories of its writable layer |
| deleted.files | what it has removed of its image: a JSON list of paths |
| bind.mounts | what was mounted from the host: a JSON list of {source, destination, file_type,
permissions} |
| dump.log, stats-dump | what CRIU logged and measured |

Source: checkpointctl lib/metadata.go v1.6, containerd 2.4 container_checkpoint_linux.go, CRI-O
internal/lib/checkpoint.go.
"""

from __future__ import annotations

IMAGES = "checkpoint"
CONFIG, SPEC, STATUS, CONTAINERD_STATUS = "config.dump", "spec.dump", "status.dump", "status"
LAYER, DELETED, BIND_MOUNTS = "rootfs-diff.tar", "deleted.files", "bind.mounts"
LOG, STATISTICS = "dump.log", "stats-dump"
# A file beside the parts of an archive that is being made, with the path of the archive.
UNFINISHED = "unfinished"
FILES = (CONFIG, SPEC, STATUS, CONTAINERD_STATUS, LAYER, DELETED, BIND_MOUNTS, LOG, STATISTICS)

# In the manifest of an image whose only layer has an archive's files: checkpointctl's, CRI-O's,
# podman's.
ANNOTATIONS = (
    "org.criu.checkpoint.container.name",
    "io.kubernetes.cri-o.annotations.checkpoint.name",
    "io.podman.annotations.checkpoint.name",
)
