"""Arguments and results of the image service."""

from __future__ import annotations

from dataclasses import dataclass, fields

HIGHEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, repr=False)
class Auth:
    """A pull secret with the fields of CRI's AuthConfig. The first of these logins that is set is
    used: user and password, `auth` (base64 of `user:password`), `identity_token` (an OAuth2 refresh
    token), `registry_token` (a bearer token). `server_address` limits the secret to one host.

    The repr shows no secret.
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
        """Return whether no credential is set."""
        return self == Auth(server_address=self.server_address)


AUTH_FIELDS = tuple(field.name for field in fields(Auth))


@dataclass(frozen=True, slots=True)
class Image:
    """A complete image. `id` is `sha256:<config digest>`.

    `repo_tags`: fully qualified `HOST/PATH:TAG`. `repo_digests`: `HOST/PATH@sha256:…` of the index
    or manifest that the registry served. `size_bytes`: the bytes that the image takes in the store:
    its blobs, and either its unpacked layers, or its layers' tars and its EROFS index. `user`: as
    in the image's configuration.
    """

    id: str
    repo_tags: list[str]
    repo_digests: list[str]
    size_bytes: int
    user: str = ""
    pinned: bool = False

    @property
    def uid(self) -> int | None:
        """Return the uid in `user` (`1002`, `1003:1004`); None when `user` is a name, empty, or a
        number above HIGHEST_ID."""
        text = self.user.partition(":")[0]
        # isascii(), because str.isdigit() is true of "²", which int() refuses.
        if not (text.isascii() and text.isdigit() and len(text) <= 10):
            return None
        return int(text) if int(text) <= HIGHEST_ID else None

    @property
    def username(self) -> str:
        """Return the user name in `user` (`www-data`, `www-data:adm`), "" when `uid` has a number.
        A number above HIGHEST_ID is returned as a name, because kubelet assumes that an image with
        neither uid nor name runs as root."""
        return "" if self.uid is not None else self.user.partition(":")[0]


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The number of images in the store, their bytes and inodes on disk, and the number of running
    pulls."""

    images: int
    size_bytes: int
    inodes: int
    pulls: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull or push is. `stage`: resolving, fetching, done for a pull; compressing,
    sending, done for a push. `total_bytes`: for a pull, the compressed layers that must be
    downloaded; for a push, all layers and the configuration. `fetched_bytes`: how many of these
    bytes have been downloaded (pull) or are in the registry (push)."""

    reference: str
    stage: str
    fetched_bytes: int = 0
    total_bytes: int = 0
