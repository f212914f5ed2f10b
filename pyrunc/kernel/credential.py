"""Who we are to the rest of the machine: root of it, root of a user namespace only, or an ordinary
user.

Source: user_namespaces(7). The initial user namespace is known by its inode number; a map alone
says nothing, for a nested one may map everything to itself.
"""

from __future__ import annotations

import os

INITIAL_USER_NAMESPACE = 0xEFFFFFFD  # PROC_USER_INIT_INO, include/linux/proc_ns.h


def in_user_namespace() -> bool:
    """Whether our user namespace is another than the machine's first."""
    return os.stat("/proc/self/ns/user").st_ino != INITIAL_USER_NAMESPACE


def is_machine_root() -> bool:
    """Whether we are root, and not of a user namespace only."""
    return os.geteuid() == 0 and not in_user_namespace()


def outer_uid() -> int:
    """Our effective user id as the parent of our user namespace sees it: who D-Bus, and a file's
    owner field, say we are."""
    uid = os.geteuid()
    with open("/proc/self/uid_map", "rb", buffering=0) as file:
        for line in (file.readall() or b"").splitlines():
            first, outside, count = map(int, line.split())
            if first <= uid < first + count:
                return outside + uid - first
    return uid


def become_root() -> None:
    """All user and group ids 0 of our user namespace. Raises OSError."""
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
