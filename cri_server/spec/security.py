"""Selects a container's seccomp and AppArmor profiles: from CRI's current fields, else from its
deprecated strings, else by default.

If the field `seccomp` or `apparmor` is missing, the current fields choose no profile. If it is
present with zero values, it requests RuntimeDefault.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from typing import Any

from cri_server.api import api_pb2 as api
from pyrunc.errors import InvalidArgument, Unsupported
from pyrunc.kernel.fd import closing_fd
from pyrunc.seccomp.default import runtime_default

DEFAULT, UNCONFINED, LOCALHOST = "default", "unconfined", "localhost"
RUNTIME_DEFAULT = "runtime/default"
PROFILE_SIZE_LIMIT_BYTES = 4 << 20

_TYPES = {
    api.SecurityProfile.RuntimeDefault: DEFAULT,
    api.SecurityProfile.Unconfined: UNCONFINED,
    api.SecurityProfile.Localhost: LOCALHOST,
}


@dataclass(frozen=True, slots=True)
class ProfileChoice:
    """A requested profile. `kind`: default, unconfined or localhost; `reference`: for localhost the
    path (seccomp) or the name (AppArmor), else empty."""

    kind: str
    reference: str = ""


def seccomp_profile(
    context: api.LinuxContainerSecurityContext | api.LinuxSandboxSecurityContext,
) -> ProfileChoice:
    """Return the requested seccomp profile. A privileged container, and one that requests nothing,
    is unconfined. Raises InvalidArgument for a malformed request."""
    if context.privileged:
        return ProfileChoice(UNCONFINED)
    if context.HasField("seccomp"):
        return _profile(context.seccomp, "seccomp")
    text = context.seccomp_profile_path or UNCONFINED
    if text == "docker/default":
        return ProfileChoice(DEFAULT)
    return _named_profile(text, "seccomp_profile_path")


def apparmor_profile(context: api.LinuxContainerSecurityContext) -> ProfileChoice:
    """Return the requested AppArmor profile, or the default profile if nothing is requested. A
    privileged container is unconfined. Raises InvalidArgument for a malformed request."""
    if context.privileged:
        return ProfileChoice(UNCONFINED)
    if context.HasField("apparmor"):
        profile = _profile(context.apparmor, "apparmor")
        return ProfileChoice(profile.kind, profile.reference.removeprefix("localhost/"))
    return _named_profile(context.apparmor_profile or RUNTIME_DEFAULT, "apparmor_profile")


def _named_profile(text: str, field: str) -> ProfileChoice:
    """Parse the profile in a deprecated text field. `field`: the field's name for the error. Raises
    InvalidArgument unless `text` is unconfined, runtime/default or localhost/PROFILE."""
    if text == UNCONFINED:
        return ProfileChoice(UNCONFINED)
    if text == RUNTIME_DEFAULT:
        return ProfileChoice(DEFAULT)
    if text.startswith("localhost/"):
        return ProfileChoice(LOCALHOST, text.removeprefix("localhost/"))
    raise InvalidArgument(
        f"{field} {text!r} is not unconfined, runtime/default or localhost/PROFILE"
    )


def _profile(requested: api.SecurityProfile, what: str) -> ProfileChoice:
    kind = _TYPES.get(requested.profile_type)
    if kind is None:
        raise InvalidArgument(f"{what}: unknown profile type {requested.profile_type}")
    if kind == LOCALHOST and not requested.localhost_ref:
        raise InvalidArgument(f"{what}: profile type Localhost without localhost_ref")
    if kind != LOCALHOST and requested.localhost_ref:
        raise InvalidArgument(f"{what}: localhost_ref is only for profile type Localhost")
    return ProfileChoice(kind, requested.localhost_ref)


def seccomp_object(
    profile: ProfileChoice, capabilities: list[str], default_path: str = ""
) -> dict[str, Any] | None:
    """Return the OCI object `linux.seccomp` of a profile; None if unconfined.

    `capabilities`: the container's `CAP_…` names; the default profile permits further system calls
    for some of them. `default_path`: a file that replaces the default profile, empty for none.
    Reads this file, or the file of a localhost profile.

    Raises InvalidArgument for a file that cannot be read or is not an OCI seccomp object, and
    Unsupported on a processor for which there is no default profile.
    """
    if profile.kind == UNCONFINED:
        return None
    if profile.kind == DEFAULT and default_path:
        return _read_profile(default_path)
    if profile.kind == DEFAULT:
        return runtime_default(capabilities, os.uname().machine)
    return _read_profile(profile.reference)


def _read_profile(path: str) -> dict[str, Any]:
    if not path.startswith("/"):
        raise InvalidArgument(f"seccomp profile {path!r} is not an absolute path")
    try:
        with closing_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as descriptor:
            file_stat = os.fstat(descriptor)
            if not stat.S_ISREG(file_stat.st_mode) or file_stat.st_size > PROFILE_SIZE_LIMIT_BYTES:
                raise InvalidArgument(
                    f"seccomp profile {path!r} is not a regular file of at most 4 MiB"
                )
            content = os.read(descriptor, PROFILE_SIZE_LIMIT_BYTES)
    except OSError as error:
        raise InvalidArgument(f"seccomp profile {path!r}: {error.strerror}") from None
    try:
        profile = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"seccomp profile {path!r} is not JSON: {error}") from None
    if not isinstance(profile, dict) or not isinstance(profile.get("defaultAction"), str):
        raise InvalidArgument(f"seccomp profile {path!r} is not an OCI seccomp object")
    return profile


def apparmor_name(profile: ProfileChoice, *, enabled: bool, default: str, loaded: set[str]) -> str:
    """Return the name of the AppArmor profile to apply; empty for none. `default`: the name of the
    server's default profile, empty if it could not be loaded; `loaded`: the names of the profiles
    in the kernel.

    Raises Unsupported on a host without AppArmor, InvalidArgument for a profile that is not loaded.
    """
    if profile.kind == DEFAULT:
        return default
    if profile.kind == UNCONFINED:
        return ""
    if not enabled:
        raise Unsupported(
            f"apparmor profile {profile.reference!r}: AppArmor is not enabled on this host"
        )
    if profile.reference not in loaded:
        raise InvalidArgument(f"apparmor profile {profile.reference!r} is not loaded")
    return profile.reference
