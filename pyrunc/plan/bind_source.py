"""Facts about the source of a bind mount on the host, for plans."""

from __future__ import annotations

from pyrunc.records import Record


class BindSource(Record):
    """The source of a bind mount. `path`: its real path; `is_our_root`: it is the root directory of
    our process."""

    path: str
    is_directory: bool
    is_our_root: bool = False

    @property
    def is_in_every_namespace(self) -> bool:
        """Return whether the container's process, in a copy of our mount namespace, can open the
        source by its path and bind it. False for:

        - a pipe, which has no path
        - paths below /proc, where the process sees other files than we do
        - our own root directory: the process has mounted the container's root there, and would bind
          that as well
        """
        return (
            self.path.startswith("/")
            and not self.path.startswith("/proc/")
            and not self.is_our_root
        )
