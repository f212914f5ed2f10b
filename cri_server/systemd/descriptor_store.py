"""systemd's descriptor store, which holds descriptors across restarts of the server (sd_notify(3)
FDSTORE=1; FileDescriptorStoreMax= of the unit).

The manager stores descriptors by name, and passes them to the unit's next process
(sd_listen_fds(3)). It sends no reply: without a manager, or when the store is full, the next
process does not get them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping

from cri_server.systemd.notify import tell

log = logging.getLogger(__name__)

FIRST_FD = 3  # SD_LISTEN_FDS_START
# Characters of a name, none of them a control character or ':' (fdname_is_valid of systemd).
NAME_LIMIT = 255


class DescriptorStore:
    """The descriptors that the manager stores for this unit. Thread-safe, as `take` is called
    once."""

    def __init__(self, received: Mapping[str, int] | None = None) -> None:
        """`received`: the result of `receive`."""
        self._received = dict(received or {})

    def take(self) -> dict[str, int]:
        """Return the descriptors stored by earlier processes, by name. The caller closes them, and
        removes unused ones from the store."""
        taken, self._received = self._received, {}
        return taken

    def put(self, name: str, fd: int) -> None:
        """Store a copy of the descriptor until `remove`. Raises ValueError for an invalid name."""
        if len(name) > NAME_LIMIT or ":" in name or not (name.isascii() and name.isprintable()):
            raise ValueError(f"{name!r} is not a valid name of a stored descriptor")
        # FDPOLL=0, because by default the manager drops a pollable descriptor on EPOLLHUP
        # (sd_notify(3)).
        tell(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [fd])

    def remove(self, name: str) -> None:
        """Remove the descriptor from the store, if it is there."""
        tell(f"FDSTOREREMOVE=1\nFDNAME={name}")


def receive(environment: MutableMapping[str, str]) -> dict[str, int]:
    """Return the descriptors that the manager has passed, by name; of equal names the first.

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
            # The manager passes them inheritable; the zygotes and all that they start would hold
            # them.
            os.set_inheritable(fd, False)
        except OSError as error:
            log.warning("LISTEN_FDS: descriptor %d, %s: %s", fd, name, error)
            break
        # The manager stores several descriptors of one name (sd_notify(3), FDNAME=).
        if name in received:
            os.close(fd)
        else:
            received[name] = fd
    return received
