"""Restores a container from CRIU's images, in a fork of the shim, because a restore takes long and
needs a new mount namespace.

CRIU makes the container's processes its siblings, so they are the fork's children. When the fork
has ended they become children of the shim, which is a subreaper, and the container is like any
other. The fork unshares its mount namespace and attaches the root and the other mounts there. CRIU
finds them in this namespace, and the host does not see them.
"""

from __future__ import annotations

import os

from pyrunc import jsontext
from pyrunc.checkpoint import restore
from pyrunc.checkpoint.checkpoint import CriuOptions
from pyrunc.container.bundle import Bundle, CreateOptions
from pyrunc.kernel.fd import read_file
from pyrunc.shim import messages
from pyrunc.shim.other_runtime import attach
from pyrunc.shim.starter import StartedProcess
from pyrunc.spec.parse import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.shim.compile import CompiledContainer
    from pyrunc.shim.starter import PauseProcess
    from pyrunc.spec.model import Spec

ROOT = "rootfs"


def start(
    compiled: CompiledContainer,
    directory: str,
    stdio: tuple[int, int, int],
    pause: PauseProcess | None,
) -> StartedProcess:
    """Restore the container; return its first process. Must run in a fork of the shim. Raises
    Error."""
    request = compiled.file.restore
    assert request is not None
    attach(compiled, directory, pause)
    document = jsontext.loads(read_file(f"{directory}/{messages.CONFIG}"))
    spec = parse(document)
    created = restore.restore(
        compiled.state.replace(rootfs=f"{directory}/{ROOT}", complete=False),
        Bundle(directory, document, spec),
        CreateOptions(**compiled.file.cgroup.to_fields()),
        CriuOptions(image_path=request.images, work_path=request.work, **request.options),
        _labels(spec),
        stdio,
    )
    os.close(created.pidfd)
    assert created.cgroup is not None
    process = StartedProcess(created.pid, created.start_time, created.cgroup, created.console_fd)
    process.has_poststop = compiled.poststop
    return process


def _labels(spec: Spec) -> restore.Labels:
    """Return the new pod's SELinux labels. With the checkpoint's labels, the processes could not
    use the pod's files, or might have another pod's label."""
    label = spec.process.selinux_label if spec.process else ""
    return restore.Labels(f"selinux:{label}" if label else "", spec.linux.mount_label)
