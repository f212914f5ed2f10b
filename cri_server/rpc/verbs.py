"""Every call leaves a measurement, and one that changes something a line in the log.

The line has the verb, the pod as NAMESPACE/NAME, the container's name, ids, the duration and the
outcome as gRPC's code; a failure also its error and the step that failed. It goes to `info`; to
`warning` when the node or a peer is to blame; to `debug` when there was nothing to do, as for a
kubelet that stops a pod again, and for ExecSync, which probes call all the time, unless the node
failed it. Calls that only read log nothing, unless the node failed them (`codes.report`).

Nothing secret is written: no environment, no annotations, no credentials of registries, and of a
command that is executed neither its name nor its arguments, which hold passwords often enough.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from types import AsyncGeneratorType, CoroutineType
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.observability.logs import fields
from cri_server.observability.meters import VERBS
from cri_server.observability.timeline.trace import CURRENT, ORIGIN, Trace
from cri_server.rpc import codes, private
from cri_server.rpc.codes import Code
from cri_server.rpc.methods import Method, Table
from cri_server.services import Services
from cri_server.store.model import Container, Sandbox, sandbox_name

log = logging.getLogger(__name__)

Fields = dict[str, object]
Described = tuple[Fields, bool]
"""What the line says, and whether the verb finds something to do."""
Describe = Callable[[Services, Any], Described]

STOPPABLE = (api.CONTAINER_RUNNING, api.CONTAINER_UNKNOWN)


def observed(services: Services, table: Table) -> Table:
    """The same calls, each measured and, if it is a verb, logged. Calls that stream go on for hours
    and are not measured."""
    return {
        path: replace(method, answer=_observed(services, method)) for path, method in table.items()
    }


def _observed(services: Services, method: Method) -> Callable[[Any], Any]:
    describe = DESCRIBE.get(method.name)
    if inspect.isasyncgenfunction(method.answer):
        return method.answer
    if not inspect.iscoroutinefunction(method.answer):
        return _immediate(services, method, describe)
    return _verb(services, method, describe) if describe else _query(method)


def _verb(services: Services, method: Method, describe: Describe) -> Callable[[Any], Any]:
    async def answer(request: Any) -> Any:
        described, trace = describe(services, request), Trace(origin=ORIGIN.get())
        CURRENT.set(trace)  # of this call's task, and of those that it starts
        try:
            reply = await method.answer(request)
        except BaseException as error:
            said = _failed(method.name, described, error, time.perf_counter() - trace.begin_s)
            _remember(services, method.name, trace, said)
            raise
        said = _succeeded(
            services, method.name, described, reply, time.perf_counter() - trace.begin_s
        )
        if described[1]:
            _remember(services, method.name, trace, said)
        return reply

    return answer


def _query(method: Method) -> Callable[[Any], Any]:
    async def answer(request: Any) -> Any:
        began_s = time.perf_counter()
        try:
            reply = await method.answer(request)
        except BaseException as error:
            VERBS.add(method.name, _code(error).name, time.perf_counter() - began_s)
            raise
        VERBS.add(method.name, "OK", time.perf_counter() - began_s)
        return reply

    return answer


def _immediate(
    services: Services, method: Method, describe: Describe | None
) -> Callable[[Any], Any]:
    """Of a handler that answers at once, or hands out a coroutine for the rare case (a verbose
    status), which is not measured."""

    def answer(request: Any) -> Any:
        began_s = time.perf_counter()
        try:
            reply = method.answer(request)
        except BaseException as error:
            if describe is None:
                VERBS.add(method.name, _code(error).name, time.perf_counter() - began_s)
            else:
                _failed(
                    method.name, describe(services, request), error, time.perf_counter() - began_s
                )
            raise
        if type(reply) in (CoroutineType, AsyncGeneratorType):
            return reply
        if describe is None:
            VERBS.add(method.name, "OK", time.perf_counter() - began_s)
        else:
            described = describe(services, request)
            _succeeded(services, method.name, described, reply, time.perf_counter() - began_s)
        return reply

    return answer


def _remember(services: Services, call: str, trace: Trace, said: Fields) -> None:
    entry = {"call": call, "started_at_ns": trace.started_at_ns, **said}
    if trace.origin:
        entry["traceparent"] = trace.origin
    services.timeline.add(entry, trace)
    if services.tracing is not None:
        services.tracing.add(call, said, trace)


def _code(error: BaseException) -> Code:
    """Of a call that raised; one whose client hung up or whose deadline passed was cancelled."""
    return codes.code_of(error) if isinstance(error, Exception) else Code.CANCELLED


def _succeeded(
    services: Services, verb: str, described: Described, reply: Any, seconds: float
) -> Fields:
    VERBS.add(verb, "OK", seconds)
    found, changes = described
    level = logging.INFO if changes and verb not in QUIET else logging.DEBUG
    said = {**found, **_made(services, reply), **_took(seconds, Code.OK)}
    if log.isEnabledFor(level):
        log.log(level, verb, extra=fields.of(**said))
    return said


def _failed(verb: str, described: Described, error: BaseException, seconds: float) -> Fields:
    code = _code(error)
    VERBS.add(verb, code.name, seconds)
    level = logging.WARNING if code in codes.NODE_IS_TO_BLAME else logging.INFO
    if verb in QUIET and code in QUIET_FAILURES:
        level = logging.DEBUG
    error.has_line = True  # type: ignore[attr-defined]
    from cri_server.explain.pages import (
        name_of,
    )  # texts for people, which a server without failures can do without

    said: Fields = {"step": getattr(error, "failed_step", None)}
    if code == Code.CANCELLED:
        said["error"] = "the caller did not wait; what was begun goes on"
    else:
        said |= {"explain": name_of(error), "error": codes.message_of(error)}
    said = {**described[0], **said, **_took(seconds, code)}
    if log.isEnabledFor(level):
        log.log(level, "%s failed", verb, extra=fields.of(**said))
    return said


def _took(seconds: float, code: Code) -> Fields:
    return {"duration_ms": round(seconds * 1e3, 1), "outcome": code.name}


# -- what is said about each verb


def of_sandbox(sandbox: Sandbox) -> Fields:
    """The fields of a pod."""
    metadata = sandbox.config.metadata
    return {"pod": f"{metadata.namespace}/{metadata.name}", "pod_id": sandbox.id}


def of_container(services: Services, container: Container) -> Fields:
    """The fields of a container and its pod."""
    sandbox = services.index.sandboxes.find(container.sandbox_id)
    pod = {"pod_id": container.sandbox_id} if sandbox is None else of_sandbox(sandbox)
    return {**pod, "container": container.config.metadata.name, "container_id": container.id}


def _run_pod(services: Services, request: Any) -> Described:
    metadata = request.config.metadata
    known = services.index.sandboxes.named(sandbox_name(metadata))
    return {
        "pod": f"{metadata.namespace}/{metadata.name}",
        "attempt": metadata.attempt or None,
    }, known is None


def _pod(services: Services, request: Any) -> Described:
    sandbox = services.index.sandboxes.find(request.pod_sandbox_id)
    if sandbox is None:
        return {"pod_id": request.pod_sandbox_id[:64]}, False
    return of_sandbox(sandbox), True


def _released(services: Services, request: Any) -> Described:
    """Of the private call that gives up a pod's network."""
    sandbox = services.index.sandboxes.find(request.id)
    return ({"pod_id": request.id[:64]}, False) if sandbox is None else (of_sandbox(sandbox), True)


