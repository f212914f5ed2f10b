"""Runs hooks, by default in the runtime's namespaces. A hook is an executable that the
configuration names. It gets the container's state on stdin.

A hook's environment is exactly that of the configuration. A hook's output goes to files in memory,
because a daemon that the hook leaves behind would keep a pipe open. The output is reported only
when the hook fails. Source: runtime-spec config.md, POSIX-platform hooks.
"""

from __future__ import annotations

import os
from _signal import valid_signals  # type: ignore[import-not-found]

from pyrunc import debug, jsontext
from pyrunc.errors import DeadlineExceeded, Error, KernelError, PeerError, kernel_errors
from pyrunc.kernel.fd import close_all
from pyrunc.kernel.process import wait_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from pyrunc.spec.model import Hook

    Spawn = Callable[[Hook, list[int]], int]

OUTPUT_LIMIT_BYTES = 4096


def run(
    hooks: Sequence[Hook], kind: str, state: dict[str, Any], spawn: Spawn | None = None
) -> None:
    """Run all hooks of one kind in order. Raises PeerError at the first failure. `state` is the OCI
    state object.

    `spawn(hook, stdio)` starts a hook in other namespaces. By default hooks run in the runtime's
    namespaces.
    """
    for failure in _failures(hooks, kind, state, spawn):
        raise PeerError(failure)


def run_all(hooks: Sequence[Hook], kind: str, state: dict[str, Any]) -> list[str]:
    """Run all hooks of one kind (poststart or poststop), also after one has failed. Returns a line
    per failure."""
    return list(_failures(hooks, kind, state))


def _failures(
    hooks: Sequence[Hook], kind: str, state: dict[str, Any], spawn: Spawn | None = None
) -> Iterator[str]:
    """Run hooks one by one; yields a line for each that has failed."""
    for index, hook in enumerate(hooks):
        debug.say("%s hook #%d: %s", kind, index, hook.path)
        try:
            run_one(hook, state, spawn)
        except Error as error:
            reason = error.text if isinstance(error, KernelError) else error.message
            yield f"error running {kind} hook #{index}: {reason}"


def run_one(hook: Hook, state: dict[str, Any], spawn: Spawn | None = None) -> None:
    """Run one hook to its end. Raises KernelError when the hook cannot be executed, PeerError when
    it fails or a signal ends it, DeadlineExceeded when it is killed after its timeout."""
    # No pipes: they would not be read before the hook's end, so a full pipe would stop the hook.
    files = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("stdin", "stdout", "stderr")]
    try:
        os.write(files[0], jsontext.dumps(state).encode("ascii"))
        os.lseek(files[0], 0, os.SEEK_SET)
        code = wait_child((spawn or _spawn)(hook, files), hook.timeout_s)
        if code is None:
            raise DeadlineExceeded(
                f"hook {hook.path!r} did not end within {hook.timeout_s} s and was killed"
            )
        if code:
            how = "exit status" if code > 0 else "killed by signal"
            raise PeerError(
                f"{how} {abs(code)}, stdout: {_output(files[1])}, stderr: {_output(files[2])}"
            )
    finally:
        close_all(files)


def _spawn(hook: Hook, files: list[int]) -> int:
    # config.md, "POSIX-platform Hooks": env is that of the hook, so ours is not passed on.
    environment = dict(entry.partition("=")[::2] for entry in hook.env or ())
    actions = [(os.POSIX_SPAWN_DUP2, file, number) for number, file in enumerate(files)]
    with kernel_errors("execve", repr(hook.path)):
        return os.posix_spawn(
            hook.path,
            list(hook.args) or [hook.path],
            environment,
            file_actions=actions,
            # A hook must not inherit signals that our caller blocks or ignores.
            setsigmask=[],
            setsigdef=valid_signals(),
        )


def _output(file: int) -> str:
    return os.pread(file, OUTPUT_LIMIT_BYTES, 0).decode("utf-8", "replace").strip()
