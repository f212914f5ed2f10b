"""Empties systemd's descriptor store (sd_notify(3) FDSTORE=1; FileDescriptorStoreMax= of the unit).
Early builds, which had no keeper, stored the mounts of images there.

This file, its uses and its tests can be deleted when no node is upgraded from such a build any
more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

from cri_server.systemd.notify import send

log = logging.getLogger(__name__)

FIRST_FD = 3  # SD_LISTEN_FDS_START


def remove(name: str) -> None:
    """Have systemd close the stored descriptors with the name `name`."""
    send(f"FDSTOREREMOVE=1\nFDNAME={name}")


def receive(environment: MutableMapping[str, str]) -> dict[str, int]:
    """Return the descriptors that systemd has passed to this process, by name. If several have the
    same name, close all but the first of them.

    Removes LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES from `environment`, and makes the descriptors
    close-on-exec. Call it before any file is opened.
    """
    pid, count, names = (
        environment.pop(f"LISTEN_{word}", "") for word in ("PID", "FDS", "FDNAMES")
    )
    # The variables are inherited, and may be meant for a parent (sd_listen_fds(3)).
    if pid != str(os.getpid()):
        return {}
    if not count.isdecimal():
        log.warning("LISTEN_FDS=%s is not a number", count)
        return {}
    received: dict[str, int] = {}
    fd_names = names.split(":") if names else []
    for fd in range(FIRST_FD, FIRST_FD + int(count)):
        name = fd_names[fd - FIRST_FD] if fd - FIRST_FD < len(fd_names) else "unknown"
        try:
            # systemd passes the descriptors inheritable: the zygote and all its children would hold
            # them.
            os.set_inheritable(fd, False)
        except OSError as error:
            log.warning("LISTEN_FDS: cannot take over descriptor %d (%s): %s", fd, name, error)
            break
        # The manager stores several descriptors of one name (sd_notify(3), FDNAME=).
        if name in received:
            os.close(fd)
        else:
            received[name] = fd
    return received
