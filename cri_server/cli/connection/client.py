"""The client that commands use to call a running server: CRI calls, pyrunc-cri's private calls, and
errors as one-line messages."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import socket
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from cri_server.api import api_pb2 as api
from cri_server.cli.connection.channel import CONNECT_TIMEOUT_S, CallError, Channel
from cri_server.rpc import private
from cri_server.rpc.codes import Code
from pyrunc.errors import Error, InvalidArgument, NotFound
from pyrunc.records import Record, Request

Item = TypeVar("Item")
Answer = TypeVar("Answer", bound=Record)
TIMEOUT_S = 120.0  # the default of kubelet's runtimeRequestTimeout
SOCKET_PATH_LIMIT = 107  # sun_path, unix(7), without its final NUL
UNKNOWN_CALL = "unknown (service|method)|method not found|there is no call"
DEADLINE = "deadline exceeded"  # gRPC's own text, if the server sent none


class ServerError(Error):
    """The server rejected a call or cannot be reached."""


def socket_path(address: str) -> str:
    """Return the path in an address `unix:///PATH` or `/PATH`. Raises InvalidArgument."""
    path = address.removeprefix("unix://")
    if not path.startswith("/") or len(path.encode()) > SOCKET_PATH_LIMIT:
        expected = f"unix:///PATH with at most {SOCKET_PATH_LIMIT} bytes of path"
        raise InvalidArgument(f"address {address!r}: expected {expected}")
    return path


def unreachable(address: str, path: str) -> str | None:
    """Return a message that says why no connection to the server is possible; None if a server
    listens on the socket at `path`."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return f"no server at {address}: it is not a socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(path)
    except FileNotFoundError:
        return f"no server at {address}: no such file (start one: pyrunc-cri serve)"
    except ConnectionRefusedError:
        return (
            f"no server at {address}: connection refused, the socket is of a server that has ended"
            " (start one: pyrunc-cri serve)"
        )
    except PermissionError:
        return f"no access to {address}: permission denied (only for root and the socket's group)"
    except OSError as error:
        return f"no server at {address}: {error.strerror or error}"
    return None


class UnsupportedCall(ServerError):
    """The server does not implement a call."""


