"""Measures every call except streaming ones, and logs each call that changes something (a verb).

A log line has the verb, the pod as NAMESPACE/NAME, the container's name, ids, the duration and the
gRPC code. After a failure it also has the error and the failed step. Levels:

- `warning`: a verb failed because of a fault of the node or a peer (`codes.report` logs such
  failures of calls that are not verbs);
- `debug`: a verb had nothing to do (kubelet stops pods repeatedly), or is ExecSync (probes call it
  all the time);
- `info`: any other verb.

No secret is logged: no environment, annotations or registry credentials, and no command line of an
exec, because it may hold a password.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from types import CoroutineType
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.observability.logs import fields
from cri_server.observability.meters import VERBS
from cri_server.observability.timeline.trace import CURRENT, ORIGIN, Trace
from cri_server.rpc import codes, private
from cri_server.rpc.codes import Code
from cri_server.rpc.methods import Method, Table
from cri_server.rpc.private import AdminRequest
from cri_server.services import Services
from cri_server.store.model import Container, Sandbox, sandbox_name

log = logging.getLogger(__name__)

Fields = dict[str, object]
Description = tuple[Fields, bool]
"""The fields of the log line, and whether the verb has something to do."""
Describe = Callable[[Services, Any], Description]

STOPPABLE = (api.CONTAINER_RUNNING, api.CONTAINER_UNKNOWN)


def observed(services: Services, table: Table) -> Table:
    """Wrap each method so that its calls are measured and, if they change something (a verb),
    logged. Streaming calls are not measured, because they last for hours."""
    return {
        path: replace(method, answer=_observed(services, method)) for path, method in table.items()
    }


def _observed(services: Services, method: Method) -> Callable[[Any], Any]:
    describe = DESCRIBE.get(method.name)
    if inspect.isasyncgenfunction(method.answer):
        return method.answer
    if not inspect.iscoroutinefunction(method.answer):
        return _immediate_verb(services, method, describe) if describe else _immediate_query(method)
    return _verb(services, method, describe) if describe else _query(method)


def _verb(services: Services, method: Method, describe: Describe) -> Callable[[Any], Any]:
    async def answer(request: Any) -> Any:
        # The fields are read before the call: afterwards a removed pod has no name any more.
        description, trace = describe(services, request), Trace(origin=ORIGIN.get())
        CURRENT.set(trace)  # for this task and the tasks that it starts
        try:
            reply = await method.answer(request)
        except BaseException as error:
            record = _failed(method.name, description, error, time.perf_counter() - trace.begin_s)
            _record(services, method.name, trace, record)
            raise
        record = _succeeded(method.name, description, reply, time.perf_counter() - trace.begin_s)
        if description[1]:
            _record(services, method.name, trace, record)
        return reply

    return answer


def _query(method: Method) -> Callable[[Any], Any]:
    async def answer(request: Any) -> Any:
        began_s, outcome = time.perf_counter(), "OK"
        try:
            return await method.answer(request)
        except BaseException as error:
            outcome = _code(error).name
            raise
        finally:
            VERBS.add(method.name, outcome, time.perf_counter() - began_s)

    return answer


def _immediate_query(method: Method) -> Callable[[Any], Any]:
    """Wrap a query's handler that normally returns its reply at once: count each call with its
    outcome and duration. A call for which the handler returns a coroutine, such as a verbose
    status, is not counted."""

    def answer(request: Any) -> Any:
        began_s = time.perf_counter()
        try:
            reply = method.answer(request)
        except BaseException as error:
            VERBS.add(method.name, _code(error).name, time.perf_counter() - began_s)
            raise
        if type(reply) is not CoroutineType:
            VERBS.add(method.name, "OK", time.perf_counter() - began_s)
        return reply

    return answer


def _immediate_verb(services: Services, method: Method, describe: Describe) -> Callable[[Any], Any]:
    """Wrap a verb's handler that returns its reply at once, such as a session's URL: count and log
    each call."""

    def answer(request: Any) -> Any:
        began_s = time.perf_counter()
        try:
            reply = method.answer(request)
        except BaseException as error:
            took_s = time.perf_counter() - began_s
            _failed(method.name, describe(services, request), error, took_s)
            raise
        description = describe(services, request)
        _succeeded(method.name, description, reply, time.perf_counter() - began_s)
        return reply

    return answer


def _record(services: Services, call: str, trace: Trace, record: Fields) -> None:
    entry = {"call": call, "started_at_ns": trace.started_at_ns, **record}
    if trace.origin:
        entry["traceparent"] = trace.origin
    services.timeline.add(entry, trace)
    if services.tracing is not None:
        services.tracing.add(call, record, trace)


def _code(error: BaseException) -> Code:
    """Return the gRPC code of a failed call. It is CANCELLED when the client hung up or the
    deadline passed."""
    return codes.code_of(error) if isinstance(error, Exception) else Code.CANCELLED


def _succeeded(verb: str, description: Description, reply: Any, seconds: float) -> Fields:
    VERBS.add(verb, "OK", seconds)
    details, changes = description
    level = logging.INFO if changes and verb not in QUIET else logging.DEBUG
    of_reply = REPLY_FIELDS.get(type(reply), lambda reply: {})
    record = {**details, **of_reply(reply), **_outcome(seconds, Code.OK)}
    if log.isEnabledFor(level):
        log.log(level, verb, extra=fields.of(**record))
    return record


def _failed(verb: str, description: Description, error: BaseException, seconds: float) -> Fields:
    code = _code(error)
    VERBS.add(verb, code.name, seconds)
    level = logging.WARNING if code in codes.NODE_FAULTS else logging.INFO
    if verb in QUIET and code in QUIET_FAILURES:
        level = logging.DEBUG
    error.has_line = True  # type: ignore[attr-defined]
    # Imported late: a server without failures does not need these texts.
    from cri_server.explain.pages import name_of

    record: Fields = {"step": getattr(error, "failed_step", None)}
    if code == Code.CANCELLED:
        record["error"] = "the caller hung up or its deadline passed; the operation continues"
    else:
        record |= {"explain": name_of(error), "error": codes.message_of(error)}
    record = {**description[0], **record, **_outcome(seconds, code)}
    if log.isEnabledFor(level):
        log.log(level, "%s failed", verb, extra=fields.of(**record))
    return record


def _outcome(seconds: float, code: Code) -> Fields:
    return {"duration_ms": round(seconds * 1e3, 1), "outcome": code.name}


# -- the log fields of each verb


def of_sandbox(sandbox: Sandbox) -> Fields:
    """Return the log fields of a pod: name and id."""
    metadata = sandbox.config.metadata
    return {"pod": f"{metadata.namespace}/{metadata.name}", "pod_id": sandbox.id}


def of_container(services: Services, container: Container) -> Fields:
    """Return the log fields of a container and its pod: names and ids."""
    sandbox = services.index.sandboxes.find(container.sandbox_id)
    pod = {"pod_id": container.sandbox_id} if sandbox is None else of_sandbox(sandbox)
    return {**pod, "container": container.config.metadata.name, "container_id": container.id}


def _run_pod(services: Services, request: Any) -> Description:
    metadata = request.config.metadata
    sandbox = services.index.sandboxes.find_by_name(sandbox_name(metadata))
    return {
        "pod": f"{metadata.namespace}/{metadata.name}",
        "attempt": metadata.attempt or None,
    }, sandbox is None


def _pod(services: Services, request: Any) -> Description:
    reference = _reference(request, "pod_sandbox_id")
    sandbox = services.index.sandboxes.find(reference)
    return ({"pod_id": reference[:64]}, False) if sandbox is None else (of_sandbox(sandbox), True)


def _reference(request: Any, field: str) -> str:
    """Return the id or prefix that a request names: `field` of a CRI request, `id` of a request to
    `pyrunc.v1.Admin`."""
    reference: str = getattr(request, "id" if isinstance(request, AdminRequest) else field)
    return reference


def _stop_pod(services: Services, request: Any) -> Description:
    sandbox = services.index.sandboxes.find(request.pod_sandbox_id)
    idle = sandbox is None or (sandbox.phase == "stopped" and sandbox.network != "attached")
    return _pod(services, request)[0], not idle


def _create(services: Services, request: Any) -> Description:
    config = request.config
    more = {
        "container": config.metadata.name,
        "attempt": config.metadata.attempt or None,
        "image": config.image.user_specified_image or config.image.image,
    }
    return {**_pod(services, request)[0], **more}, True


def _container(services: Services, request: Any) -> Description:
    reference = _reference(request, "container_id")
    container = services.index.containers.find(reference)
    if container is None:
        return {"container_id": reference[:64]}, False
    return of_container(services, container), True


def _stop(services: Services, request: Any) -> Description:
    container = services.index.containers.find(request.container_id)
    runs = container is not None and (container.state in STOPPABLE or container.starting)
    return {**_container(services, request)[0], "timeout_s": request.timeout}, runs


def _image(services: Services, request: Any) -> Description:
    return {"image": request.image.image}, True


def _archive(services: Services, request: Any) -> Description:
    return {"path": request.path}, True


def _garbage(services: Services, request: Any) -> Description:
    return {"images": request.images}, not request.dry_run


def _ranges(services: Services, request: Any) -> Description:
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
    private.ExecAs.call: _container,
    private.PauseContainer.call: _container,
    private.UnpauseContainer.call: _container,
    private.ReleaseNetwork.call: _pod,
    private.LoadImage.call: _archive,
    private.CollectGarbage.call: _garbage,
}
QUIET = {"ExecSync"}
QUIET_FAILURES = set(Code) - codes.NODE_FAULTS | {Code.DEADLINE_EXCEEDED}
"""A verb in QUIET that fails with one of these codes is logged at debug level: a probe whose
program is missing or too slow is the pod's problem, not the node's."""


REPLY_FIELDS: dict[type, Callable[[Any], Fields]] = {
    api.RunPodSandboxResponse: lambda reply: {"pod_id": reply.pod_sandbox_id},
    api.CreateContainerResponse: lambda reply: {"container_id": reply.container_id},
    api.PullImageResponse: lambda reply: {"image_id": reply.image_ref},
    private.LoadedImages: lambda reply: {"image_id": ",".join(i.id for i in reply.images)},
    private.GarbageItems: lambda reply: {
        "removed": sum(item.action == "removed" for item in reply.items)
    },
}
"""The log fields that describe a verb's reply, by its class: the id of a new pod, container or
image, or how many objects were removed."""
