"""The image service's interface; being written: every method that is not there yet raises Unsupported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cri_server.images.model import Auth, FilesystemUsage, Image, ImageConfig, Progress, Rootfs
from pyrunc.errors import Unsupported
from pyrunc.zygote.client import Zygote

__all__ = ["Auth", "FilesystemUsage", "Image", "ImageConfig", "ImageService", "Progress", "Rootfs"]


class ImageService:
    """Images below `root` (an OCI image layout beside unpacked layers).

    `certs_dir`: folder of HOST/hosts.toml, None for none. `pinned`: references that status and list mark as pinned.
    `errands`: the zygote that unpacks layers (it should preload `cri_server.images.unpack`); None unpacks in threads.
    `in_use(image_id) -> names of containers that use it`: set by the server; remove refuses while it answers any.
    """

    def __init__(
        self,
        root: Path,
        certs_dir: Path | None = None,
        pinned: Sequence[str] = (),
        errands: Zygote | None = None,
        *,
        no_progress_timeout_s: float = 300.0,
        in_use: Callable[[str], Sequence[str]] = lambda image_id: (),
    ) -> None:
        self.in_use = in_use
        raise Unsupported("images are not built yet")

    async def start(self) -> None:
        """Make the folders, read what is there, drop what no image needs. Call once, before anything else."""
        raise Unsupported("images are not built yet")

    async def close(self) -> None:
        """Cancel running pulls and wait for them."""

    async def pull(
        self, reference: str, auth: Auth | None = None, progress: Callable[[Progress], None] | None = None
    ) -> str:
        """Fetch and unpack; the image id. Equal concurrent pulls are one.

        Raises InvalidArgument (reference), NotFound, PeerError (message begins with `RegistryUnavailable` when no host of
        the registry answered usefully), DeadlineExceeded (no progress), ResourceExhausted, Unsupported.
        """
        raise Unsupported("images are not built yet")

    async def status(self, reference: str) -> Image | None:
        """The image by id (with or without `sha256:`, unique prefix), tag or digest; None if absent."""
        raise Unsupported("images are not built yet")

    async def list(self, reference: str | None = None) -> list[Image]:
        """All images, or the one that `reference` means."""
        raise Unsupported("images are not built yet")

    async def remove(self, reference: str) -> None:
        """By id: the image with all names. By name: only that name, unless it is the last. Absent is fine.

        Raises WrongState naming the containers that use the image.
        """
        raise Unsupported("images are not built yet")

    async def rootfs(self, image_id: str) -> Rootfs:
        """The unpacked layers and the configuration. NotFound if there is no such image."""
        raise Unsupported("images are not built yet")

    async def load(self, path: Path, name: str | None = None) -> list[Image]:
        """Import a docker-archive or OCI archive (tar, plain or compressed); all images in it, their tags kept.

        `name` is given to an archive's only image that has no name of its own.
        """
        raise Unsupported("images are not built yet")

    async def fs_info(self) -> FilesystemUsage:
        """The store's usage, from a cached count."""
        raise Unsupported("images are not built yet")
