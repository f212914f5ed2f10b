"""Files that are read back after a crash: written whole under a temporary name, then renamed; JSON ones carry a version.

A reader sees the old file or the new one, never a part (rename(2)). `durable` adds the fsync that a disk needs to keep the
promise over a power cut; the state directory is a tmpfs and does without.
"""

from __future__ import annotations

import os

from pyrunc import jsontext
from pyrunc.errors import Error, NotFound

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class DamagedRecord(Error):
    """A record cannot be read: not JSON, not an object, or written by a newer version."""

    kind = "internal"


def write_bytes(path: str, content: bytes, *, mode: int = 0o600, durable: bool = False) -> None:
    """Put `content` at `path` whole. Raises OSError, which names the file; the temporary one is gone then."""
    temporary = f"{path}.{os.getpid()}.tmp"
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode
    )
    try:
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:  # write(2) and fsync(2) know no name
            error.filename = path
        raise
    if durable:
        _sync_folder(os.path.dirname(path) or ".")


def write_json(
    path: str, value: dict[str, Any], *, version: int = 1, mode: int = 0o600, durable: bool = False
) -> None:
    """Put `value` at `path` as JSON with its `version`."""
    content = jsontext.dumps({"version": version, **value})
    write_bytes(path, content.encode("utf-8", "surrogateescape"), mode=mode, durable=durable)


def read_json(path: str, *, version: int = 1) -> dict[str, Any]:
    """The object at `path`. Raises NotFound, DamagedRecord (also for a version above `version`), OSError."""
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.read() or b""
    except FileNotFoundError:
        raise NotFound(f"no record at {path}") from None
    try:
        value = jsontext.loads(content)
    except ValueError as error:
        raise DamagedRecord(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DamagedRecord(f"{path}: not a JSON object")
    found = value.get("version")
    if not isinstance(found, int) or found > version:
        raise DamagedRecord(f"{path}: version {found!r} is not one of 1..{version}")
    return value


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
