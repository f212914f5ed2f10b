"""RuntimeService: each call in a line or two. What is not built answers UNIMPLEMENTED."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, TypeVar

import pyrunc
from cri_server import metrics, stats
from cri_server.api import api_pb2 as api
from cri_server.api import api_pb2_grpc
from cri_server.containers import (
    create,
    remove,
    reopen_log,
    sessions,
    start,
    stop,
    update,
)
from cri_server.containers import exec as execution
from cri_server.containers import status as container_status
from cri_server.rpc.codes import answers, streams
from cri_server.sandboxes import remove as sandbox_remove
from cri_server.sandboxes import run as sandbox_run
from cri_server.sandboxes import status as sandbox_status
from cri_server.sandboxes import stop as sandbox_stop
from cri_server.sandboxes import update as sandbox_update
from cri_server.services import RUNTIME_HANDLERS, Services
from cri_server.store.model import Container, Sandbox
from cri_server.streaming.server import StreamingServer
from pyrunc.errors import InvalidArgument, Unsupported

KUBELET_VERSION, API_VERSION = "0.1.0", "v1"
NAME = "pyrunc"
BATCH = 500

Item = TypeVar("Item")


class RuntimeService(api_pb2_grpc.RuntimeServiceServicer):
    """The servicer; `streaming` makes the URLs of exec, attach and port-forward."""

    def __init__(self, services: Services, streaming: StreamingServer) -> None:
        self._services, self._streaming = services, streaming

    # -- the runtime

    @answers
    async def Version(self, request: api.VersionRequest, context: Any) -> api.VersionResponse:
        return api.VersionResponse(
            version=KUBELET_VERSION,
            runtime_name=NAME,
            runtime_version=pyrunc.__version__,
            runtime_api_version=API_VERSION,
        )

    @answers
    async def Status(self, request: api.StatusRequest, context: Any) -> api.StatusResponse:
        network = await self._services.network.status()
        response = api.StatusResponse()
        response.status.conditions.add(type="RuntimeReady", status=True)
        response.status.conditions.add(
            type="NetworkReady",
            status=network.ready,
            reason="" if network.ready else network.reason or "NetworkPluginNotReady",
            message=network.message,
        )
        for name in RUNTIME_HANDLERS:
            features = response.runtime_handlers.add(name=name).features
            features.recursive_read_only_mounts = features.user_namespaces = True
        response.features.supplemental_groups_policy = True
        response.features.user_namespaces_host_network = True
        response.features.mount_options = True
        if request.verbose:
            response.info["config"] = json.dumps(self._description())
        return response

    def _description(self) -> dict[str, Any]:
        services = self._services
        return {
            "rootDir": str(services.paths.root),
            "stateDir": str(services.paths.state),
            "cgroupDriver": services.node.cgroup_driver,
            "cgroupControllers": sorted(services.node.cgroup_controllers),
            "missingControllers": services.config.cgroup.missing_controllers,
            "cniConfDir": services.config.network.conf_dir,
            "cniBinDir": services.config.network.bin_dir,
        }

    @answers
    async def RuntimeConfig(
        self, request: api.RuntimeConfigRequest, context: Any
    ) -> api.RuntimeConfigResponse:
        driver = api.SYSTEMD if self._services.node.cgroup_driver == "systemd" else api.CGROUPFS
        return api.RuntimeConfigResponse(linux=api.LinuxRuntimeConfiguration(cgroup_driver=driver))

    @answers
    async def UpdateRuntimeConfig(
        self, request: api.UpdateRuntimeConfigRequest, context: Any
    ) -> api.UpdateRuntimeConfigResponse:
        """The CNI configuration is the administrator's; plugins in it that take ranges are given the node's pod CIDRs."""
        await self._services.network.use_pod_ranges(request.runtime_config.network_config.pod_cidr.split(","))
        return api.UpdateRuntimeConfigResponse()

    # -- sandboxes

    @answers
    async def RunPodSandbox(
        self, request: api.RunPodSandboxRequest, context: Any
    ) -> api.RunPodSandboxResponse:
        identifier = await sandbox_run.run(self._services, request.config, request.runtime_handler)
        return api.RunPodSandboxResponse(pod_sandbox_id=identifier)

    @answers
    async def StopPodSandbox(
        self, request: api.StopPodSandboxRequest, context: Any
    ) -> api.StopPodSandboxResponse:
        await sandbox_stop.stop(self._services, request.pod_sandbox_id)
        return api.StopPodSandboxResponse()

    @answers
    async def RemovePodSandbox(
        self, request: api.RemovePodSandboxRequest, context: Any
    ) -> api.RemovePodSandboxResponse:
        await sandbox_remove.remove(self._services, request.pod_sandbox_id)
        return api.RemovePodSandboxResponse()

    @answers
    async def PodSandboxStatus(
        self, request: api.PodSandboxStatusRequest, context: Any
    ) -> api.PodSandboxStatusResponse:
        return await sandbox_status.answer(self._services, request.pod_sandbox_id, request.verbose)

    @answers
    async def ListPodSandbox(
        self, request: api.ListPodSandboxRequest, context: Any
    ) -> api.ListPodSandboxResponse:
        found = self._sandboxes(request.filter)
        return api.ListPodSandboxResponse(items=[sandbox_status.listed(s) for s in found])

    @streams
    async def StreamPodSandboxes(
        self, request: api.StreamPodSandboxesRequest, context: Any
    ) -> AsyncIterator[api.StreamPodSandboxesResponse]:
        for batch in batches(self._sandboxes(request.filter)):
            yield api.StreamPodSandboxesResponse(pod_sandboxes=[sandbox_status.listed(s) for s in batch])

    @answers
    async def UpdatePodSandboxResources(
        self, request: api.UpdatePodSandboxResourcesRequest, context: Any
    ) -> api.UpdatePodSandboxResourcesResponse:
        await sandbox_update.update(
            self._services, request.pod_sandbox_id, request.overhead, request.resources
        )
        return api.UpdatePodSandboxResourcesResponse()

    # -- containers

    @answers
    async def CreateContainer(
        self, request: api.CreateContainerRequest, context: Any
    ) -> api.CreateContainerResponse:
        identifier = await create.create(
            self._services, request.pod_sandbox_id, request.config, request.sandbox_config
        )
        return api.CreateContainerResponse(container_id=identifier)

    @answers
    async def StartContainer(
        self, request: api.StartContainerRequest, context: Any
    ) -> api.StartContainerResponse:
        await start.start(self._services, request.container_id)
        return api.StartContainerResponse()

    @answers
    async def StopContainer(
        self, request: api.StopContainerRequest, context: Any
    ) -> api.StopContainerResponse:
        await stop.stop(self._services, request.container_id, request.timeout)
        return api.StopContainerResponse()

    @answers
    async def RemoveContainer(
        self, request: api.RemoveContainerRequest, context: Any
    ) -> api.RemoveContainerResponse:
        await remove.remove(self._services, request.container_id)
        return api.RemoveContainerResponse()

    @answers
    async def ContainerStatus(
        self, request: api.ContainerStatusRequest, context: Any
    ) -> api.ContainerStatusResponse:
        return await container_status.answer(self._services, request.container_id, request.verbose)

    @answers
    async def ListContainers(
        self, request: api.ListContainersRequest, context: Any
    ) -> api.ListContainersResponse:
        found = self._containers(request.filter)
        return api.ListContainersResponse(containers=[container_status.listed(c) for c in found])

    @streams
    async def StreamContainers(
        self, request: api.StreamContainersRequest, context: Any
    ) -> AsyncIterator[api.StreamContainersResponse]:
        for batch in batches(self._containers(request.filter)):
            yield api.StreamContainersResponse(containers=[container_status.listed(c) for c in batch])

    @answers
    async def UpdateContainerResources(
        self, request: api.UpdateContainerResourcesRequest, context: Any
    ) -> api.UpdateContainerResourcesResponse:
        await update.update(self._services, request.container_id, request.linux)
        return api.UpdateContainerResourcesResponse()

    @answers
    async def ReopenContainerLog(
        self, request: api.ReopenContainerLogRequest, context: Any
    ) -> api.ReopenContainerLogResponse:
        await reopen_log.reopen(self._services, request.container_id)
        return api.ReopenContainerLogResponse()

    # -- commands and streams

    @answers
    async def ExecSync(self, request: api.ExecSyncRequest, context: Any) -> api.ExecSyncResponse:
        if request.timeout < 0:
            raise InvalidArgument(f"timeout {request.timeout} is negative")
        stdout, stderr, code = await execution.sync(
            self._services, request.container_id, request.cmd, request.timeout
        )
        return api.ExecSyncResponse(stdout=stdout, stderr=stderr, exit_code=code)

    @answers
    async def Exec(self, request: api.ExecRequest, context: Any) -> api.ExecResponse:
        options = sessions.check_exec(self._services, request)
        return api.ExecResponse(url=self._streaming.url_for_exec(options))

    @answers
    async def Attach(self, request: api.AttachRequest, context: Any) -> api.AttachResponse:
        options = sessions.check_attach(self._services, request)
        return api.AttachResponse(url=self._streaming.url_for_attach(options))

    @answers
    async def PortForward(self, request: api.PortForwardRequest, context: Any) -> api.PortForwardResponse:
        options = sessions.check_port_forward(self._services, request)
        return api.PortForwardResponse(url=self._streaming.url_for_port_forward(options))

    # -- usage and events

    @answers
    async def ContainerStats(
        self, request: api.ContainerStatsRequest, context: Any
    ) -> api.ContainerStatsResponse:
        container = self._services.index.containers.get(request.container_id)
        return api.ContainerStatsResponse(stats=await stats.of_container(self._services, container))

    @answers
    async def ListContainerStats(
        self, request: api.ListContainerStatsRequest, context: Any
    ) -> api.ListContainerStatsResponse:
        found = await stats.of_containers(self._services, self._measured(request.filter))
        return api.ListContainerStatsResponse(stats=found)

    @streams
    async def StreamContainerStats(
        self, request: api.StreamContainerStatsRequest, context: Any
    ) -> AsyncIterator[api.StreamContainerStatsResponse]:
        for batch in batches(self._measured(request.filter)):
            found = await stats.of_containers(self._services, batch)
            if found:
                yield api.StreamContainerStatsResponse(container_stats=found)

    @answers
    async def PodSandboxStats(
        self, request: api.PodSandboxStatsRequest, context: Any
    ) -> api.PodSandboxStatsResponse:
        sandbox = self._services.index.sandboxes.get(request.pod_sandbox_id)
        return api.PodSandboxStatsResponse(stats=await stats.of_sandbox(self._services, sandbox))

    @answers
    async def ListPodSandboxStats(
        self, request: api.ListPodSandboxStatsRequest, context: Any
    ) -> api.ListPodSandboxStatsResponse:
        found = self._measured_sandboxes(request.filter)
        return api.ListPodSandboxStatsResponse(
            stats=[await stats.of_sandbox(self._services, s) for s in found]
        )

    @streams
    async def StreamPodSandboxStats(
        self, request: api.StreamPodSandboxStatsRequest, context: Any
    ) -> AsyncIterator[api.StreamPodSandboxStatsResponse]:
        for batch in batches(self._measured_sandboxes(request.filter)):
            found = [await stats.of_sandbox(self._services, s) for s in batch]
            yield api.StreamPodSandboxStatsResponse(pod_sandbox_stats=found)

    @answers
    async def ListMetricDescriptors(
        self, request: api.ListMetricDescriptorsRequest, context: Any
    ) -> api.ListMetricDescriptorsResponse:
        return api.ListMetricDescriptorsResponse(descriptors=metrics.descriptors())

    @answers
    async def ListPodSandboxMetrics(
        self, request: api.ListPodSandboxMetricsRequest, context: Any
    ) -> api.ListPodSandboxMetricsResponse:
        found = self._services.index.select_sandboxes(state=api.SANDBOX_READY)
        return api.ListPodSandboxMetricsResponse(
            pod_metrics=[await metrics.of_sandbox(self._services, s) for s in found]
        )

    @streams
    async def StreamPodSandboxMetrics(
        self, request: api.StreamPodSandboxMetricsRequest, context: Any
    ) -> AsyncIterator[api.StreamPodSandboxMetricsResponse]:
        for sandbox in self._services.index.select_sandboxes(state=api.SANDBOX_READY):
            found = await metrics.of_sandbox(self._services, sandbox)
            yield api.StreamPodSandboxMetricsResponse(pod_sandbox_metrics=[found])

    @streams
    async def GetContainerEvents(
        self, request: api.GetEventsRequest, context: Any
    ) -> AsyncIterator[api.ContainerEventResponse]:
        async for event in self._services.events.subscribe():
            yield event

    # -- filters

    def _sandboxes(self, wanted: api.PodSandboxFilter) -> list[Sandbox]:
        state = wanted.state.state if wanted.HasField("state") else None
        return self._services.index.select_sandboxes(
            reference=wanted.id, state=state, labels=wanted.label_selector
        )

    def _containers(self, wanted: api.ContainerFilter) -> list[Container]:
        state = wanted.state.state if wanted.HasField("state") else None
        return self._services.index.select_containers(
            reference=wanted.id, state=state, sandbox=wanted.pod_sandbox_id, labels=wanted.label_selector
        )

    def _measured(self, wanted: api.ContainerStatsFilter) -> list[Container]:
        found = self._services.index.select_containers(
            reference=wanted.id, sandbox=wanted.pod_sandbox_id, labels=wanted.label_selector
        )
        return [c for c in found if c.running]

    def _measured_sandboxes(self, wanted: api.PodSandboxStatsFilter) -> list[Sandbox]:
        return self._services.index.select_sandboxes(
            reference=wanted.id, state=api.SANDBOX_READY, labels=wanted.label_selector
        )


def _refuse_what_is_not_built() -> None:
    """The generated base class answers UNIMPLEMENTED too, but with a traceback in the log for each call."""
    for method in api.DESCRIPTOR.services_by_name["RuntimeService"].methods:
        if method.name not in vars(RuntimeService):
            setattr(RuntimeService, method.name, _refusal(method.name, method.server_streaming))


def _refusal(name: str, streaming: bool) -> Any:
    async def call(self: RuntimeService, request: Any, context: Any) -> Any:
        raise Unsupported(f"{name} is not supported")

    async def stream(self: RuntimeService, request: Any, context: Any) -> AsyncIterator[Any]:
        raise Unsupported(f"{name} is not supported")
        yield

    return streams(stream) if streaming else answers(call)


_refuse_what_is_not_built()


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Lists of at most BATCH items, which stay well below a message's limit."""
    listed = list(items)
    for begin in range(0, len(listed), BATCH):
        yield listed[begin : begin + BATCH]
