"""What of a configuration only this machine can tell: whether limits are permitted and files that
are named can be used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from cri_server.config.model import Config, Runtime, Streaming
from cri_server.node import host
from cri_server.spec import block_io, hooks, rdt, security
from pyrunc.errors import Error, InvalidSpec


def check(config: Config) -> None:
    """Raises the first of `problems`."""
    for problem in problems(config):
        raise problem


def problems(config: Config) -> Iterator[InvalidSpec]:
    """All that is wrong, as InvalidSpec whose path is the key. For others than root nothing is
    looked at: they may read neither the limits of the first process nor root's files, and no server
    of theirs will run."""
    if os.geteuid() != 0:
        return
    given = config.containers
    yield from _problem("containers.rlimits", lambda: host.limits(given.rlimits))
    if given.seccomp_profile:
        profile = security.Profile(security.LOCALHOST, given.seccomp_profile)
        yield from _problem(
            "containers.seccomp_profile", lambda: security.seccomp_object(profile, [])
        )
    if given.hooks_dirs:
        yield from _problem("containers.hooks_dirs", lambda: hooks.read(given.hooks_dirs))
    if given.block_io_classes:
        yield from _problem(
            "containers.block_io_classes", lambda: block_io.check(given.block_io_classes)
        )
    if given.rdt_classes:
        yield from _problem("containers.rdt_classes", lambda: rdt.read(given.rdt_classes))
    for name, runtime in config.runtimes.items():
        yield from _runtime_problems(f"runtimes.{name}", runtime)
    if config.registry.signature_policy:
        from cri_server.images.signatures.cosign import check_policy

        yield from _problem(
            "registry.signature_policy", lambda: check_policy(config.registry.signature_policy)
        )
    if config.streaming.tls_certificate:
        yield from _tls_problems(config.streaming)


def _runtime_problems(table: str, runtime: Runtime) -> Iterator[InvalidSpec]:
    """Not its binary: that may come with a package later, and the other handlers work without it
    (`doctor` says so)."""
    if runtime.seccomp_profile:
        profile = security.Profile(security.LOCALHOST, runtime.seccomp_profile)
        yield from _problem(
            f"{table}.seccomp_profile", lambda: security.seccomp_object(profile, [])
        )
    if runtime.hooks_dirs:
        folders = runtime.hooks_dirs
        yield from _problem(f"{table}.hooks_dirs", lambda: hooks.read(folders))


def _tls_problems(given: Streaming) -> Iterator[InvalidSpec]:
    from cri_server.streaming.tls import Tls

    try:
        Tls(given.tls_certificate, given.tls_key, given.tls_client_ca).context()
    except (OSError, ValueError) as error:
        yield InvalidSpec("streaming.tls_certificate", f"cannot be used: {error}")


def _problem(key: str, action: Callable[[], Any]) -> Iterator[InvalidSpec]:
    try:
        action()
    except InvalidSpec as error:
        yield error if error.path.startswith(key) else InvalidSpec(key, error.message)
    except Error as error:
        yield InvalidSpec(key, error.message)
