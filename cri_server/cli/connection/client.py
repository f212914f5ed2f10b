"""The front end's connection to a running server: the CRI stubs, and errors as one readable line."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from cri_server.api import api_pb2 as api
from cri_server.cli.connection.channel import CONNECT_TIMEOUT_S, CallError, Channel
from cri_server.rpc import private
from cri_server.rpc.codes import Code
from pyrunc.errors import Error, InvalidArgument, NotFound
from pyrunc.records import Record, Request

Item = TypeVar("Item")
Answer = TypeVar("Answer", bound=Record)
TIMEOUT_S = 120.0
SOCKET_PATH_LIMIT = 107  # sun_path, unix(7), without its final NUL
UNKNOWN_CALL = "unknown (service|method)|method not found|there is no call"
DEADLINE = "deadline exceeded"  # gRPC's own word, when the server said none


class ServerError(Error):
    """The server refused, with a message of its own, or cannot be reached."""


def socket_path(address: str) -> str:
    """The path of `unix:///PATH` or `/PATH`. Raises InvalidArgument."""
    path = address.removeprefix("unix://")
    if not path.startswith("/") or len(path.encode()) > SOCKET_PATH_LIMIT:
        expected = f"unix:///PATH with at most {SOCKET_PATH_LIMIT} bytes of path"
        raise InvalidArgument(f"address {address!r}: expected {expected}")
    return path


def unreachable(address: str, path: str) -> str | None:
    """Why nobody can be connected to, for the user; None when somebody listens."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return f"no server at {address}: it is not a socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(path)
    except FileNotFoundError:
        return f"no server at {address}: no such file (start one: pyrunc-cri serve)"
    except ConnectionRefusedError:
        return f"no server at {address}: it has ended and left its socket (start one: pyrunc-cri serve)"
    except PermissionError:
        return f"no access to {address}: permission denied (it is for root and the socket's group)"
    except OSError as error:
        return f"no server at {address}: {error.strerror or error}"
    return None


class Unsupported(ServerError):
    """The server does not know the call."""


