"""Computes the extended attributes and the mode that a file has after setxattr(2): attributes that
Linux refuses are dropped, an ACL changes the mode.

Source: Linux, security/commoncap.c (cap_convert_nscap) and fs/posix_acl.c (posix_acl_from_xattr,
posix_acl_valid, posix_acl_equiv_mode).
"""

from __future__ import annotations

import stat
from struct import Struct

from cri_server.images.layers.inflate import BadLayer

VALUE_LIMIT_BYTES = 0xFFFF  # an entry's length has 16 bits; Linux' XATTR_SIZE_MAX is one more
NAME_LIMIT_BYTES = 255
ACL_ACCESS = b"system.posix_acl_access"
ACL_DEFAULT = b"system.posix_acl_default"
CAPABILITY = b"security.capability"
_CAPABILITY_SIZES = {0x02000000: 20, 0x03000000: 24}  # revision -> size
_ACL_VERSION = 2
_ACL_ENTRY = Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20


def effective_attributes(
    mode: int, requested: dict[bytes, bytes]
) -> tuple[int, dict[bytes, bytes]]:
    """Return the mode and the attributes that a file has after the `requested` attributes were set
    with setxattr(2). `mode`: the file's mode before. Raises BadLayer for an attribute that is too
    long."""
    effective = {}
    for name, value in requested.items():
        if len(name) > NAME_LIMIT_BYTES:
            raise BadLayer(
                f"an extended attribute has a name of more than {NAME_LIMIT_BYTES} bytes"
            )
        if len(value) > VALUE_LIMIT_BYTES:
            raise BadLayer(
                f"an extended attribute has a value of more than {VALUE_LIMIT_BYTES} bytes"
            )
        if name == ACL_ACCESS:
            mode, acl = _access_list(mode, value)
            if acl:
                effective[name] = value
        elif name == ACL_DEFAULT:
            if stat.S_ISDIR(mode) and _entries(value):
                effective[name] = value
        elif name == CAPABILITY:
            if _CAPABILITY_SIZES.get(int.from_bytes(value[:4], "little") & 0xFF000000) == len(
                value
            ):
                effective[name] = value
        # user.* attributes exist on files and directories only (xattr(7)).
        elif name != b"user." and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            effective[name] = value
    return mode, effective


def _access_list(mode: int, value: bytes) -> tuple[int, bool]:
    """Return the mode that an ACL gives the file, and whether the ACL has more entries than a mode
    can express."""
    entries = _entries(value)
    if not entries or stat.S_ISLNK(mode):
        return mode, False
    rights = {tag: perm for tag, perm, _ in entries}
    group = rights.get(_MASK, rights[_GROUP_OBJ])
    bits = rights[_USER_OBJ] << 6 | group << 3 | rights[_OTHER]
    return mode & ~0o777 | bits, len(entries) > 3


def _entries(value: bytes) -> list[tuple[int, int, int]]:
    """Parse an ACL into (tag, rights, id) entries. Return an empty list for a malformed ACL, which
    Linux refuses."""
    if (
        len(value) < 4
        or int.from_bytes(value[:4], "little") != _ACL_VERSION
        or (len(value) - 4) % 8
    ):
        return []
    entries = list(_ACL_ENTRY.iter_unpack(value[4:]))
    tags = [tag for tag, _, _ in entries]
    named = _USER in tags or _GROUP in tags
    single = (_USER_OBJ, _GROUP_OBJ, _OTHER)
    fine = (
        tags == sorted(tags)
        and all(tags.count(tag) == 1 for tag in single)
        and tags.count(_MASK) <= 1
        and (not named or _MASK in tags)
        and set(tags) <= {*single, _USER, _GROUP, _MASK}
        and all(perm <= 7 for _, perm, _ in entries)
        and all(owner != 0xFFFFFFFF for tag, _, owner in entries if tag in (_USER, _GROUP))
    )
    return entries if fine else []
