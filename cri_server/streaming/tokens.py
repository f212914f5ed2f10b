"""Tickets for streaming URLs: 256 random bits that open one prepared session, once, within a
minute.

Only a digest of kind and token is kept, so a lookup's time says nothing about a token, and a ticket
for one kind of session cannot be found as another. Unknown, used and expired tickets look the same
to whoever asks.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable

from pyrunc.errors import ResourceExhausted

TTL_S = 60.0
OUTSTANDING_LIMIT = 1000
TOKEN_BYTES = 32


class Tickets:
    """The outstanding tickets, oldest first."""

    def __init__(
        self,
        ttl_s: float = TTL_S,
        outstanding_limit: int = OUTSTANDING_LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s, self._limit, self._clock = ttl_s, outstanding_limit, clock
        self._tickets: dict[bytes, tuple[float, object]] = {}

    def issue(self, kind: str, request: object) -> str:
        """A token, safe in a URL's path, for `request`. Raises `ResourceExhausted` at the limit."""
        self._drop_expired()
        if len(self._tickets) >= self._limit:
            raise ResourceExhausted(
                f"{self._limit} streaming sessions were requested and not yet opened"
            )
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._tickets[_digest(kind, token)] = (self._clock() + self._ttl_s, request)
        return token

    def take(self, kind: str, token: str) -> object | None:
        """The request that the token was issued for; `None` if there is no such ticket (any more)."""
        expires_at, request = self._tickets.pop(_digest(kind, token), (0.0, None))
        return request if self._clock() < expires_at else None

    def _drop_expired(self) -> None:
        now = self._clock()
        for digest in list(self._tickets):
            if self._tickets[digest][0] > now:
                break
            del self._tickets[digest]


def _digest(kind: str, token: str) -> bytes:
    return hashlib.sha256(f"{kind}/{token}".encode("utf-8", "surrogateescape")).digest()
