"""What a plan needs to know about a bind's source on the host."""

from __future__ import annotations

from pyrunc.records import Record


class BindSource(Record):
    """The source of a bind. `path`: its real path; `is_our_root`: it is the directory that is
    our own `/`."""

    path: str
    is_directory: bool
    is_our_root: bool = False

    @property
    def is_in_every_namespace(self) -> bool:
        """Tell whether a process in a copy of our mounts can open the source by its path. A pipe
        has none, and /proc is another process's there. Our own `/` is covered there by the
        container's root, which would become part of the clone."""
        return (
            self.path.startswith("/")
            and not self.path.startswith("/proc/")
            and not self.is_our_root
        )
