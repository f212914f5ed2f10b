"""fs-verity (fs-verity.rst, linux/fsverity.h): seals a file for good. The kernel then checks each
block when it is read.

A sealed file can be removed, but never written. Reading a block that differs from the sealed
content fails with EIO. The digest stands for the file's whole content. ext4 (with its feature
`verity`), f2fs and btrfs support fs-verity if the kernel has CONFIG_FS_VERITY.
"""

from __future__ import annotations

import errno
import fcntl
from struct import Struct

from pyrunc.abi.ioctl import FS_IOC_ENABLE_VERITY, FS_IOC_MEASURE_VERITY
from pyrunc.errors import KernelError

SHA256, BLOCK_BYTES = 1, 4096
# version, algorithm, block size, salt size and pointer, signature size, reserved, pointer
_ENABLE = Struct("=IIIIQIIQ88x")
_DIGEST = Struct("=HH")  # algorithm, size; the digest follows
_DIGEST_LIMIT_BYTES = 64
_NONE_HERE = (errno.ENOTTY, errno.EOPNOTSUPP, errno.ENODATA)


def enable(fd: int) -> bool:
    """Seal a file with SHA-256 (FS_IOC_ENABLE_VERITY); the kernel reads the whole file. `fd` must
    be open for reading, and no process may have the file open for writing.

    Returns True when the file is sealed, also if it was sealed before. Returns False if the file
    system has no fs-verity, or the kernel does not support blocks of `BLOCK_BYTES` there. Raises
    KernelError for all other failures.
    """
    try:
        fcntl.ioctl(fd, FS_IOC_ENABLE_VERITY, _ENABLE.pack(1, SHA256, BLOCK_BYTES, 0, 0, 0, 0, 0))
    except OSError as error:
        # EINVAL: before Linux 6.3 a block must have the size of a page, which can be 64 KiB on
        # arm64 (fsverity.rst).
        if error.errno in (*_NONE_HERE, errno.EINVAL):
            return False
        if error.errno != errno.EEXIST:
            raise KernelError.of(error, "ioctl", f"FS_IOC_ENABLE_VERITY of fd {fd}") from None
    return True


def measure(fd: int) -> str:
    """Return the digest of a sealed file as `sha256:HEX`, without reading the file
    (FS_IOC_MEASURE_VERITY); empty if the file is not sealed. Raises KernelError."""
    try:
        answer = fcntl.ioctl(
            fd,
            FS_IOC_MEASURE_VERITY,
            _DIGEST.pack(0, _DIGEST_LIMIT_BYTES) + bytes(_DIGEST_LIMIT_BYTES),
        )
    except OSError as error:
        if error.errno in _NONE_HERE:
            return ""
        raise KernelError.of(error, "ioctl", f"FS_IOC_MEASURE_VERITY of fd {fd}") from None
    algorithm, size = _DIGEST.unpack_from(answer)
    name = "sha256" if algorithm == SHA256 else f"algorithm-{algorithm}"
    return f"{name}:{answer[_DIGEST.size : _DIGEST.size + size].hex()}"
