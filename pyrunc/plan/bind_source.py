"""Facts about the source of a bind mount on the host, for plans."""

from __future__ import annotations

from pyrunc.records import Record


class BindSource(Record):
    """The source of a bind mount: its real path, whether it is a directory, and whether it is the
    root directory of our own process."""

    path: str
    is_directory: bool
    is_our_root: bool = False

    @property
    def is_in_every_namespace(self) -> bool:
        """Tell whether a process in a copy of our mount namespace can open the source by its path.

        False for a pipe, which has no path; for paths below /proc, where the other process sees
        other files; and for our own root directory, because the clone would include the container's
        root, which is mounted there.
        """
        return (
            self.path.startswith("/")
            and not self.path.startswith("/proc/")
            and not self.is_our_root
        )
