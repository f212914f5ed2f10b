"""Issues tickets for streaming URLs. A ticket is 256 random bits that open one prepared session,
once, within a minute.

Only a digest of the session's kind and the ticket is stored. So the time of a lookup reveals
nothing about tickets, and a ticket of one kind of session does not open another kind. Unknown, used
and expired tickets get the same response.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable

from pyrunc.errors import ResourceExhausted

# Lifetime and number are those of Kubernetes' own cache, whose tokens have 48 bits only.
TTL_S = 60.0
OUTSTANDING_LIMIT = 1000
TOKEN_BYTES = 32


class Tickets:
    """The unused tickets of streaming URLs, oldest first."""

    def __init__(
        self,
        ttl_s: float = TTL_S,
        outstanding_limit: int = OUTSTANDING_LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s, self._limit, self._clock = ttl_s, outstanding_limit, clock
        self._tickets: dict[bytes, tuple[float, object]] = {}

    def issue(self, kind: str, request: object) -> str:
        """Return a URL-safe ticket for `request`, the options of a session of the kind `kind`.
        Raises `ResourceExhausted` at the limit of unused tickets."""
        self._drop_expired()
        if len(self._tickets) >= self._limit:
            raise ResourceExhausted(f"too many unused streaming URLs: the limit is {self._limit}")
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._tickets[_digest(kind, token)] = (self._clock() + self._ttl_s, request)
        return token

    def take(self, kind: str, token: str) -> object | None:
        """Redeem the ticket `token`: return the request that it was issued for, or `None` if the
        ticket is unknown, used or expired."""
        expires_at, request = self._tickets.pop(_digest(kind, token), (0.0, None))
        return request if self._clock() < expires_at else None

    def _drop_expired(self) -> None:
        now = self._clock()
        for digest in list(self._tickets):
            # All tickets have the same lifetime, so the order of issue is that of expiry.
            if self._tickets[digest][0] > now:
                break
            del self._tickets[digest]


def _digest(kind: str, token: str) -> bytes:
    return hashlib.sha256(f"{kind}/{token}".encode("utf-8", "surrogateescape")).digest()
