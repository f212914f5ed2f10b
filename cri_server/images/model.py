"""The nouns of the image service: what a caller asks with and what it gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cri_server.images.store.mounts import ImageMount

HIGHEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, repr=False)
class Auth:
    """A pull secret as CRI's AuthConfig has it; used in this order: user and password, `auth`
    (base64 of `user:password`), `identity_token` (an OAuth2 refresh token), `registry_token` (a
    bearer token). `server_address` limits it to one host.

    Its repr shows no secret.
    """

    username: str = ""
    password: str = ""
    auth: str = ""
    server_address: str = ""
    identity_token: str = ""
    registry_token: str = ""

    def __repr__(self) -> str:
        return f"Auth(server_address={self.server_address!r}, …)"

    @property
    def empty(self) -> bool:
        """Whether there is nothing to log in with."""
        return not (
            self.username
            or self.password
            or self.auth
            or self.identity_token
            or self.registry_token
        )


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says about the processes made from it. Hostile input: the types are checked,
    the meaning is not."""

    user: str = ""
    env: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    working_dir: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    stop_signal: str = ""
    volumes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Rootfs:
    """Where an image's unpacked layers are, top first (at least one), and its configuration. An
    image that is mounted has one, which this process can use as long as it has this object. An
    image is not converted while somebody has its object."""

    image_id: str
    lower_dirs: list[Path]
    config: ImageConfig
    mount: ImageMount | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """A complete image. `id` is `sha256:<config digest>`.

    `repo_tags`: fully qualified `HOST/PATH:TAG`; `repo_digests`: `HOST/PATH@sha256:…` of what the
    registry served. `size_bytes`: blobs and unpacked layers on disk. `user` as the image has it.
    """

    id: str
    repo_tags: list[str]
    repo_digests: list[str]
    size_bytes: int
    user: str = ""
    pinned: bool = False

    @property
    def uid(self) -> int | None:
        """The number in `user` (`1002`, `1003:1004`), None when it has a name, is empty or out of
        range."""
        text = self.user.partition(":")[0]
        if not (text.isascii() and text.isdigit() and len(text) <= 10):
            return None
        return int(text) if int(text) <= HIGHEST_ID else None

    @property
    def username(self) -> str:
        """The name in `user` (`www-data`, `www-data:adm`); also a number that no uid can be, so
        that it is not taken for root."""
        return "" if self.uid is not None else self.user.partition(":")[0]


@dataclass(frozen=True, slots=True)
class FilesystemUsage:
    """The image store on disk: its directory, and what it holds (a cached count of our own files)."""

    timestamp_ns: int
    mountpoint: Path
    used_bytes: int
    inodes_used: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull is. `stage`: resolving, fetching, unpacking, done; the bytes are of all
    layers' blobs."""

    reference: str
    stage: str
    fetched_bytes: int = 0
    total_bytes: int = 0