class Client:
    """Calls a running server. A context manager, which closes the connections."""

    def __init__(self, address: str) -> None:
        """Check the address without connecting to it. Raises InvalidArgument for a malformed
        address."""
        self._address = address
        self._path = socket_path(address)
        self._answered = False  # a reply has arrived, so the server speaks CRI
        self._channel = Channel(self._path)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, request: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
        """Send `request` as a unary CRI call and return the reply. The class of `request` decides
        which call it is. Raises NotFound if the server answers NOT_FOUND, ServerError for any other
        failure."""
        path, decode = _method(type(request))
        return decode(self._unary(path, request.SerializeToString(), timeout_s))

    def stream(self, request: Any) -> Iterator[Any]:
        """Send `request` as a streaming CRI call and yield the messages of the reply. The class of
        `request` decides which call it is. Raises ServerError."""
        path, decode = _method(type(request))
        yield from self._stream(path, request.SerializeToString(), decode)

    def load_image(self, path: str, name: str | None) -> Sequence[private.LoadedImage]:
        """Make the server load the images in the archive at `path`, and return them. `name`: the
        name for an image that has none in the archive. Raises ServerError."""
        return self.admin(private.LoadImage(path, name), private.LoadedImages, None).images

    def admin(
        self, request: Request, answer: type[Answer], timeout_s: float | None = TIMEOUT_S
    ) -> Answer:
        """Make a call that pyrunc-cri has and CRI lacks. Return the reply as an object of the class
        `answer`. Raises UnsupportedCall if the server does not know the call, and ServerError for
        other failures and for a reply with missing fields."""
        reply = self._unary(private.path(request.call), private.encode(request), timeout_s)
        return answer.of(private.decode(reply), ServerError)

    def admin_stream(self, request: Request, decode: Callable[[bytes], Item]) -> Iterator[Item]:
        """Make a streaming call that pyrunc-cri has and CRI lacks, and yield the messages of the
        reply. Raises ServerError."""
        yield from self._stream(private.path(request.call), private.encode(request), decode)

    def container_config(self, container: str) -> tuple[api.ContainerConfig, api.PodSandboxConfig]:
        """Return the configurations of a container and its pod, as they were in CreateContainer.
        They may contain secrets."""
        configs = self.admin(private.ContainerConfig(container), private.ContainerConfigs)
        return (
            api.ContainerConfig.FromString(base64.b64decode(configs.container)),
            api.PodSandboxConfig.FromString(base64.b64decode(configs.sandbox)),
        )

    def pod_config(self, pod: str) -> api.PodSandboxConfig:
        """Return the configuration of a pod, as it was in RunPodSandbox. Its annotations may
        contain secrets."""
        config = self.admin(private.PodConfig(pod), private.SandboxConfig)
        return api.PodSandboxConfig.FromString(base64.b64decode(config.sandbox))

    def paused(self) -> frozenset[str]:
        """Return the ids of paused containers; an empty set if the server cannot pause
        containers."""
        try:
            return frozenset(self.admin(private.PausedContainers(), private.ContainerIds).ids)
        except UnsupportedCall:
            return frozenset()

    def _unary(self, path: str, request: bytes, timeout_s: float | None) -> bytes:
        try:
            answer = self._channel.unary(path, request, timeout_s)
        except CallError as error:
            raise self._to_error(error, timeout_s) from None
        self._answered = True
        return answer

    def _stream(self, path: str, request: bytes, decode: Callable[[bytes], Item]) -> Iterator[Item]:
        try:
            for answer in self._channel.stream(path, request, decode):
                self._answered = True
                yield answer
        except CallError as error:
            raise self._to_error(error, None) from None

    def _to_error(self, error: CallError, timeout_s: float | None) -> Error:
        code, details = error.code, error.details or error.code.name
        if code == Code.UNAVAILABLE:
            # The transport's error does not tell a missing server from a broken one; another
            # connect(2) does.
            reason = unreachable(self._address, self._path)
            if reason is None and self._answered:
                reason = f"the connection to {self._address} broke: {details}"
            return ServerError(
                reason
                or f"the process that listens at {self._address} is not a CRI server: {details}"
            )
        if code == Code.UNIMPLEMENTED and re.match(UNKNOWN_CALL, details, re.IGNORECASE):
            return UnsupportedCall(
                f"the server at {self._address} does not support this: {details}{_hint(details)}"
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

    # -- calls that several commands make; all raise ServerError

    def pods(self, **filters: Any) -> list[api.PodSandbox]:
        """List pods. `filters`: fields of CRI's PodSandboxFilter."""
        request = api.ListPodSandboxRequest(filter=api.PodSandboxFilter(**filters))
        return list(self.call(request).items)

    def containers(self, **filters: Any) -> list[api.Container]:
        """List containers. `filters`: fields of CRI's ContainerFilter."""
        request = api.ListContainersRequest(filter=api.ContainerFilter(**filters))
        return list(self.call(request).containers)

    def images(self) -> list[api.Image]:
        """List all images of the node."""
        return list(self.call(api.ListImagesRequest()).images)

    def pod_status(self, pod: str, *, verbose: bool = False) -> api.PodSandboxStatusResponse:
        """Return the status of the pod with this id."""
        request = api.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=verbose)
        response: api.PodSandboxStatusResponse = self.call(request)
        return response

    def container_status(
        self, container: str, *, verbose: bool = False
    ) -> api.ContainerStatusResponse:
        """Return the status of the container with this id."""
        request = api.ContainerStatusRequest(container_id=container, verbose=verbose)
        response: api.ContainerStatusResponse = self.call(request)
        return response

    def image_status(self, name: str, *, verbose: bool = False) -> api.ImageStatusResponse:
        """Return the status of an image. Its field `image` is not set if the node does not have the
        image."""
        request = api.ImageStatusRequest(image=api.ImageSpec(image=name), verbose=verbose)
        response: api.ImageStatusResponse = self.call(request)
        return response

    def require_image(self, name: str, *, verbose: bool = False) -> api.ImageStatusResponse:
        """Return the status of an image. Raises NotFound if the node does not have the image."""
        response = self.image_status(name, verbose=verbose)
        if not response.HasField("image"):
            raise NotFound(f"no such image: {name!r}")
        return response

    def pod_info(self, pod: str) -> dict[str, Any]:
        """Return the runtime's own details (`info`) in the verbose status of a pod."""
        return _info(self.pod_status(pod, verbose=True))

    def container_info(self, container: str) -> dict[str, Any]:
        """Return the runtime's own details (`info`) in the verbose status of a container, such as
        `pid`."""
        return _info(self.container_status(container, verbose=True))

    def image_info(self, name: str) -> dict[str, Any]:
        """Return the runtime's own details (`info`) in the verbose status of an image. Raises
        NotFound."""
        return _info(self.require_image(name, verbose=True))

    def run_pod(self, config: api.PodSandboxConfig, handler: str) -> str:
        """Run a pod sandbox with the runtime handler `handler`, and return its id."""
        request = api.RunPodSandboxRequest(config=config, runtime_handler=handler)
        return str(self.call(request).pod_sandbox_id)

    def create_container(
        self, pod: str, config: api.ContainerConfig, sandbox: api.PodSandboxConfig
    ) -> str:
        """Create a container in the pod with this id, and return the container's id."""
        request = api.CreateContainerRequest(
            pod_sandbox_id=pod, config=config, sandbox_config=sandbox
        )
        return str(self.call(request).container_id)

    def start_container(self, container: str) -> None:
        """Start a created container."""
        self.call(api.StartContainerRequest(container_id=container))

    def remove_container(self, container: str) -> None:
        """Remove a container. The server stops it first if it runs."""
        self.call(api.RemoveContainerRequest(container_id=container))

    def pod_or_container(self, reference: str) -> api.PodSandbox | api.Container:
        """Return the pod or container with this name or id. A full name or id takes precedence over
        a prefix of an id. Raises NotFound, and ServerError if several match."""
        for find in (self.pod, self.container):
            with contextlib.suppress(NotFound):
                return find(reference, prefix=False)
        matches: list[api.PodSandbox | api.Container] = []
        for find in (self.pod, self.container):
            with contextlib.suppress(NotFound):
                matches.append(find(reference))
        if len(matches) > 1:
            raise ServerError(
                f"the ids of a pod and of a container begin with {reference!r}; use a longer prefix"
            )
        if matches:
            return matches[0]
        raise NotFound(f"no such pod or container: {reference!r}")

    def container(self, reference: str, *, prefix: bool = True) -> api.Container:
        """Return the container that `reference` names. It may be an id, NAME, POD/NAME,
        NAMESPACE/POD/NAME, the name of a pod with a single container, or a prefix of an id.

        Raises NotFound, and ServerError if several containers match."""
        pods = {p.id: p for p in self.pods()}

        def names(container: api.Container) -> tuple[str, ...]:
            return container_names(container, pods.get(container.pod_sandbox_id))

        def names_of_pod(container: api.Container) -> tuple[str, ...]:
            pod = pods.get(container.pod_sandbox_id)
            return pod_names(pod) if pod else ()

        matches = _first_matches(
            self.containers(),
            # Names precede prefixes, because a name may look like the beginning of another
            # container's id.
            lambda c: c.id == reference,
            lambda c: reference in names(c),
            lambda c: reference in names_of_pod(c),
            lambda c: prefix and bool(reference) and c.id.startswith(reference),
        )
        matches = latest_attempts(matches)
        if len(matches) > 1:
            matches = [c for c in matches if c.state == api.CONTAINER_RUNNING] or matches
        titles = {names(c)[-1] for c in matches}
        return _only(matches, "container", reference, titles, "NAMESPACE/POD/NAME, POD/NAME")

    def pod(self, reference: str, *, prefix: bool = True) -> api.PodSandbox:
        """Return the pod that `reference` names: by id, NAME, NAMESPACE/NAME, or a prefix of its
        id. Raises NotFound, and ServerError if several pods match."""
        matches = _first_matches(
            self.pods(),
            lambda p: p.id == reference,
            lambda p: reference in pod_names(p),
            lambda p: prefix and bool(reference) and p.id.startswith(reference),
        )
        if len(matches) > 1:
            matches = [p for p in matches if p.state == api.SANDBOX_READY] or matches
        titles = {f"{pod_names(p)[-1]} ({p.id[:12]})" for p in matches}
        return _only(matches, "pod", reference, titles, "NAMESPACE/NAME")