class Client:
    """The calls that the commands make. Use as a context manager."""

    def __init__(self, address: str) -> None:
        """Connects with the first call. Raises InvalidArgument for an address that is none."""
        self._address, self._path, self._answered = address, socket_path(address), False
        self._channel = Channel(self._path)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def runtime(self, call: str, request: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
        """RuntimeService.`call`. Raises ServerError."""
        return self._call("RuntimeService", call, request, timeout_s)

    def image(self, call: str, request: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
        """ImageService.`call`. Raises ServerError."""
        return self._call("ImageService", call, request, timeout_s)

    def stream(self, call: str, request: Any) -> Iterator[Any]:
        """The messages that RuntimeService.`call` sends, until it ends. Raises ServerError."""
        path, decode = _method("RuntimeService", call)
        yield from self._stream(path, request.SerializeToString(), decode)

    def load_image(self, path: str, name: str | None) -> Sequence[private.LoadedImage]:
        """The images of an archive that the server reads."""
        return self.admin(private.LoadImage(path, name), private.LoadedImages, None).images

    def admin(
        self, asked: Request, answer: type[Answer], timeout_s: float | None = TIMEOUT_S
    ) -> Answer:
        """A private call of ours. Raises ServerError, also for an answer that lacks something."""
        found = self._unary(private.path(asked.call), private.encode_record(asked), timeout_s)
        return answer.of(private.decode(found), ServerError)

    def admin_stream(self, asked: Request, decode: Callable[[bytes], Item]) -> Iterator[Item]:
        """The messages of a private call that sends several. Raises ServerError."""
        yield from self._stream(private.path(asked.call), private.encode_record(asked), decode)

    def container_config(self, container: str) -> tuple[api.ContainerConfig, api.PodSandboxConfig]:
        """What a container was made from, secrets included."""
        import base64

        found = self.admin(private.ContainerConfig(container), private.ContainerConfigs)
        return (
            api.ContainerConfig.FromString(base64.b64decode(found.container)),
            api.PodSandboxConfig.FromString(base64.b64decode(found.sandbox)),
        )

    def pod_config(self, pod: str) -> api.PodSandboxConfig:
        """What a pod was made from, secrets of its annotations included."""
        import base64

        found = self.admin(private.PodConfig(pod), private.SandboxConfig)
        return api.PodSandboxConfig.FromString(base64.b64decode(found.sandbox))

    def paused(self) -> frozenset[str]:
        """The ids of paused containers; none of a server that has no such state."""
        try:
            return frozenset(self.admin(private.PausedContainers(), private.ContainerIds).ids)
        except Unsupported:
            return frozenset()

    def _call(self, service: str, call: str, request: Any, timeout_s: float | None) -> Any:
        path, decode = _method(service, call)
        return decode(self._unary(path, request.SerializeToString(), timeout_s))

    def _unary(self, path: str, request: bytes, timeout_s: float | None) -> bytes:
        try:
            answer = self._channel.unary(path, request, timeout_s)
        except CallError as error:
            raise self._worded(error, timeout_s) from None
        self._answered = True
        return answer

    def _stream(self, path: str, request: bytes, decode: Callable[[bytes], Item]) -> Iterator[Item]:
        try:
            for answer in self._channel.stream(path, request, decode):
                self._answered = True
                yield answer
        except CallError as error:
            raise self._worded(error, None) from None

    def _worded(self, error: CallError, timeout_s: float | None) -> Error:
        code, details = error.code, error.details or error.code.name
        if code == Code.UNAVAILABLE:
            reason = unreachable(self._address, self._path)
            if reason is None and self._answered:
                reason = f"the connection to {self._address} broke: {details}"
            return ServerError(
                reason or f"what listens at {self._address} is no CRI server: {details}"
            )
        if code == Code.UNIMPLEMENTED and re.match(UNKNOWN_CALL, details, re.IGNORECASE):
            return Unsupported(
                f"the server at {self._address} cannot do this: {details}{_hint(details)}"
            )
        if (
            code == Code.DEADLINE_EXCEEDED
            and timeout_s is not None
            and re.match(DEADLINE, details, re.IGNORECASE)
        ):
            return ServerError(f"the server at {self._address} did not answer in {timeout_s:g} s")
        if code == Code.NOT_FOUND:
            return NotFound(details)
        return ServerError(details)

    # -- what several commands need

    def pods(self, **wanted: Any) -> list[api.PodSandbox]:
        request = api.ListPodSandboxRequest(filter=api.PodSandboxFilter(**wanted))
        return list(self.runtime("ListPodSandbox", request).items)

    def containers(self, **wanted: Any) -> list[api.Container]:
        request = api.ListContainersRequest(filter=api.ContainerFilter(**wanted))
        return list(self.runtime("ListContainers", request).containers)

    def either(self, reference: str) -> api.PodSandbox | api.Container:
        """A pod or a container; a name of either before the beginning of an id, which may be
        anybody's. Raises NotFound, ServerError."""
        for find in (self.pod, self.container):
            with contextlib.suppress(NotFound):
                return find(reference, prefix=False)
        found: list[api.PodSandbox | api.Container] = []
        for find in (self.pod, self.container):
            with contextlib.suppress(NotFound):
                found.append(find(reference))
        if len(found) > 1:
            raise ServerError(
                f"{reference!r} begins the ids of a pod and of a container; use more of it"
            )
        if found:
            return found[0]
        raise NotFound(f"no such pod or container: {reference!r}")

    def container(self, reference: str, *, prefix: bool = True) -> api.Container:
        """One container by id, NAME, POD/NAME, NAMESPACE/POD/NAME, the pod that it is alone in, or
        a prefix of its id.

        Raises NotFound, ServerError.
        """
        everything, pods = self.containers(), {p.id: p for p in self.pods()}

        def names(container: api.Container) -> tuple[str, ...]:
            return container_names(container, pods.get(container.pod_sandbox_id))

        def pod(container: api.Container) -> tuple[str, ...]:
            found = pods.get(container.pod_sandbox_id)
            return pod_names(found) if found else ()

        ways: list[Callable[[api.Container], bool]] = [
            lambda c: c.id == reference,
            lambda c: reference in names(c),
            lambda c: reference in pod(c),
            lambda c: prefix and bool(reference) and c.id.startswith(reference),
        ]
        for way in ways:
            found = _latest_attempts([c for c in everything if way(c)])
            if len(found) > 1:
                found = [c for c in found if c.state == api.CONTAINER_RUNNING] or found
            if len(found) > 1:
                named = ", ".join(sorted({names(c)[-1] for c in found}))
                raise ServerError(
                    f"{reference!r} means {len(found)} containers: {named};"
                    " use NAMESPACE/POD/NAME, POD/NAME or an id"
                )
            if found:
                return found[0]
        raise NotFound(f"no such container: {reference!r}")

    def pod(self, reference: str, *, prefix: bool = True) -> api.PodSandbox:
        """One pod by id, NAME, NAMESPACE/NAME, or a prefix of its id. Raises NotFound, ServerError."""
        everything = self.pods()
        ways: list[Callable[[api.PodSandbox], bool]] = [
            lambda p: p.id == reference,
            lambda p: reference in pod_names(p),
            lambda p: prefix and bool(reference) and p.id.startswith(reference),
        ]
        for way in ways:
            found = [p for p in everything if way(p)]
            if len(found) > 1:
                found = [p for p in found if p.state == api.SANDBOX_READY] or found
            if len(found) > 1:
                named = ", ".join(sorted(f"{pod_names(p)[-1]} ({p.id[:12]})" for p in found))
                raise ServerError(
                    f"{reference!r} means {len(found)} pods: {named}; use NAMESPACE/NAME or an id"
                )
            if found:
                return found[0]
        raise NotFound(f"no such pod: {reference!r}")


def pod_names(pod: api.PodSandbox) -> tuple[str, str]:
    """NAME, NAMESPACE/NAME."""
    return pod.metadata.name, f"{pod.metadata.namespace}/{pod.metadata.name}"


def container_names(
    container: api.Container | api.ContainerAttributes, pod: api.PodSandbox | None
) -> tuple[str, ...]:
    """NAME, POD/NAME, NAMESPACE/POD/NAME; only the first where the pod is gone."""
    name = container.metadata.name
    return (name, *(f"{each}/{name}" for each in (pod_names(pod) if pod else ())))


def shared_names(pods: Iterable[api.PodSandbox]) -> frozenset[str]:
    """The names that pods of more than one namespace have."""
    seen: dict[str, set[str]] = {}
    for pod in pods:
        seen.setdefault(pod.metadata.name, set()).add(pod.metadata.namespace)
    return frozenset(name for name, namespaces in seen.items() if len(namespaces) > 1)


def _method(service: str, call: str) -> tuple[str, Callable[[bytes], Any]]:
    """A call of CRI: its path, and what decodes its answer."""
    description = api.DESCRIPTOR.services_by_name[service]
    answer = getattr(api, description.methods_by_name[call].output_type.name)
    return f"/{description.full_name}/{call}", answer.FromString


def _hint(details: str) -> str:
    return (
        " (it is not pyrunc-cri's, and CRI has no call for it)"
        if private.SERVICE in details
        else ""
    )


def _latest_attempts(found: list[api.Container]) -> list[api.Container]:
    """Of the attempts of one container, as kubelet numbers them, the newest."""
    newest: dict[tuple[str, str], api.Container] = {}
    for each in found:
        key = each.pod_sandbox_id, each.metadata.name
        other = newest.get(key)
        if other is None or each.metadata.attempt > other.metadata.attempt:
            newest[key] = each
    return list(newest.values())
