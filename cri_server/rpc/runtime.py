"""The handlers of CRI's RuntimeService. A call without a handler is answered with UNIMPLEMENTED
(`methods.table`)."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

import pyrunc
from cri_server.api import api_pb2 as api
from cri_server.containers import (
    checkpoint,
    create,
    remove,
    reopen_log,
    sessions,
    start,
    stop,
    update,
)
from cri_server.containers import exec as execution
from cri_server.observability import metrics, stats
from cri_server.rpc.methods import StreamedReply
from cri_server.sandboxes import checkpoint as sandbox_checkpoint
from cri_server.sandboxes import remove as sandbox_remove
from cri_server.sandboxes import restore as sandbox_restore
from cri_server.sandboxes import run as sandbox_run
from cri_server.sandboxes import stop as sandbox_stop
from cri_server.sandboxes import update as sandbox_update
from cri_server.services import Services
from cri_server.status import container as container_status
from cri_server.status import sandbox as sandbox_status
from cri_server.store.model import Container, Sandbox
from cri_server.streaming.server import StreamingServer
from pyrunc.errors import InvalidArgument
from pyrunc.varint import varint

# kubelet compares `version` with its kubeRuntimeAPIVersion, "0.1.0", and does not start with
# another. containerd answers the same.
KUBELET_VERSION, API_VERSION = "0.1.0", "v1"
NAME = "pyrunc"
BATCH = 500  # items of a message of a Stream… call
LENGTH_DELIMITED = 2  # protobuf's wire type of bytes

Item = TypeVar("Item")


class RuntimeService:
    """The handlers of CRI's RuntimeService. `streaming` hands out the URLs of exec, attach and
    port-forward."""

    def __init__(self, services: Services, streaming: StreamingServer) -> None:
        self._services, self._streaming = services, streaming

    # -- the runtime

    def Version(self, request: api.VersionRequest) -> api.VersionResponse:
        return api.VersionResponse(
            version=KUBELET_VERSION,
            runtime_name=NAME,
            runtime_version=pyrunc.__version__,
            runtime_api_version=API_VERSION,
        )

    async def Status(self, request: api.StatusRequest) -> api.StatusResponse:
        network = await self._services.network.status()
        response = api.StatusResponse()
        response.status.conditions.add(type="RuntimeReady", status=True)
        response.status.conditions.add(
            type="NetworkReady",
            status=network.ready,
            reason="" if network.ready else network.reason or "NetworkPluginNotReady",
            message=network.message,
        )
        for name, features in (
            await self._services.oci_features.of_handlers(self._services.config)
        ).items():
            response.runtime_handlers.add(name=name, features=features)
        response.features.supplemental_groups_policy = True
        response.features.user_namespaces_host_network = True
        response.features.mount_options = True
        if request.verbose:
            response.info["config"] = json.dumps(self._description())
        return response

    def _description(self) -> dict[str, str | list[str]]:
        services = self._services
        return {
            "rootDir": str(services.paths.root),
            "stateDir": str(services.paths.state),
            "cgroupDriver": services.node.cgroup_driver,
            "cgroupControllers": sorted(services.node.cgroup_controllers),
            "missingControllers": services.config.cgroup.missing_controllers,
            "cniConfDir": services.config.network.conf_dir,
            "cniBinDir": services.config.network.bin_dir,
            "netnsDir": services.config.network.netns_dir,
        }

    def RuntimeConfig(self, request: api.RuntimeConfigRequest) -> api.RuntimeConfigResponse:
        driver = api.SYSTEMD if self._services.node.cgroup_driver == "systemd" else api.CGROUPFS
        return api.RuntimeConfigResponse(linux=api.LinuxRuntimeConfiguration(cgroup_driver=driver))

    async def UpdateRuntimeConfig(self, request: api.UpdateRuntimeConfigRequest) -> None:
        """Store the node's pod CIDRs and pass them to those CNI plugins that have the capability
        ipRanges. The administrator, not the server, writes the CNI configuration."""
        await self._services.network.set_pod_ranges(
            request.runtime_config.network_config.pod_cidr.split(",")
        )

    # -- sandboxes

    async def RunPodSandbox(self, request: api.RunPodSandboxRequest) -> api.RunPodSandboxResponse:
        identifier = await sandbox_run.run(self._services, request.config, request.runtime_handler)
        return api.RunPodSandboxResponse(pod_sandbox_id=identifier)

    async def StopPodSandbox(self, request: api.StopPodSandboxRequest) -> None:
        await sandbox_stop.stop(self._services, request.pod_sandbox_id)

    async def RemovePodSandbox(self, request: api.RemovePodSandboxRequest) -> None:
        await sandbox_remove.remove(self._services, request.pod_sandbox_id)

    def PodSandboxStatus(
        self, request: api.PodSandboxStatusRequest
    ) -> bytes | Coroutine[Any, Any, api.PodSandboxStatusResponse]:
        make = sandbox_status.describe if request.verbose else sandbox_status.encode_response
        return make(self._services, request.pod_sandbox_id)

    def ListPodSandbox(self, request: api.ListPodSandboxRequest) -> bytes:
        return b"".join([sandbox_status.encode_item(s) for s in self._sandboxes(request.filter)])

    async def StreamPodSandboxes(
        self, request: api.StreamPodSandboxesRequest
    ) -> AsyncIterator[bytes]:
        for batch in batches(self._sandboxes(request.filter)):
            yield b"".join([sandbox_status.encode_item(s) for s in batch])

    async def UpdatePodSandboxResources(
        self, request: api.UpdatePodSandboxResourcesRequest
    ) -> None:
        await sandbox_update.update(
            self._services, request.pod_sandbox_id, request.overhead, request.resources
        )

    async def CheckpointPod(self, request: api.CheckpointPodRequest) -> None:
        await sandbox_checkpoint.checkpoint(self._services, request)

    async def RestorePod(self, request: api.RestorePodRequest) -> api.RestorePodResponse:
        return await sandbox_restore.restore(self._services, request)

    # -- containers

    async def CreateContainer(
        self, request: api.CreateContainerRequest
    ) -> api.CreateContainerResponse:
        identifier = await create.create(self._services, request.pod_sandbox_id, request.config)
        return api.CreateContainerResponse(container_id=identifier)

    async def StartContainer(self, request: api.StartContainerRequest) -> None:
        await start.start(self._services, request.container_id)

    async def StopContainer(self, request: api.StopContainerRequest) -> None:
        await stop.stop(self._services, request.container_id, request.timeout)

    async def RemoveContainer(self, request: api.RemoveContainerRequest) -> None:
        await remove.remove(self._services, request.container_id)

    def ContainerStatus(
        self, request: api.ContainerStatusRequest
    ) -> bytes | api.ContainerStatusResponse:
        make = container_status.describe if request.verbose else container_status.encode_response
        return make(self._services, request.container_id)

    def ListContainers(self, request: api.ListContainersRequest) -> bytes:
        return b"".join([container_status.encode_item(c) for c in self._containers(request.filter)])

    async def StreamContainers(self, request: api.StreamContainersRequest) -> AsyncIterator[bytes]:
        for batch in batches(self._containers(request.filter)):
            yield b"".join([container_status.encode_item(c) for c in batch])

    async def UpdateContainerResources(self, request: api.UpdateContainerResourcesRequest) -> None:
        await update.update(self._services, request.container_id, request.linux)

    async def ReopenContainerLog(self, request: api.ReopenContainerLogRequest) -> None:
        await reopen_log.reopen(self._services, request.container_id)

    async def CheckpointContainer(self, request: api.CheckpointContainerRequest) -> None:
        await checkpoint.checkpoint(
            self._services, request.container_id, request.location, request.timeout
        )

    # -- commands and streams

    async def ExecSync(self, request: api.ExecSyncRequest) -> api.ExecSyncResponse | StreamedReply:
        if request.timeout < 0:
            raise InvalidArgument(f"timeout {request.timeout} is negative")
        outcome = await execution.sync(
            self._services, request.container_id, request.cmd, request.timeout
        )
        if isinstance(outcome, execution.ShortOutcome):
            return api.ExecSyncResponse(
                stdout=outcome.stdout, stderr=outcome.stderr, exit_code=outcome.exit_code
            )
        return exec_response(outcome)

    def Exec(self, request: api.ExecRequest) -> api.ExecResponse:
        options = sessions.check_exec(self._services, request)
        return api.ExecResponse(url=self._streaming.url_for(options))

    def Attach(self, request: api.AttachRequest) -> api.AttachResponse:
        options = sessions.check_attach(self._services, request)
        return api.AttachResponse(url=self._streaming.url_for(options))

    def PortForward(self, request: api.PortForwardRequest) -> api.PortForwardResponse:
        options = sessions.check_port_forward(self._services, request)
        return api.PortForwardResponse(url=self._streaming.url_for(options))

    # -- usage and events

    async def ContainerStats(
        self, request: api.ContainerStatsRequest
    ) -> api.ContainerStatsResponse:
        container = self._services.index.containers.get(request.container_id)
        (measured,) = await stats.of_containers(self._services, [container])
        return api.ContainerStatsResponse(stats=measured)

    async def ListContainerStats(
        self, request: api.ListContainerStatsRequest
    ) -> api.ListContainerStatsResponse:
        measured = await stats.of_containers(self._services, self._measured(request.filter))
        return api.ListContainerStatsResponse(stats=measured)

    async def StreamContainerStats(
        self, request: api.StreamContainerStatsRequest
    ) -> AsyncIterator[api.StreamContainerStatsResponse]:
        for batch in batches(self._measured(request.filter)):
            measured = await stats.of_containers(self._services, batch)
            if measured:
                yield api.StreamContainerStatsResponse(container_stats=measured)

    async def PodSandboxStats(
        self, request: api.PodSandboxStatsRequest
    ) -> api.PodSandboxStatsResponse:
        sandbox = self._services.index.sandboxes.get(request.pod_sandbox_id)
        (measured,) = await stats.of_sandboxes(self._services, [sandbox])
        return api.PodSandboxStatsResponse(stats=measured)

    async def ListPodSandboxStats(
        self, request: api.ListPodSandboxStatsRequest
    ) -> api.ListPodSandboxStatsResponse:
        sandboxes = self._measured_sandboxes(request.filter)
        return api.ListPodSandboxStatsResponse(
            stats=await stats.of_sandboxes(self._services, sandboxes)
        )

    async def StreamPodSandboxStats(
        self, request: api.StreamPodSandboxStatsRequest
    ) -> AsyncIterator[api.StreamPodSandboxStatsResponse]:
        for batch in batches(self._measured_sandboxes(request.filter)):
            measured = await stats.of_sandboxes(self._services, batch)
            yield api.StreamPodSandboxStatsResponse(pod_sandbox_stats=measured)

    def ListMetricDescriptors(
        self, request: api.ListMetricDescriptorsRequest
    ) -> api.ListMetricDescriptorsResponse:
        return api.ListMetricDescriptorsResponse(descriptors=metrics.descriptors())

    async def ListPodSandboxMetrics(
        self, request: api.ListPodSandboxMetricsRequest
    ) -> api.ListPodSandboxMetricsResponse:
        sandboxes = self._services.index.select_sandboxes(state=api.SANDBOX_READY)
        return api.ListPodSandboxMetricsResponse(
            pod_metrics=[each async for each in metrics.of_sandboxes(self._services, sandboxes)]
        )

    async def StreamPodSandboxMetrics(
        self, request: api.StreamPodSandboxMetricsRequest
    ) -> AsyncIterator[api.StreamPodSandboxMetricsResponse]:
        sandboxes = self._services.index.select_sandboxes(state=api.SANDBOX_READY)
        async for pod_metrics in metrics.of_sandboxes(self._services, sandboxes):
            yield api.StreamPodSandboxMetricsResponse(pod_sandbox_metrics=[pod_metrics])

    async def GetContainerEvents(
        self, request: api.GetEventsRequest
    ) -> AsyncIterator[api.ContainerEventResponse]:
        async for event in self._services.events.subscribe():
            yield event

    # -- filters

    def _sandboxes(self, filter_: api.PodSandboxFilter) -> list[Sandbox]:
        state = filter_.state.state if filter_.HasField("state") else None
        return self._services.index.select_sandboxes(
            reference=filter_.id, state=state, labels=filter_.label_selector
        )

    def _containers(self, filter_: api.ContainerFilter) -> list[Container]:
        state = filter_.state.state if filter_.HasField("state") else None
        return self._services.index.select_containers(
            reference=filter_.id,
            state=state,
            sandbox=filter_.pod_sandbox_id,
            labels=filter_.label_selector,
        )

    def _measured(self, filter_: api.ContainerStatsFilter) -> list[Container]:
        containers = self._services.index.select_containers(
            reference=filter_.id, sandbox=filter_.pod_sandbox_id, labels=filter_.label_selector
        )
        return [c for c in containers if c.running]

    def _measured_sandboxes(self, filter_: api.PodSandboxStatsFilter) -> list[Sandbox]:
        return self._services.index.select_sandboxes(
            reference=filter_.id, state=api.SANDBOX_READY, labels=filter_.label_selector
        )


def exec_response(outcome: execution.LongOutcome) -> StreamedReply:
    """Return an encoded ExecSyncResponse whose stdout and stderr are read from their files while
    they are sent."""
    fields = api.ExecSyncResponse.DESCRIPTOR.fields_by_name
    outputs = [(fields["stdout"].number, outcome.stdout), (fields["stderr"].number, outcome.stderr)]
    # Fields are written by hand: a protobuf message would hold both outputs in memory at once.
    heads = [
        varint(number << 3 | LENGTH_DELIMITED) + varint(output.size) for number, output in outputs
    ]
    rest = api.ExecSyncResponse(exit_code=outcome.exit_code).SerializeToString()

    async def content() -> AsyncGenerator[bytes, None]:
        for head, (_, output) in zip(heads, outputs, strict=True):
            yield head
            async for part in output.parts():
                yield part
        yield rest

    size = sum(map(len, heads)) + outcome.stdout.size + outcome.stderr.size + len(rest)
    return StreamedReply(size, content(), outcome.discard)


def batches(items: list[Item]) -> Iterator[list[Item]]:
    """Yield the items in lists of at most `BATCH`, so that the message of each list stays far below
    the size limit."""
    for begin in range(0, len(items), BATCH):
        yield items[begin : begin + BATCH]
