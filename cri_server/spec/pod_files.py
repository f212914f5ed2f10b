"""The files that a pod's containers see: resolv.conf, hostname and hosts, written into the
sandbox's folder on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.security.selinux.relabel import set_label
from cri_server.spec.mounts import PodFiles
from pyrunc.errors import Error, InvalidArgument, KernelError
from pyrunc.shim.log_file import LOG_NOTE

HOSTNAME_LIMIT = 64  # __NEW_UTS_LEN
SHORT_ID = 12
FAULTS_OF_A_PATH = (
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO, errno.ENOENT,
)  # fmt: skip


def hostname(config: api.PodSandboxConfig, sandbox_id: str, host: str) -> str:
    """The pod's name for itself: as asked; the host's with its network; else the id's first
    characters.

    Raises InvalidArgument for what sethostname(2) would refuse.
    """
    if config.hostname:
        name = config.hostname
        if len(name.encode()) > HOSTNAME_LIMIT or any(c.isspace() or c in "\0/" for c in name):
            raise InvalidArgument(
                f"hostname {name[:80]!r}: at most {HOSTNAME_LIMIT} bytes without spaces"
            )
        return name
    on_host = config.linux.security_context.namespace_options.network == api.NODE
    return host if on_host else sandbox_id[:SHORT_ID]


def resolv_conf(config: api.PodSandboxConfig) -> str | None:
    """The file's text; None: as the host has it. A present but empty DNS configuration is an empty
    file."""
    if not config.HasField("dns_config"):
        return None
    dns = config.dns_config
    words = [*dns.servers, *dns.searches, *dns.options]
    if any(not word or any(c.isspace() or c == "\0" for c in word) for word in words):
        raise InvalidArgument("dns_config: an entry is empty or holds white space")
    lines = []
    if dns.searches:
        lines.append(f"search {' '.join(dns.searches)}")
    lines += [f"nameserver {server}" for server in dns.servers]
    if dns.options:
        lines.append(f"options {' '.join(dns.options)}")
    return "".join(f"{line}\n" for line in lines)


def paths(folder: Path) -> PodFiles:
    """Where the three files are."""
    return PodFiles(str(folder / "resolv.conf"), str(folder / "hostname"), str(folder / "hosts"))


def write(
    folder: Path,
    config: api.PodSandboxConfig,
    name: str,
    owner: tuple[int, int] = (0, 0),
    label: str = "",
) -> None:
    """Write the three files, which belong to the pod's root (`owner`: uid and gid; `label`:
    SELinux's, if any), to a folder that is new: nobody reads there yet. Raises OSError,
    InvalidArgument."""
    resolver = resolv_conf(config)
    contents = {
        "resolv.conf": _host_file("/etc/resolv.conf") if resolver is None else resolver.encode(),
        "hostname": f"{name}\n".encode(),
        "hosts": _host_file("/etc/hosts"),
    }
    for file, content in contents.items():
        try:
            with open(folder / file, "xb", opener=_open_readable) as opened:
                opened.write(content)
                if owner != (0, 0):
                    os.fchown(opened.fileno(), *owner)
        except OSError as error:
            error.filename = str(folder / file)  # write(2) knows no name
            raise
        if label:
            set_label(str(folder / file), label)


def _open_readable(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)


def make_log_directory(path: str) -> None:
    """Make the pod's log directory and those above it. Raises InvalidArgument for a path that
    cannot be one, KernelError."""
    try:
        os.makedirs(path, mode=0o755, exist_ok=True)
    except OSError as error:
        if error.errno in FAULTS_OF_A_PATH:
            raise InvalidArgument(
                f"log_directory {path[:200]!r}: {os.strerror(error.errno)}"
            ) from None
        raise KernelError.of(error, "mkdir", repr(path)) from None


def is_bad_log_path(error: Error) -> bool:
    """Whether a start failed because its log cannot be at the path that was asked for: a directory,
    beneath a file, a link."""
    return (
        isinstance(error, KernelError)
        and error.note == LOG_NOTE
        and error.errno in FAULTS_OF_A_PATH
    )


def _host_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return b""