def _stop_pod(services: Services, request: Any) -> Described:
    sandbox = services.index.sandboxes.find(request.pod_sandbox_id)
    idle = sandbox is None or (sandbox.phase == "stopped" and sandbox.network != "attached")
    return _pod(services, request)[0], not idle


def _create(services: Services, request: Any) -> Described:
    config = request.config
    more = {
        "container": config.metadata.name,
        "attempt": config.metadata.attempt or None,
        "image": config.image.user_specified_image or config.image.image,
    }
    return {**_pod(services, request)[0], **more}, True


def _container(services: Services, request: Any) -> Described:
    container = services.index.containers.find(request.container_id)
    if container is None:
        return {"container_id": request.container_id[:64]}, False
    return of_container(services, container), True


def _stop(services: Services, request: Any) -> Described:
    container = services.index.containers.find(request.container_id)
    runs = container is not None and (container.state in STOPPABLE or container.starting)
    return {**_container(services, request)[0], "timeout_s": request.timeout}, runs


def _named(services: Services, request: Any) -> Described:
    """Of a private call."""
    identifier = request.id
    container = services.index.containers.find(identifier)
    return (
        ({"container_id": identifier[:64]}, False)
        if container is None
        else (of_container(services, container), True)
    )


def _image(services: Services, request: Any) -> Described:
    return {"image": request.image.image}, True


def _archive(services: Services, request: Any) -> Described:
    return {"path": request.path}, True


def _garbage(services: Services, request: Any) -> Described:
    return {"images": request.images}, not request.dry_run


def _ranges(services: Services, request: Any) -> Described:
    return {"pod_cidr": request.runtime_config.network_config.pod_cidr}, True


DESCRIBE: dict[str, Describe] = {
    "RunPodSandbox": _run_pod,
    "StopPodSandbox": _stop_pod,
    "RemovePodSandbox": _pod,
    "UpdatePodSandboxResources": _pod,
    "CheckpointPod": _pod,
    "RestorePod": _run_pod,
    "CreateContainer": _create,
    "StartContainer": _container,
    "StopContainer": _stop,
    "RemoveContainer": _container,
    "UpdateContainerResources": _container,
    "ReopenContainerLog": _container,
    "CheckpointContainer": _container,
    "ExecSync": _container,
    "Exec": _container,
    "Attach": _container,
    "PortForward": _pod,
    "PullImage": _image,
    "RemoveImage": _image,
    "UpdateRuntimeConfig": _ranges,
    private.ExecAs.call: _named,
    private.PauseContainer.call: _named,
    private.UnpauseContainer.call: _named,
    private.ReleaseNetwork.call: _released,
    private.LoadImage.call: _archive,
    private.CollectGarbage.call: _garbage,
}
QUIET = {"ExecSync"}
QUIET_FAILURES = set(Code) - codes.NODE_IS_TO_BLAME | {Code.DEADLINE_EXCEEDED}
"""Of such a verb: a probe's program that is not there, or that takes too long, is the pod's own
affair."""


def _made(services: Services, reply: Any) -> Fields:
    """The ids that a verb hands out."""
    if isinstance(reply, api.RunPodSandboxResponse):
        return {"pod_id": reply.pod_sandbox_id}
    if isinstance(reply, api.CreateContainerResponse):
        return {"container_id": reply.container_id}
    if isinstance(reply, api.PullImageResponse):
        return {"image_id": reply.image_ref}
    if isinstance(reply, private.Images):
        return {"image_id": ",".join(image.id for image in reply.images)}
    if isinstance(reply, private.Items):
        return {"removed": sum(item.action == "removed" for item in reply.items)}
    return {}
