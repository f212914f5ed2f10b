"""systemd's descriptor store (sd_notify(3) FDSTORE=1, FileDescriptorStoreMax= of the unit):
descriptors that outlive this process.

The manager keeps what it is given under a name, and hands it to the next process of the unit
(sd_listen_fds(3)). It answers nothing: without a manager, or where its store is full, the next
process gets less.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping

from cri_server.systemd.notify import tell

log = logging.getLogger(__name__)

FIRST_FD = 3  # SD_LISTEN_FDS_START
# of characters, none of them a control character or ':' (fdname_is_valid of systemd)
NAME_LIMIT = 255


class DescriptorStore:
    """What the manager keeps for us. Thread-safe, as `take` is called once."""

    def __init__(self, received: Mapping[str, int] | None = None) -> None:
        """`received`: as `receive` answers."""
        self._received = dict(received or {})

    def take(self) -> dict[str, int]:
        """What an earlier process of the unit has put, by its names. The caller closes it, and
        removes what is of no use any more."""
        taken, self._received = self._received, {}
        return taken

    def put(self, name: str, fd: int) -> None:
        """Give the manager a copy of this descriptor, which it keeps until `remove`. FDPOLL=0: also
        one that could be polled, and then would be dropped once it has hung up."""
        if len(name) > NAME_LIMIT or ":" in name or not (name.isascii() and name.isprintable()):
            raise ValueError(f"{name!r} is no name of a stored descriptor")
        tell(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [fd])

    def remove(self, name: str) -> None:
        """The manager closes its copy; fine when it has none."""
        tell(f"FDSTOREREMOVE=1\nFDNAME={name}")


def receive(environment: MutableMapping[str, str]) -> dict[str, int]:
    """The descriptors that the manager has passed to this process, by their names; of several with
    one name the first. The variables (LISTEN_PID, LISTEN_FDS, LISTEN_FDNAMES) are taken out of
    `environment`, and what is executed from now on does not inherit the descriptors. Call it before
    anything else opens files."""
    pid, count, names = (
        environment.pop(f"LISTEN_{word}", "") for word in ("PID", "FDS", "FDNAMES")
    )
    if pid != str(os.getpid()):
        return {}
    if not count.isdecimal():
        log.warning("LISTEN_FDS=%s is no number", count)
        return {}
    found: dict[str, int] = {}
    given = names.split(":") if names else []
    for fd in range(FIRST_FD, FIRST_FD + int(count)):
        name = given[fd - FIRST_FD] if fd - FIRST_FD < len(given) else "unknown"
        try:
            os.set_inheritable(fd, False)
        except OSError as error:
            log.warning("LISTEN_FDS: descriptor %d, %s: %s", fd, name, error)
            break
        if name in found:
            os.close(fd)
        else:
            found[name] = fd
    return found
