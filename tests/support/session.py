"""Identifies the test session: a mark that its processes carry in their environment, and names with
that mark.

Several sessions and other programs may share a machine. Objects that a session makes outside of its
folders (cgroups, named network namespaces, network devices) have the mark in `name(…)`, so that the
ledger can tell them from those of others. The marks of one run's workers differ in
the last letter only.
"""

from __future__ import annotations

import os
import secrets

VARIABLE = "PYRUNC_TEST_SESSION"
# No hexadecimal digits: no container's id contains a mark by chance.
_LETTERS = "ghijkmnpqrstvwxyz"
_LENGTH = 6  # of the 15 letters that a link's name has


def begin(worker: int = 0) -> None:
    """Put the session's mark into the environment of this process and of all processes that it will
    start. An inherited mark stays.

    `worker`: the number of a worker, from 1 on, which gets a separate mark, derived from the
    inherited one; 0 if there are no workers.
    """
    session_mark = (
        mark() or "".join(secrets.choice(_LETTERS) for _ in range(_LENGTH - 1)) + _LETTERS[0]
    )
    os.environ[VARIABLE] = session_mark[:-1] + _LETTERS[worker] if worker else session_mark


def mark() -> str:
    """Return the session's mark; an empty text outside of a session."""
    return os.environ.get(VARIABLE, "")


def of_another_worker(text: str) -> bool:
    """Return whether the text has the mark of another worker of this run, and not this worker's
    own."""
    own = mark()
    return bool(own) and own not in text and any(own[:-1] + letter in text for letter in _LETTERS)


def name(kind: str) -> str:
    """Return `kind` with the session's mark, or with this process's number outside of a session."""
    return f"{kind}-{mark() or os.getpid()}"