def _first_matches(items: list[Item], *rules: Callable[[Item], bool]) -> list[Item]:
    """Apply `rules` in order, and return the items that the first successful rule selects. Return
    an empty list if no rule selects an item."""
    for rule in rules:
        matches = [each for each in items if rule(each)]
        if matches:
            return matches
    return []


def _only(
    matches: list[Item], kind: str, reference: str, titles: Iterable[str], unique_names: str
) -> Item:
    """Return the only one of `matches`. Raises NotFound if there is none, ServerError if there are
    several.

    The other arguments are for the messages of the errors:

    - `kind`: `pod` or `container`.
    - `reference`: what the user has written.
    - `titles`: the names of the matches.
    - `unique_names`: a form of the name that is unique, such as `NAMESPACE/NAME`.
    """
    if not matches:
        raise NotFound(f"no such {kind}: {reference!r}")
    if len(matches) > 1:
        raise ServerError(
            f"{reference!r} fits {len(matches)} {kind}s: {', '.join(sorted(titles))};"
            f" use {unique_names} or an id"
        )
    return matches[0]


def pod_names(pod: api.PodSandbox) -> tuple[str, str]:
    """Return a pod's NAME and NAMESPACE/NAME."""
    return pod.metadata.name, f"{pod.metadata.namespace}/{pod.metadata.name}"


