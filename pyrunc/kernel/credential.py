"""Finds out which user runs this process: the machine's root, root of a user namespace only, or an
ordinary user.

Source: user_namespaces(7). The initial user namespace is recognised by its inode number. Its id map
would prove nothing, because a nested namespace may map each id to itself.
"""

from __future__ import annotations

import os

from pyrunc.kernel.fd import read_file

INITIAL_USER_NAMESPACE = 0xEFFFFFFD  # PROC_USER_INIT_INO, include/linux/proc_ns.h


def in_user_namespace() -> bool:
    """Return whether this process is in a user namespace other than the initial one."""
    return os.stat("/proc/self/ns/user").st_ino != INITIAL_USER_NAMESPACE


def is_machine_root() -> bool:
    """Return whether this process has the effective uid 0 in the initial user namespace."""
    return os.geteuid() == 0 and not in_user_namespace()


def outer_uid() -> int:
    """Return our effective user id in the parent of our user namespace. D-Bus sees our socket with
    this id, and the files that we make belong to this id."""
    uid = os.geteuid()
    for first, outside, count in id_map("/proc/self/uid_map"):
        if first <= uid < first + count:
            return outside + uid - first
    return uid


def id_map(path: str) -> list[list[int]]:
    """Read a map of a user namespace (`/proc/PID/uid_map` or `gid_map`). Each row is [first id
    inside, first id outside, number of ids]. Raises OSError."""
    return [[int(word) for word in line.split()] for line in read_file(path).splitlines()]


def become_root() -> None:
    """Set all our user and group ids to 0 of our user namespace. Raises OSError."""
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
