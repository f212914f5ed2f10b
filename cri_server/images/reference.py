"""References as people write them: `busybox`, `host:5000/a/b:tag`, `name@sha256:…`, `name:tag@sha256:…`.

The grammar is the distribution project's; short names mean docker.io, as everywhere, and a missing tag `latest`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pyrunc.errors import InvalidArgument, Unsupported

DOCKER = "docker.io"
NAME_LIMIT = 255
TEXT_LIMIT = 1024  # a name, a tag of 128 characters, a digest
_LABEL = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_DOMAIN = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]{{1,5}})?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_FOREIGN_DIGEST = re.compile(r"[a-z0-9]+(?:[+._-][a-z0-9]+)*:[0-9a-fA-F]{32,}")
_OURS = re.compile(r"sha256:[0-9a-f]*")
_ID = re.compile(r"(?:sha256:)?[0-9a-f]{1,64}")


def is_digest(text: object) -> bool:
    """Whether it is a digest that we can verify: `sha256:` and 64 lower-case hex digits."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def is_id(text: str) -> bool:
    """Whether it can be an image id or the beginning of one, `sha256:` or not."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Reference:
    """A complete reference. `domain` is the registry's HOST[:PORT]; `tag` and `digest` are not both None."""

    domain: str
    path: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Raises InvalidArgument, and Unsupported for a digest of another algorithm than sha256."""
        if len(text) > TEXT_LIMIT:
            raise InvalidArgument(f"image {_shown(text)}: longer than {TEXT_LIMIT} characters")
        rest, at, digest = text.partition("@")
        if at and not _DIGEST.fullmatch(digest):
            if _FOREIGN_DIGEST.fullmatch(digest) and not _OURS.fullmatch(digest):
                raise Unsupported(f"image {_shown(text)}: only sha256 digests in lower case are supported")
            raise InvalidArgument(f"image {_shown(text)}: malformed digest")
        rest, tag = _split_tag(rest)
        if tag is not None and not _TAG.fullmatch(tag):
            raise InvalidArgument(f"image {_shown(text)}: malformed tag")
        domain, path = _split_domain(rest)
        if not _DOMAIN.fullmatch(domain) or not _PATH.fullmatch(path):
            hint = ": the name must be lower case" if rest.lower() != rest else ""
            raise InvalidArgument(f"image {_shown(text)}: malformed reference{hint}")
        if len(domain) + 1 + len(path) > NAME_LIMIT:
            raise InvalidArgument(f"image {_shown(text)}: the name is longer than {NAME_LIMIT} characters")
        return cls(domain, path, tag if tag or at else "latest", digest or None)

    @property
    def name(self) -> str:
        """`HOST/PATH`, what CRI calls the repository."""
        return f"{self.domain}/{self.path}"

    @property
    def tagged(self) -> str | None:
        """`HOST/PATH:TAG`; None for a pull by digest, whose tag says nothing."""
        return None if self.digest else f"{self.name}:{self.tag}"

    @property
    def target(self) -> str:
        """What to ask the registry for: the digest wins over the tag."""
        return self.digest or str(self.tag)

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}" if self.digest else f"{self.name}:{self.tag}"


def _split_tag(text: str) -> tuple[str, str | None]:
    name, colon, tag = text.rpartition(":")
    return (name, tag) if colon and "/" not in tag and not tag.endswith("]") else (text, None)


def _split_domain(text: str) -> tuple[str, str]:
    first, slash, rest = text.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost" or first != first.lower()):
        domain, path = DOCKER, text
    else:
        domain, path = first, rest
    if domain in ("index.docker.io", "registry-1.docker.io"):
        domain = DOCKER
    if domain == DOCKER and "/" not in path:
        path = f"library/{path}"
    return domain, path


def _shown(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "…")
