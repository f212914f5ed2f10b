"""Mounts a FUSE file system with one file, which a thread of the test serves. It counts its
requests, and can stop answering like an NFS server that is gone. Source: Linux,
include/uapi/linux/fuse.h."""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
import threading
from pathlib import Path
from typing import Self

from pyrunc.kernel import mount as kernel_mount

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 14, 15, 17, 18
FLUSH = 25
INIT = 26
OPENDIR = 27
READDIR = 28
RELEASEDIR = 29
INTERRUPT = 36
DESTROY = 38
BATCH_FORGET = 42
UNANSWERED = (FORGET, INTERRUPT, DESTROY, BATCH_FORGET)
ROOT, FILE = 1, 2
NAME, CONTENT = b"file", b"mine\n"
REQUEST_BYTES = 1 << 17
MNT_DETACH = 2


class Volume:
    """A FUSE volume at `path` during the `with` block. It has no cache, so each lookup is a
    request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: list[int] = []
        self._looks_left: int | None = None
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.path.mkdir()
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other"
        kernel_mount.mount("volume", str(self.path), "fuse", 0, options)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.answer()
        subprocess.run(["umount", "--lazy", self.path], check=True)
        self._thread.join(30)
        os.close(self._device)
        self.path.rmdir()

    def hang(self, after_looks: int = 0) -> None:
        """Stop answering after `after_looks` more lookups."""
        with self._lock:
            self._looks_left = after_looks
            self.requests.clear()

    def answer(self) -> None:
        """Answer requests again, beginning with those that wait."""
        with self._lock:
            self._looks_left = None
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                self._reply(request)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for an answer."""
        return len(self._waiting)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, REQUEST_BYTES)
            except OSError:
                return  # unmounted
            with self._lock:
                self._take(request)

    def _take(self, request: bytes) -> None:
        operation = struct.unpack_from("<I", request, 4)[0]
        if operation in UNANSWERED:
            return
        self.requests.append(operation)
        if self._looks_left is None or operation == INIT:
            self._reply(request)
        elif operation in (GETATTR, LOOKUP) and self._looks_left:
            self._looks_left -= 1
            self._reply(request)
        else:
            self._waiting.append(request)

    def _reply(self, request: bytes) -> None:
        _, operation, unique, node = struct.unpack_from("<IIQQ", request)
        body = _answer(operation, node, request[40:])
        error = -body if isinstance(body, int) else 0
        content = b"" if isinstance(body, int) else body
        try:
            os.write(self._device, struct.pack("<IiQ", 16 + len(content), error, unique) + content)
        except FileNotFoundError:
            pass  # the caller was killed


def _answer(operation: int, node: int, body: bytes) -> bytes | int:
    """Return the content of a reply, or an errno."""
    if operation == INIT:
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 16, 12, 4096, 1, 0, 0, 0)
    if operation == GETATTR:
        return struct.pack("<QII", 0, 0, 0) + _attributes(node)
    if operation == LOOKUP:
        return (
            struct.pack("<QQQQII", FILE, 0, 0, 0, 0, 0) + _attributes(FILE)
            if body == NAME + b"\0"
            else errno.ENOENT
        )
    if operation in (OPEN, OPENDIR):
        return struct.pack("<QII", 0, 0, 0)
    if operation == READ:
        return CONTENT[struct.unpack_from("<QQ", body)[1] :]
    if operation == STATFS:
        return bytes(80)
    return b"" if operation in (READDIR, RELEASE, RELEASEDIR, FLUSH) else errno.ENOSYS


def _attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o644
    size = 0 if node == ROOT else len(CONTENT)
    return struct.pack("<6Q10I", node, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
