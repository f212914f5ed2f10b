"""Makes images for tests, and archives of images in the cache folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from cri_server.images.archives import build
from cri_server.images.archives.build import BuiltImage, LayerFile
from tests.support import toolchain

PAUSE = Path(__file__).parents[2] / "pyrunc/native/pause"


def made_once(name: str, recipe: str, make: Callable[[], Mapping[str, BuiltImage]]) -> Path:
    """Return a docker-archive of the images that `make` returns (name -> image). The archive,
    called `name`-…, is made once for each `recipe`."""
    key = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    path = toolchain.cache() / "images" / f"{name}-{key}.tar"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(build.docker_archive(make()))
        temporary.rename(path)
    return path


def pause(**config: object) -> BuiltImage:
    """Return an image with the project's pause program."""
    files = {"pause": LayerFile(PAUSE.read_bytes(), 0o755)}
    return build.image([build.layer(files)], {"Entrypoint": ["/pause"], **config})


def of_program(program: Path, place: str, **config: object) -> BuiltImage:
    """Return an image with one static program at `place`, and a /tmp for files that it writes."""
    files = {place: LayerFile(program.read_bytes(), 0o755), "tmp": build.directory(0o1777)}
    return build.image([build.layer(files)], config)


def with_files(base: BuiltImage, files: build.Files, **config: object) -> BuiltImage:
    """Return `base` with a layer of `files`, if there are any. Its command is that of `config`, by
    default a shell."""
    layers = [*base.layers, build.layer(files)] if files else base.layers
    return build.image(layers, {"Cmd": ["sh"], **config})


def busybox(name: str = build.BUSYBOX_NAME) -> Path:
    """Return a docker-archive of the image `name`, which has the machine's static busybox. The
    archive is made once."""
    built = build.busybox()
    key = hashlib.sha256(f"{built.id} {name}".encode()).hexdigest()[:12]
    path = toolchain.cache() / "images" / f"busybox-{key}.tar"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        build.busybox_archive(path, name)
    return path
