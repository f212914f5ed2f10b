"""The files of an image on this machine, for `diff` and `image mount`."""

from __future__ import annotations

from cri_server.cli.connection.client import Client, UnsupportedCall
from cri_server.images.store.image_paths import ImagePaths


def open_image_tree(client: Client, image: str) -> int:
    """Return a descriptor of a new detached mount with the files of `image`.

    Raises ServerError, KernelError, OSError, NotFound if the node does not have the image,
    UnsupportedCall if the server does not report where the files are, and DamagedRecord if the
    image's EROFS index does not fit its layers."""
    files = client.image_info(image).get("files")
    places = ImagePaths.of(files) if isinstance(files, dict) else ImagePaths()
    if places.image is not None:
        from cri_server.images.store.mounts import open_image

        return open_image(places.image)
    if places.lower is None or places.place is None:
        raise UnsupportedCall("the server does not report where an image's files are")
    from pyrunc.compile.image_mount import open_layers

    # overlayfs needs at least two layers; `place` is an empty folder
    return open_layers([*places.lower, places.place])
