"""UpdatePodSandboxResources: saves the pod's limits in its record; kubelet writes the pod's cgroup
itself."""

from __future__ import annotations

from cri_server.api import api_pb2 as api
from cri_server.services import Services
from cri_server.spec import resources
from cri_server.store import disk
from cri_server.store.model import copy


async def update(
    services: Services,
    reference: str,
    overhead: api.LinuxContainerResources,
    requested: api.LinuxContainerResources,
) -> None:
    """Save `overhead` and the `requested` resources in the sandbox's configuration, and notify NRI
    plugins before and after.

    Raises NotFound, KernelError, InvalidArgument for invalid resources, PeerError if an NRI plugin
    refuses the update, and ResourceExhausted on a full disk.
    """
    sandbox = services.index.sandboxes.get(reference)
    resources.check(overhead)
    resources.check(requested)
    changed = copy(sandbox.config)
    changed.linux.overhead.CopyFrom(overhead)
    changed.linux.resources.CopyFrom(requested)
    await services.observer.update_pod(sandbox, overhead, requested)
    before, sandbox.config = sandbox.config, changed
    try:
        await disk.save_sandbox(services.paths, sandbox)
    except BaseException:
        sandbox.config = before
        raise
    await services.observer.updated_pod(sandbox)
