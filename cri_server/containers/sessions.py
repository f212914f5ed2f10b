"""Exec, Attach and PortForward: checks the requests, and begins a session when its client
connects."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.containers import exec as execution
from cri_server.containers import pause
from cri_server.pod.client import ExecSession, SessionStreams
from cri_server.pod.pod import Pod
from cri_server.services import Services
from cri_server.store.model import Container, Sandbox
from cri_server.streaming.backend import (
    AttachOptions,
    ExecSessionOptions,
    PortForwardOptions,
    StreamingSession,
)
from cri_server.zygote.jobs import DIAL, DialRequest
from pyrunc.errors import InvalidArgument, PeerError, WrongState

DIAL_TIMEOUT_S = 10.0


def check_exec(
    services: Services, request: api.ExecRequest, changes: Mapping[str, Any] | None = None
) -> ExecSessionOptions:
    """Check an Exec request and return the session's options. `changes`: `user`, `cwd` and `env`
    that override those of the container's OCI process.

    Raises InvalidArgument, NotFound, WrongState.
    """
    _check_streams(request)
    container, _ = execution.require_running(services, request.container_id)
    if not request.cmd:
        raise InvalidArgument("the command is empty")
    pause.refuse_paused(container)
    return ExecSessionOptions(
        container.id,
        tuple(request.cmd),
        request.stdin,
        request.stdout,
        request.stderr,
        request.tty,
        changes,
    )


def check_attach(services: Services, request: api.AttachRequest) -> AttachOptions:
    """Check an Attach request and return the session's options. Raises InvalidArgument, NotFound,
    WrongState."""
    _check_streams(request)
    container, _ = execution.require_running(services, request.container_id)
    tty = bool(container.config.tty)
    return AttachOptions(
        container.id, request.stdin, request.stdout, request.stderr and not tty, tty
    )


def check_port_forward(services: Services, request: api.PortForwardRequest) -> PortForwardOptions:
    """Check a PortForward request and return the session's options. Raises InvalidArgument,
    NotFound, WrongState."""
    sandbox = services.index.sandboxes.get(request.pod_sandbox_id)
    for port in request.port:
        _check_port(port)
    _check_ready(sandbox)
    return PortForwardOptions(sandbox.id, tuple(request.port))


def _check_streams(request: api.ExecRequest | api.AttachRequest) -> None:
    if not (request.stdin or request.stdout or request.stderr):
        raise InvalidArgument("at least one of stdin, stdout and stderr is required")
    # CRI, ExecRequest.stderr: must be false if `tty` is true, because the streams are one.
    if request.tty and request.stderr:
        raise InvalidArgument("tty and stderr exclude each other: a terminal has no stderr")


def _check_port(port: int) -> None:
    if not 0 < port <= 65535:
        raise InvalidArgument(f"port {port} is not in 1..65535")


def _check_ready(sandbox: Sandbox) -> None:
    if sandbox.state != api.SANDBOX_READY:
        raise WrongState(f"sandbox {sandbox.id} is not ready")


class ExecStreamSession(StreamingSession):
    """The session of Exec: a command that is killed when its client disconnects."""

    def __init__(self, pod: Pod, session: ExecSession) -> None:
        super().__init__(session.stdin_fd, session.stdout_fd, session.stderr_fd)
        self._pod, self._session, self._exited = pod, session, session.exited

    async def resize(self, width: int, height: int) -> None:
        await self._pod.resize_exec(self._session, width, height)

    async def wait(self) -> int:
        return await asyncio.shield(self._exited)

    async def close(self) -> None:
        self.close_descriptors()
        if not self._exited.done():
            await self._pod.kill_exec(self._session.exec_id)


class AttachStreamSession(StreamingSession):
    """The session of Attach: a client at the container's stdio. Its disconnect does not affect the
    container."""

    def __init__(self, pod: Pod, container: Container, streams: SessionStreams) -> None:
        super().__init__(streams.stdin_fd, streams.stdout_fd, streams.stderr_fd)
        self._pod, self._container = pod, container

    async def resize(self, width: int, height: int) -> None:
        await self._pod.resize(self._container, width, height)

    async def wait(self) -> int:
        await self._container.exited.wait()
        return self._container.exit.exit_code if self._container.exit else 0

    async def close(self) -> None:
        self.close_descriptors()


class Sessions:
    """Opens sessions for the streaming server: exec, attach, and connections to ports of pods."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def exec(self, options: ExecSessionOptions) -> StreamingSession:
        container, pod = execution.require_running(self._services, options.container_id)
        session = await execution.begin(
            self._services,
            container,
            pod,
            options.command,
            stdin=options.stdin,
            stdout=options.stdout,
            stderr=options.stderr,
            tty=options.tty,
            changes=options.changes,
        )
        return ExecStreamSession(pod, session)

    async def attach(self, options: AttachOptions) -> StreamingSession:
        container, pod = execution.require_running(self._services, options.container_id)
        streams = await pod.attach(
            container, stdin=options.stdin, stdout=options.stdout, stderr=options.stderr
        )
        return AttachStreamSession(pod, container, streams)

    async def dial(self, sandbox_id: str, port: int) -> socket.socket:
        """Connect to a port of the pod and return the socket. A separate process (a job) joins
        the pod's network namespace and connects there. Raises NotFound, InvalidArgument (port out
        of range), WrongState (sandbox not ready), PeerError (no connection), DeadlineExceeded."""
        sandbox = self._services.index.sandboxes.get(sandbox_id)
        _check_port(port)
        _check_ready(sandbox)
        arguments = DialRequest(port)
        if sandbox.pause and not sandbox.host_network:
            arguments = DialRequest(port, sandbox.pause.pid, sandbox.pause.start_time)
        result = await self._services.zygote.run_for_fd(DIAL, arguments, timeout_s=DIAL_TIMEOUT_S)
        if not result.fds:
            raise PeerError(
                f"cannot connect to the pod: {result.stderr.decode('utf-8', 'replace')[-200:]}"
            )
        return socket.socket(fileno=result.fds[0])
