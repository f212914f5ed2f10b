"""Builds small images from files for the demo and the tests, such as an image of the machine's
busybox. Equal input gives equal bytes. An image is a list of layers; a layer maps names to
files."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cri_server.images.formats import manifest as manifests
from cri_server.images.formats.digests import digest_of, hex_of
from pyrunc.errors import Error, NotFound

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BUSYBOX = Path("/bin/busybox")
BUSYBOX_NAME = "docker.io/library/busybox:latest"
_TARGET_OF_ALL_APPLETS = "busybox"
_GROUPS = """\
root:x:0:
daemon:x:1:
bin:x:2:
www-data:x:33:
users:x:100:
nogroup:x:65534:
"""
_USERS = """\
root:x:0:0:root:/root:/bin/sh
daemon:x:1:1:daemon:/usr/sbin:/bin/false
bin:x:2:2:bin:/bin:/bin/false
www-data:x:33:33:www-data:/var/www:/bin/false
nobody:x:65534:65534:nobody:/home:/bin/false
"""


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A file of any kind in a layer. `kind`: a tarfile type. `content`: the bytes of a regular
    file. `link`: the target of a link."""

    content: bytes = b""
    mode: int = 0o644
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    uid: int = 0
    gid: int = 0
    device: tuple[int, int] = (0, 0)
    mtime: float = 0
    pax: Mapping[str, str] = field(default_factory=dict)


def directory(mode: int = 0o755, **more: Any) -> LayerFile:
    """Return the LayerFile of a directory with this mode. `more`: further fields of LayerFile."""
    return LayerFile(mode=mode, kind=tarfile.DIRTYPE, **more)


def symlink(target: str) -> LayerFile:
    """Return the LayerFile of a symbolic link to `target`."""
    return LayerFile(mode=0o777, kind=tarfile.SYMTYPE, link=target)


Files = Mapping[str, LayerFile | bytes | str]
"""Maps the name of a file to a LayerFile, or to the content of a regular file."""


def layer(files: Files, *, parents: bool = True) -> bytes:
    """Build a layer's tar. `parents`: also describe missing parent directories (0755, root)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        named = {name.strip("/") for name in files}
        described: set[str] = set()
        for name, value in files.items():
            parts = name.strip("/").split("/")
            for count in range(1, len(parts)) if parents else ():
                parent = "/".join(parts[:count])
                if parent not in named and parent not in described:
                    described.add(parent)
                    _add(tar, parent, directory())
            _add(tar, name, value if isinstance(value, LayerFile) else LayerFile(_bytes(value)))
    return buffer.getvalue()


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _add(tar: tarfile.TarFile, name: str, node: LayerFile) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.linkname = node.kind, node.mode, node.link
    member.uid, member.gid, member.mtime = node.uid, node.gid, node.mtime
    member.devmajor, member.devminor = node.device
    member.size = len(node.content)
    member.pax_headers = dict(node.pax)
    tar.addfile(member, io.BytesIO(node.content))


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image in memory. `layers`: the uncompressed tars; `config`: the configuration's JSON."""

    layers: tuple[bytes, ...]
    config: bytes

    @property
    def id(self) -> str:
        """The image id."""
        return digest_of(self.config)


def image(
    layers: Sequence[bytes], config: Mapping[str, Any] | None = None, **top: Any
) -> BuiltImage:
    """Build an image of `layers` for this machine. `config`: the object `config` of the image's
    configuration (Env, Cmd, …); without Env the image gets a default PATH. `top`: other keys of the
    configuration, which replace those of the same name."""
    platform = manifests.host_platform()
    document = {
        "architecture": platform.architecture,
        "os": platform.os,
        "config": {"Env": [PATH], **(config or {})},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(data) for data in layers]},
        **top,
    }
    # Sorted, so that equal images have one id.
    return BuiltImage(tuple(layers), json.dumps(document, sort_keys=True).encode())


def docker_archive(images: Mapping[str, BuiltImage]) -> bytes:
    """Build a `docker save` archive. `images`: the images by their names."""
    items: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    for name, built in images.items():
        config_name = f"{hex_of(built.id)}.json"
        names = [f"{hex_of(digest_of(data))}/layer.tar" for data in built.layers]
        files |= {config_name: built.config, **dict(zip(names, built.layers, strict=True))}
        items.append({"Config": config_name, "RepoTags": [name], "Layers": names})
    files["manifest.json"] = json.dumps(items).encode()
    return layer({name: LayerFile(data) for name, data in files.items()}, parents=False)


def busybox(program: Path = BUSYBOX) -> BuiltImage:
    """Build an image of the machine's static busybox with a shell as its command. It has links for
    all applets, and files such as /etc/passwd and /tmp.

    Raises NotFound if there is no busybox, Error if it does not run or is not static.
    """
    try:
        content = program.read_bytes()
    except OSError:
        raise NotFound(
            f"{program} cannot be read; install Debian's package busybox-static"
        ) from None
    # The name of the dynamic loader (PT_INTERP, elf(5)) lies near the beginning of the file.
    if b"/ld-linux" in content[:4096] or b"/ld-musl" in content[:4096]:
        raise Error(f"{program} is not static; Debian's package busybox-static has one that is")
    listing = subprocess.run([str(program), "--list"], capture_output=True, text=True, check=False)
    if listing.returncode:
        raise Error(f"{program} --list: exit code {listing.returncode}")
    files: dict[str, LayerFile | bytes | str] = {
        "bin": directory(),
        "bin/busybox": LayerFile(content, 0o755),
        "dev": directory(),
        "etc": directory(),
        "etc/group": _GROUPS,
        "etc/passwd": _USERS,
        "home": directory(uid=65534, gid=65534),
        "proc": directory(),
        "root": directory(0o700),
        "sys": directory(),
        "tmp": directory(0o1777),
        "usr": directory(),
        "usr/sbin": directory(uid=1, gid=1),
        "var": directory(),
        "var/spool": directory(),
        "var/www": directory(uid=33, gid=33),
    }
    for name in sorted(set(listing.stdout.split()) - {_TARGET_OF_ALL_APPLETS}):
        files[f"bin/{name}"] = symlink(_TARGET_OF_ALL_APPLETS)
    return image([layer(files)], {"Cmd": ["sh"]})


def busybox_archive(path: Path, name: str = BUSYBOX_NAME) -> Path:
    """Write the busybox image to `path` as a docker-archive, atomically; return the path."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(docker_archive({name: busybox()}))
    temporary.rename(path)
    return path
