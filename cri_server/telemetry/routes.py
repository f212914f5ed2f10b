"""What is served: `/metrics` for Prometheus, `/healthz` for whoever watches the server."""

from __future__ import annotations

import asyncio

from cri_server.telemetry.endpoint import Endpoint, Reply, Route
from cri_server.telemetry.snapshot import Snapshot, Source


def endpoint(address: str, source: Source) -> Endpoint:
    """The server of both, not started yet."""
    return Endpoint(address, {"/metrics": _metrics(source), "/healthz": _health(source)})


def _metrics(source: Source) -> Route:
    async def answer(accept: str) -> Reply:
        snapshot = await source.take()
        body, content_type = await asyncio.to_thread(_write, snapshot, accept)
        return Reply(200, body, content_type)

    return answer


def _write(snapshot: Snapshot, accept: str) -> tuple[bytes, str]:
    from cri_server.telemetry import exposition

    return exposition.write(snapshot, accept)


def _health(source: Source) -> Route:
    async def answer(accept: str) -> Reply:
        problems = await asyncio.to_thread(source.problems)
        if problems:
            return Reply(503, "".join(f"{line}\n" for line in problems).encode())
        return Reply(200, b"ok\n")

    return answer
