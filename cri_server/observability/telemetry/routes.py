"""The routes of the endpoint: `/metrics`, `/metrics/cadvisor` with metrics of pods, `/healthz`."""

from __future__ import annotations

import asyncio

from cri_server.observability.telemetry import pods
from cri_server.observability.telemetry.endpoint import Endpoint, Reply, Route
from cri_server.observability.telemetry.snapshot import Snapshot, Source
from cri_server.services import Services


def endpoint(address: str, source: Source) -> Endpoint:
    """Return the endpoint with all routes, not started yet."""
    routes = {
        "/metrics": _metrics(source),
        "/metrics/cadvisor": _of_pods(source.services),
        "/healthz": _health(source),
    }
    return Endpoint(address, routes)


def _metrics(source: Source) -> Route:
    async def answer(accept: str) -> Reply:
        snapshot = await source.take()
        body, content_type = await asyncio.to_thread(_write, snapshot, accept, True)
        return Reply(200, body, content_type)

    return answer


def _of_pods(services: Services) -> Route:
    async def answer(accept: str) -> Reply:
        snapshot = await pods.take(services)
        body, content_type = await asyncio.to_thread(_write, snapshot, accept, False)
        return Reply(200, body, content_type)

    return answer


def _write(snapshot: Snapshot, accept: str, of_process: bool) -> tuple[bytes, str]:
    from cri_server.observability.telemetry import exposition

    return exposition.write(snapshot, accept, of_process=of_process)


def _health(source: Source) -> Route:
    async def answer(accept: str) -> Reply:
        problems = await asyncio.to_thread(source.problems)
        if problems:
            return Reply(503, "".join(f"{line}\n" for line in problems).encode())
        return Reply(200, b"ok\n")

    return answer
