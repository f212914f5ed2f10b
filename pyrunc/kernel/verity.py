"""fs-verity (fs-verity.rst, linux/fsverity.h): seals a file for good; the kernel then checks each
block when it is read.

A sealed file cannot be written any more, only removed; reading a block that differs from what was
sealed fails with EIO. Its digest stands for the whole content. ext4, f2fs and btrfs have it, where
the kernel (CONFIG_FS_VERITY) and the file system (ext4: the feature `verity`) do.
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
    """Seal a file with SHA-256 (FS_IOC_ENABLE_VERITY), which must be open for reading and nowhere
    for writing; reads the whole file. False without fs-verity, or not for this file system's block
    size. True when it is sealed already. Raises KernelError."""
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
    """Return `sha256:HEX` of a sealed file (FS_IOC_MEASURE_VERITY), for which the kernel reads
    nothing; empty for an unsealed one. Raises KernelError."""
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
