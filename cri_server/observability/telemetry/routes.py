"""The routes of the endpoint: `/metrics`, `/metrics/cadvisor` with metrics of pods, `/healthz`."""

from __future__ import annotations

import asyncio

from cri_server.observability.telemetry import pods
from cri_server.observability.telemetry.endpoint import Endpoint, Reply
from cri_server.observability.telemetry.snapshot import MetricsSource, Snapshot


def endpoint(address: str, source: MetricsSource) -> Endpoint:
    """Return the endpoint with all routes, not started yet."""

    async def server_metrics(accept: str) -> Reply:
        return await _exposition(await source.take(), accept, of_process=True)

    async def pod_metrics(accept: str) -> Reply:
        return await _exposition(await pods.take(source.services), accept, of_process=False)

    async def health(accept: str) -> Reply:
        problems = await asyncio.to_thread(source.problems)
        if problems:
            return Reply(503, "".join(f"{line}\n" for line in problems).encode())
        return Reply(200, b"ok\n")

    routes = {"/metrics": server_metrics, "/metrics/cadvisor": pod_metrics, "/healthz": health}
    return Endpoint(address, routes)


async def _exposition(snapshot: Snapshot, accept: str, *, of_process: bool) -> Reply:
    body, content_type = await asyncio.to_thread(_write, snapshot, accept, of_process)
    return Reply(200, body, content_type)


def _write(snapshot: Snapshot, accept: str, of_process: bool) -> tuple[bytes, str]:
    from cri_server.observability.telemetry import exposition

    return exposition.write(snapshot, accept, of_process=of_process)
