"""What of a configuration only this machine can tell: whether limits are permitted and files that are named can be used."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from cri_server import node
from cri_server.config.model import Config, Runtime, Streaming
from cri_server.spec import block_io, hooks, rdt, security
from pyrunc.errors import Error, InvalidSpec


def check(config: Config) -> None:
    """Raises InvalidSpec whose path is the key. For others than root nothing is looked at: they may read neither the limits of
    the first process nor root's files, and no server of theirs will run."""
    if os.geteuid() != 0:
        return
    given = config.containers
    node.limits(given.rlimits)
    if given.seccomp_profile:
        profile = security.Profile(security.LOCALHOST, given.seccomp_profile)
        _try("containers.seccomp_profile", lambda: security.seccomp_object(profile, []))
    if given.hooks_dirs:
        _try("containers.hooks_dirs", lambda: hooks.read(given.hooks_dirs))
    if given.block_io_classes:
        _try("containers.block_io_classes", lambda: block_io.check(given.block_io_classes))
    if given.rdt_classes:
        _try("containers.rdt_classes", lambda: rdt.read(given.rdt_classes))
    for name, runtime in config.runtimes.items():
        _check_runtime(f"runtimes.{name}", runtime)
    if config.registry.signature_policy:
        from cri_server.images.signatures import check_policy

        _try("registry.signature_policy", lambda: check_policy(config.registry.signature_policy))
    if config.streaming.tls_certificate:
        _check_tls(config.streaming)


def _check_runtime(table: str, runtime: Runtime) -> None:
    """Not its binary: that may come with a package later, and the other handlers work without it (`doctor` says so)."""
    if runtime.seccomp_profile:
        profile = security.Profile(security.LOCALHOST, runtime.seccomp_profile)
        _try(f"{table}.seccomp_profile", lambda: security.seccomp_object(profile, []))
    if runtime.hooks_dirs:
        folders = runtime.hooks_dirs
        _try(f"{table}.hooks_dirs", lambda: hooks.read(folders))


def _check_tls(given: Streaming) -> None:
    from cri_server.streaming.tls import Tls

    try:
        Tls(given.tls_certificate, given.tls_key, given.tls_client_ca).context()
    except (OSError, ValueError) as error:
        raise InvalidSpec("streaming.tls_certificate", f"cannot be used: {error}") from None


def _try(key: str, action: Callable[[], Any]) -> None:
    try:
        action()
    except Error as error:
        raise InvalidSpec(key, error.message) from None
