"""Checks a configuration against this machine: permitted limits, and files that it names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from cri_server.config.model import Config, Runtime, Streaming
from cri_server.node import host
from cri_server.spec import block_io, hooks, rdt, security
from pyrunc.errors import Error, InvalidSpec


def check(config: Config) -> None:
    """Raise the first of `problems`."""
    for problem in problems(config):
        raise problem


def problems(config: Config) -> Iterator[InvalidSpec]:
    """Yield all problems, as InvalidSpec whose path is the key; none for users other than root."""
    # Other users cannot read the limits of process 1 or root's files, and cannot run the server.
    if os.geteuid() != 0:
        return
    containers = config.containers
    yield from _problem("containers.rlimits", lambda: host.limits(containers.rlimits))
    if containers.seccomp_profile:
        profile = security.ProfileChoice(security.LOCALHOST, containers.seccomp_profile)
        yield from _problem(
            "containers.seccomp_profile", lambda: security.seccomp_object(profile, [])
        )
    if containers.hooks_dirs:
        yield from _problem("containers.hooks_dirs", lambda: hooks.read(containers.hooks_dirs))
    if containers.block_io_classes:
        yield from _problem(
            "containers.block_io_classes", lambda: block_io.check(containers.block_io_classes)
        )
    if containers.rdt_classes:
        yield from _problem("containers.rdt_classes", lambda: rdt.read(containers.rdt_classes))
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
    """Problems of a runtime handler, except a missing binary, which `doctor` reports: a package may
    install it later, and other handlers work without it."""
    if runtime.seccomp_profile:
        profile = security.ProfileChoice(security.LOCALHOST, runtime.seccomp_profile)
        yield from _problem(
            f"{table}.seccomp_profile", lambda: security.seccomp_object(profile, [])
        )
    if runtime.hooks_dirs:
        folders = runtime.hooks_dirs
        yield from _problem(f"{table}.hooks_dirs", lambda: hooks.read(folders))


def _tls_problems(streaming: Streaming) -> Iterator[InvalidSpec]:
    from cri_server.streaming.tls import Tls

    try:
        Tls(streaming.tls_certificate, streaming.tls_key, streaming.tls_client_ca).context()
    except (OSError, ValueError) as error:
        yield InvalidSpec("streaming.tls_certificate", f"cannot be used: {error}")


def _problem(key: str, action: Callable[[], Any]) -> Iterator[InvalidSpec]:
    try:
        action()
    except InvalidSpec as error:
        yield error if error.path.startswith(key) else InvalidSpec(key, error.message)
    except Error as error:
        yield InvalidSpec(key, error.message)
