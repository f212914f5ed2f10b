"""Writes the files that a pod's containers mount (resolv.conf, hostname and hosts) into the
sandbox's folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.security.selinux.relabel import set_label
from pyrunc.errors import Error, InvalidArgument, KernelError
from pyrunc.shim.log_file import LOG_NOTE

HOSTNAME_LIMIT = 64  # __NEW_UTS_LEN
SHORT_ID = 12
PATH_ERRNOS = (
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG,
    errno.EINVAL, errno.ENXIO, errno.ENOENT,
)  # fmt: skip


def hostname(config: api.PodSandboxConfig, sandbox_id: str, host: str) -> str:
    """Return the pod's hostname. This is the requested name. Without one it is the host's name for
    a pod with host networking, else the first characters of the sandbox's id.

    Raises InvalidArgument for a name that sethostname(2) would refuse.
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
    """Return the text of the pod's resolv.conf, which is empty for an empty DNS configuration.
    Return None if the request has no DNS configuration: the pod then gets a copy of the host's
    file. Raises InvalidArgument if a server, search domain or option is empty or contains white
    space."""
    if not config.HasField("dns_config"):
        return None
    dns = config.dns_config
    words = [*dns.servers, *dns.searches, *dns.options]
    # White space in an entry would begin another word or line, such as a `nameserver`
    # (resolv.conf(5)).
    if any(not word or any(c.isspace() or c == "\0" for c in word) for word in words):
        raise InvalidArgument("dns_config: an entry is empty or contains white space")
    lines = []
    if dns.searches:
        lines.append(f"search {' '.join(dns.searches)}")
    lines += [f"nameserver {server}" for server in dns.servers]
    if dns.options:
        lines.append(f"options {' '.join(dns.options)}")
    return "".join(f"{line}\n" for line in lines)


def write(
    folder: Path,
    config: api.PodSandboxConfig,
    name: str,
    owner: tuple[int, int] = (0, 0),
    label: str = "",
) -> None:
    """Write resolv.conf, hostname and hosts into a new folder. `name`: the pod's hostname; `owner`:
    uid and gid of the pod's root on the host; `label`: the files' SELinux label, empty for none.
    Raises OSError for a failed write, KernelError for a failed label, and InvalidArgument for an
    invalid DNS configuration."""
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
            error.filename = str(folder / file)  # an error of write(2) has no file name
            raise
        if label:
            set_label(str(folder / file), label)


def _open_readable(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)


def make_log_directory(path: str) -> None:
    """Make the pod's log directory and its parents. Raises InvalidArgument for an unusable path
    (too long, below a file, a loop of symlinks), KernelError for other failures."""
    try:
        os.makedirs(path, mode=0o755, exist_ok=True)
    except OSError as error:
        if error.errno in PATH_ERRNOS:
            raise InvalidArgument(
                f"log_directory {path[:200]!r}: {os.strerror(error.errno)}"
            ) from None
        raise KernelError.of(error, "mkdir", repr(path)) from None


def is_bad_log_path(error: Error) -> bool:
    """Return whether `error` is the failure to open a container's log because of its path, for
    example a directory, a path below a file, or a symlink."""
    return isinstance(error, KernelError) and error.note == LOG_NOTE and error.errno in PATH_ERRNOS


def _host_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return b""
