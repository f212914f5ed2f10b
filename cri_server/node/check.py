"""Checks the values of a configuration against this machine: whether the host permits the limits,
and whether the named files exist and are valid."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from cri_server.config.model import Config, StreamingConfig
from cri_server.node import host
from cri_server.spec import block_io, hooks, rdt, security
from pyrunc.errors import Error, InvalidSpec


def problems(config: Config) -> Iterator[InvalidSpec]:
    """Yield an InvalidSpec for each key whose value this machine does not permit, or whose file is
    missing or invalid. The error's `path` is the key. Yields nothing for users other than root."""
    # Other users cannot read the limits of process 1 or root's files, and cannot run the server.
    if os.geteuid() != 0:
        return
    containers = config.containers
    checks: dict[str, tuple[Any, Callable[[Any], object]]] = {
        "containers.rlimits": (containers.rlimits, host.limits),
        "containers.seccomp_profile": (containers.seccomp_profile, _read_seccomp_profile),
        "containers.hooks_dirs": (containers.hooks_dirs, hooks.read),
        "containers.block_io_classes": (containers.block_io_classes, block_io.check),
        "containers.rdt_classes": (containers.rdt_classes, rdt.read),
    }
    # A missing binary is no problem here: a package may install it later, and other handlers work
    # without it. `doctor` reports it.
    for name, runtime in config.runtimes.items():
        table = f"runtimes.{name}"
        checks[f"{table}.seccomp_profile"] = runtime.seccomp_profile, _read_seccomp_profile
        checks[f"{table}.hooks_dirs"] = runtime.hooks_dirs, hooks.read
    checks["registry.signature_policy"] = config.registry.signature_policy, _check_signature_policy
    for key, (value, check_value) in checks.items():
        if value:
            yield from _problem(key, check_value, value)
    if config.streaming.tls_certificate:
        yield from _tls_problems(config.streaming)


def _read_seccomp_profile(path: str) -> None:
    security.seccomp_object(security.ProfileChoice(security.LOCALHOST, path), [])


def _check_signature_policy(path: str) -> None:
    from cri_server.images.signatures.cosign import check_policy

    check_policy(path)


def _tls_problems(streaming: StreamingConfig) -> Iterator[InvalidSpec]:
    from cri_server.streaming.tls import Tls

    try:
        Tls(streaming.tls_certificate, streaming.tls_key, streaming.tls_client_ca).context()
    except (OSError, ValueError) as error:
        yield InvalidSpec("streaming.tls_certificate", f"cannot be used: {error}")


def _problem(
    key: str, check_value: Callable[[Any], object], value: object
) -> Iterator[InvalidSpec]:
    """Call `check_value(value)`. If it raises an error, yield this error as an InvalidSpec whose
    path begins with `key`."""
    try:
        check_value(value)
    except InvalidSpec as error:
        yield error if error.path.startswith(key) else InvalidSpec(key, error.message)
    except Error as error:
        yield InvalidSpec(key, error.message)
