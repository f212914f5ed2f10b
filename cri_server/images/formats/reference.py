"""Image references as users write them: `busybox`, `host:5000/a/b:tag`, `name@sha256:…`,
`name:tag@sha256:…`.

The grammar is that of the distribution project. Short names mean docker.io, and a missing tag means
`latest`.

A registry has several spellings (`R.example`, `r.example:443`). Image names keep the spelling of
the request, because the scheduler and users' scripts compare names as text. Signature policies,
hosts.toml, logins and pull secrets compare the result of `normal_registry`, which is the same for
all spellings of a registry.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from cri_server.images.formats.digests import is_digest
from pyrunc.errors import InvalidArgument, Unsupported

DOCKER = "docker.io"
NAME_LIMIT = 255
TEXT_LIMIT = 1024  # a name, a tag of 128 characters, a digest
_LABEL = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_DOMAIN = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]{{1,5}})?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_FOREIGN_DIGEST = re.compile(r"[a-z0-9]+(?:[+._-][a-z0-9]+)*:[0-9a-fA-F]{32,}")
_OURS = re.compile(r"sha(?:256|512):[0-9a-f]*")
_ID = re.compile(r"(?:sha256:)?[0-9a-f]{1,64}|(?:sha512:)?[0-9a-f]{1,128}")
_DOCKER_REGISTRIES = {"docker.io", "index.docker.io", "registry-1.docker.io"}
_NUMERIC = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)(?:\.(?:0x[0-9a-f]*|[0-9]+)){0,3}")
_PORTS_LIMIT = 1 << 16


def is_id(text: str) -> bool:
    """Return whether `text` can be an image id or its beginning, with or without the algorithm."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Reference:
    """A complete reference. `domain` is the registry's HOST[:PORT]; at least one of `tag` and
    `digest` is set."""

    domain: str
    path: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse a reference. Raises InvalidArgument; Unsupported for a digest whose
        algorithm is neither sha256 nor sha512."""
        if len(text) > TEXT_LIMIT:
            raise InvalidArgument(
                f"image {_quoted_text(text)}: longer than {TEXT_LIMIT} characters"
            )
        rest, at, digest = text.partition("@")
        if at and not is_digest(digest):
            if _FOREIGN_DIGEST.fullmatch(digest) and not _OURS.fullmatch(digest):
                raise Unsupported(
                    f"image {_quoted_text(text)}: only sha256 and sha512 digests in lower case"
                    " are supported"
                )
            raise InvalidArgument(f"image {_quoted_text(text)}: malformed digest")
        rest, tag = _split_tag(rest)
        if tag is not None and not _TAG.fullmatch(tag):
            raise InvalidArgument(f"image {_quoted_text(text)}: malformed tag")
        domain, path = _split_domain(rest)
        if not _DOMAIN.fullmatch(domain) or not _PATH.fullmatch(path):
            hint = ": the name must be lower case" if rest.lower() != rest else ""
            raise InvalidArgument(f"image {_quoted_text(text)}: malformed reference{hint}")
        port = split_port(domain)[1]
        if port and not 0 < int(port) < _PORTS_LIMIT:
            raise InvalidArgument(f"image {_quoted_text(text)}: port {port} is out of range")
        if len(domain) + 1 + len(path) > NAME_LIMIT:
            raise InvalidArgument(
                f"image {_quoted_text(text)}: the name is longer than {NAME_LIMIT} characters"
            )
        return cls(domain, path, tag if tag or at else "latest", digest or None)

    @property
    def name(self) -> str:
        """`HOST/PATH` as it was written; CRI calls it the repository."""
        return f"{self.domain}/{self.path}"

    @property
    def registry(self) -> str:
        """The registry's HOST[:PORT] in its normal form."""
        return normal_registry(self.domain)

    @property
    def repository(self) -> str:
        """`HOST/PATH` with the registry in its normal form."""
        return f"{self.registry}/{self.path}"

    @property
    def target(self) -> str:
        """The digest or tag to request from the registry; the digest wins."""
        return self.digest or str(self.tag)

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}" if self.digest else f"{self.name}:{self.tag}"


def _split_tag(text: str) -> tuple[str, str | None]:
    name, colon, tag = text.rpartition(":")
    # A colon before a slash begins a port, and one in brackets belongs to an IPv6 address.
    return (name, tag) if colon and "/" not in tag and not tag.endswith("]") else (text, None)


def _split_domain(text: str) -> tuple[str, str]:
    first, slash, rest = text.partition("/")
    # A path has lower-case letters only, so an upper-case one means a host (distribution's
    # splitDockerDomain).
    if not slash or not (
        "." in first or ":" in first or first == "localhost" or first != first.lower()
    ):
        domain, path = DOCKER, text
    else:
        domain, path = first, rest
    if normal_registry(domain) == DOCKER:
        domain = DOCKER
        path = path if "/" in path else f"library/{path}"
    return domain, path


def normal_registry(domain: str) -> str:
    """Return the normal form of HOST[:PORT], which is the same for all spellings that reach the
    same registry.

    The host is in lower case, without DNS's trailing dot. An address is written as inet_ntoa(3)
    writes it, because inet_aton(3) also takes `10.5` and `0xa.0.0.5`. The scheme's default port is
    left out: 443, or 80 for loopback, which is reached by http. The three host names of Docker Hub
    become `docker.io`.
    """
    host, port = split_port(domain)
    host = _normal_host(host)
    if port.isdecimal():
        port = str(int(port))
    if host in _DOCKER_REGISTRIES and port in ("", "443"):
        return DOCKER
    is_default = port == ("80" if is_loopback(host.strip("[]")) else "443")
    return host if is_default or not port else f"{host}:{port}"


def split_port(domain: str) -> tuple[str, str]:
    """Split HOST[:PORT] into the host and the port, "" if there is none. An IPv6 host keeps its
    brackets."""
    if domain.endswith("]") or ":" not in domain:
        return domain, ""
    host, _, port = domain.rpartition(":")
    return host, port


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's loopback, without a DNS lookup."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _normal_host(host: str) -> str:
    host = host.lower().rstrip(".")
    try:
        if host.startswith("["):
            address = ipaddress.IPv6Address(host.strip("[]"))
            return str(address.ipv4_mapped or f"[{address}]")
        # inet_aton(3) ignores text after a blank, which _NUMERIC refuses.
        return socket.inet_ntoa(socket.inet_aton(host)) if _NUMERIC.fullmatch(host) else host
    except (OSError, ValueError):
        return host


def _quoted_text(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "…")
