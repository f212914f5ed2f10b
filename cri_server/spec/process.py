"""Decides a container's argv, environment and working directory: from the CRI configuration, else
from the image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.spec import path_length
from pyrunc.errors import InvalidArgument
from pyrunc.spec.check import not_a_variable

UNLIMITED = 2**64 - 1
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def argv(
    command: Sequence[str], args: Sequence[str], entrypoint: Sequence[str], cmd: Sequence[str]
) -> list[str]:
    """Return a container's argv by Kubernetes' rules: `command` replaces the image's `entrypoint`
    and `cmd`; `args` alone replace `cmd`.

    Raises InvalidArgument when the argv is empty, or its first word is too long for a path.
    """
    result = [*command, *args] if command else [*entrypoint, *(args or cmd)]
    if not result or not result[0]:
        raise InvalidArgument("no command: neither the container nor its image names one")
    _no_nul(result, "command")
    path_length.check(result[0], "config.command[0]" if command else "the image's entrypoint")
    return result


def environment(
    image: Iterable[str],
    envs: Iterable[tuple[str, str]],
    *,
    hostname: str,
    tty: bool,
    home: str,
) -> list[str]:
    """Return the environment as a list of `KEY=VALUE`: the image's variables, overridden by the
    request's (`envs`), with PATH, HOSTNAME, TERM and HOME as defaults. HOME is also set if it is
    empty, as in runc."""
    result: dict[str, str] = {}
    for line in image:
        key, equals, value = line.partition("=")
        if key and equals:
            result[key] = value
    result.setdefault("PATH", DEFAULT_PATH)
    result.setdefault("HOSTNAME", hostname)
    if tty:
        result.setdefault("TERM", "xterm")
    for key, value in envs:
        if not key:
            raise InvalidArgument("an environment variable has an empty name")
        if "=" in key:
            name = key.partition("=")[0]  # the text behind it may be a secret
            raise InvalidArgument(f"the name of environment variable {name!r} has a '=' in it")
        result[key] = value
    if home and not result.get("HOME"):
        # Not left to the shim, which would read the container's files at each exec.
        result["HOME"] = home
    lines = [f"{key}={value}" for key, value in result.items()]
    _no_nul(lines, "environment")
    return lines


def cri_envs(config: api.ContainerConfig) -> list[tuple[str, str]]:
    """Return the environment of a request as pairs of name and value. Bytes that are not UTF-8
    become surrogates."""
    return [(env.key, env.value.decode("utf-8", "surrogateescape")) for env in config.envs]


def working_dir(cri: str, image: str) -> str:
    """Return the process's working directory: the request's (`cri`), else the image's, else `/`.
    Raises InvalidArgument for a path that is relative or too long."""
    path = cri or image or "/"
    # A WORKDIR of 10,000 bytes took 1.5 s to compile, a step for each component, before the kernel
    # refused it at the start.
    path_length.check(path, "config.working_dir" if cri else "the image's WorkingDir")
    if not path.startswith("/"):
        raise InvalidArgument(f"working directory {path!r} is not absolute")
    _no_nul([path], "working directory")
    return path


def rlimits(limits: Mapping[str, tuple[int, int]]) -> list[dict[str, object]]:
    """Convert `limits`, a mapping from a limit's name to its pair (soft, hard), to the OCI object
    `process.rlimits`. The value -1 (Python's RLIM_INFINITY) becomes 2^64 - 1, the kernel's value
    for unlimited."""
    return [
        {"type": name, "soft": soft & UNLIMITED, "hard": hard & UNLIMITED}
        for name, (soft, hard) in limits.items()
    ]


def with_arguments(
    process: Mapping[str, object], command: Sequence[str], *, tty: bool
) -> dict[str, object]:
    """Return the OCI process of an exec: a copy of the container's `process` with the argv
    `command`, and with a terminal if `tty`. Raises InvalidArgument for an empty command and for a
    NUL byte."""
    if not command or not command[0]:
        raise InvalidArgument("the command is empty")
    _no_nul(command, "command")
    result = {**process, "args": list(command), "terminal": tty}
    env = result.get("env")
    if tty and isinstance(env, list) and not any(str(e).startswith("TERM=") for e in env):
        result["env"] = [*env, "TERM=xterm"]
    return result


def changed(process: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the OCI process in which `user` and `cwd` of `changes`, if present, replace
    the old values. The variables in `changes["env"]` are added, or replace those of the same name.
    If `changes` has a `user`, the HOME of `process` is removed.

    Raises InvalidArgument for an entry of `env` that is not NAME=VALUE, for a NUL byte in it, and
    for a `cwd` that is too long.
    """
    env = list(changes.get("env", ()))
    for entry in env:
        if not entry.partition("=")[0] or "=" not in entry:
            raise InvalidArgument(f"the environment: {not_a_variable(entry)}")
    _no_nul(env, "the environment")
    path_length.check(changes.get("cwd", ""), "the working directory")
    names = {entry.partition("=")[0] for entry in env}
    inherited = [
        entry for entry in process.get("env") or () if entry.partition("=")[0] not in names
    ]
    if "user" in changes:  # the shim looks up the new user's home in the container's passwd file
        inherited = [entry for entry in inherited if not entry.startswith("HOME=")]
    return {**process, **changes, "env": [*inherited, *env]}


def _no_nul(words: Iterable[str], what: str) -> None:
    if any("\0" in word for word in words):
        raise InvalidArgument(f"{what} holds a NUL byte")