def container_names(
    container: api.Container | api.ContainerAttributes, pod: api.PodSandbox | None
) -> tuple[str, ...]:
    """Return a container's NAME, POD/NAME and NAMESPACE/POD/NAME; only NAME if the pod is gone."""
    name = container.metadata.name
    return (name, *(f"{each}/{name}" for each in (pod_names(pod) if pod else ())))


def shortest_name(
    container: api.Container | api.ContainerAttributes,
    pod: api.PodSandbox | None,
    shared: Collection[str],
) -> str:
    """Return the shortest unambiguous name of a container: POD/NAME, or NAMESPACE/POD/NAME if the
    pod's name is in `shared`. Returns NAME if the pod is gone."""
    names = container_names(container, pod)
    return names[-1] if pod and pod.metadata.name in shared else names[min(1, len(names) - 1)]


def shared_names(pods: Iterable[api.PodSandbox]) -> frozenset[str]:
    """Return the pod names that occur in more than one namespace."""
    namespaces_by_name: dict[str, set[str]] = {}
    for pod in pods:
        namespaces_by_name.setdefault(pod.metadata.name, set()).add(pod.metadata.namespace)
    return frozenset(name for name, namespaces in namespaces_by_name.items() if len(namespaces) > 1)


def _method(kind: Any) -> tuple[str, Callable[[bytes], Any]]:
    """Return the gRPC path of the CRI call whose request class is `kind`, and the decoder of its
    reply."""
    for service in api.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            if method.input_type is kind.DESCRIPTOR:
                answer = getattr(api, method.output_type.name)
                return f"/{service.full_name}/{method.name}", answer.FromString
    raise AssertionError(f"CRI has no call with {kind.__name__}")


def _info(response: Any) -> dict[str, Any]:
    """Return the JSON object `info` of a verbose status; an empty one if the server does not send
    it."""
    document = json.loads(response.info.get("info", "{}"))
    return document if isinstance(document, dict) else {}


def _hint(details: str) -> str:
    return (
        " (this needs a server of pyrunc-cri: CRI has no such call)"
        if private.SERVICE in details
        else ""
    )


def latest_attempts(containers: list[api.Container]) -> list[api.Container]:
    """Return the newest attempt of each container, in the order in which the containers first
    occur."""
    newest: dict[tuple[str, str], api.Container] = {}
    for container in containers:
        key = container.pod_sandbox_id, container.metadata.name
        other = newest.get(key)
        if other is None or container.metadata.attempt > other.metadata.attempt:
            newest[key] = container
    return list(newest.values())
