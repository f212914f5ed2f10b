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

        A pipe has no path, and below /proc that process has other files. Our own root directory
        does not qualify: that process has mounted the container's root there, and a clone would
        include it.
        """
        return (
            self.path.startswith("/")
            and not self.path.startswith("/proc/")
            and not self.is_our_root
        )
