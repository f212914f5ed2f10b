"""UpdatePodSandboxResources: kubelet writes the pod's cgroup itself; we remember the figures it
tells us."""

from __future__ import annotations

from cri_server.api import api_pb2 as api
from cri_server.services import Services
from cri_server.spec import resources
from cri_server.store import disk


async def update(
    services: Services,
    reference: str,
    overhead: api.LinuxContainerResources,
    wanted: api.LinuxContainerResources,
) -> None:
    """Keep both in the sandbox's configuration. Raises NotFound, InvalidArgument,
    ResourceExhausted."""
    sandbox = services.index.sandboxes.get(reference)
    resources.check(overhead)
    resources.check(wanted)
    changed = api.PodSandboxConfig()
    changed.CopyFrom(sandbox.config)
    changed.linux.overhead.CopyFrom(overhead)
    changed.linux.resources.CopyFrom(wanted)
    await services.observer.update_pod(sandbox, overhead, wanted)
    before, sandbox.config = sandbox.config, changed
    try:
        await disk.save_sandbox(services.paths, sandbox)
    except BaseException:
        sandbox.config = before
        raise
    await services.observer.updated_pod(sandbox)
