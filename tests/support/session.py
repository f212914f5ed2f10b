"""Which test session this is: a mark that its processes carry in their environment, and names with that mark in them.

Several sessions and other programs may share a machine. What a session makes outside of its folders (cgroups, named network
namespaces, links) bears `name(…)`, so that the ledger can tell it from what others make meanwhile.
"""

from __future__ import annotations

import os
import secrets

VARIABLE = "PYRUNC_TEST_SESSION"
# No hexadecimal digits: no container's id contains a mark by chance.
_LETTERS = "ghijkmnpqrstvwxyz"
_LENGTH = 6  # of the 15 letters that a link's name has


def begin(*, anew: bool = False) -> None:
    """Mark this process and all that it will start; an inherited mark stays unless `anew`."""
    if anew or not mark():
        os.environ[VARIABLE] = "".join(secrets.choice(_LETTERS) for _ in range(_LENGTH))


def mark() -> str:
    """The session's mark; empty outside of one."""
    return os.environ.get(VARIABLE, "")


def name(kind: str) -> str:
    """`kind` with the session's mark, or with this process's number outside of a session."""
    return f"{kind}-{mark() or os.getpid()}"
