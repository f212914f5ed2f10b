"""The constants of open(2), openat2(2), statx(2), fcntl(2), memfd_create(2) and the *at calls, as
far as the constants are equal on all architectures.

`O_DIRECTORY` and `O_NOFOLLOW` differ between x86-64 and arm64: `abi.arch` has them.
"""

O_RDONLY = 0
O_WRONLY = 0o1
O_RDWR = 0o2
O_CREAT = 0o100
O_EXCL = 0o200
O_NOCTTY = 0o400
O_CLOEXEC = 0o2000000
O_PATH = 0o10000000

# openat2(2); `struct open_how` is flags, mode, resolve: three 64-bit words
RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10
OPEN_HOW_SIZE = 24

AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
AT_EACCESS = 0x200
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
AT_EXECVE_CHECK = 0x10000

F_OK = 0
X_OK = 1

F_SETFD = 2
F_SETOWN = 8
F_SETOWN_EX = 15
F_ADD_SEALS = 1033
FD_CLOEXEC = 1
F_SEAL_SEAL = 0x1
F_SEAL_SHRINK = 0x2
F_SEAL_GROW = 0x4
F_SEAL_WRITE = 0x8
F_SEAL_FUTURE_WRITE = 0x10
F_SEAL_EXEC = 0x20

MFD_CLOEXEC = 0x1
MFD_ALLOW_SEALING = 0x2
MFD_NOEXEC_SEAL = 0x8
MFD_EXEC = 0x10

CLOSE_RANGE_CLOEXEC = 0x4

# statx(2): the mask of fields, the buffer's size, and each field's offset and width in bytes
STATX_TYPE = 0x1
STATX_BASIC_STATS = 0x7FF
STATX_SIZE = 256
STATX_FIELDS = {
    "mask": (0, 4),
    "nlink": (16, 4),
    "uid": (20, 4),
    "gid": (24, 4),
    "mode": (28, 2),
    "ino": (32, 8),
    "size": (40, 8),
    "rdev_major": (128, 4),
    "rdev_minor": (132, 4),
    "dev_major": (136, 4),
    "dev_minor": (140, 4),
    "mnt_id": (144, 8),
}

S_IFMT = 0o170000
S_IFLNK = 0o120000
S_IFREG = 0o100000
S_IFBLK = 0o060000
S_IFDIR = 0o040000
S_IFCHR = 0o020000
S_IFIFO = 0o010000

SYNC_FILE_RANGE_WRITE = 2  # sync_file_range(2)
