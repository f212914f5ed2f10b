"""Copies attributes from lower layers to parent directories that a layer's tar does not describe
(the tar has `a/b` but not `a`). Overlayfs shows the attributes of the topmost layer that has the
directory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from cri_server.images.layers.trees import DirectoryWalker, depth_first_key, is_opaque
from cri_server.images.layers.walk_budget import WalkBudget
from pyrunc.errors import KernelError
from pyrunc.kernel.fd import closing_fd

FREE_STEPS = 1 << 14
# In real images fewer layers than this have a directory's parent but lack the directory.
STEPS_PER_DIRECTORY = 128


def inherit_attributes(tree: Path, implicit: Iterable[str], below: Sequence[Path]) -> None:
    """Copy owner, mode, times and extended attributes to the directories `implicit` of the layer
    `tree`, from the same directories of the layers `below`. `implicit`: paths relative to the root,
    which is "". `below`: the lower layers, top first. Blocking.

    Raises KernelError, OSError, and BadLayer when the search takes more steps than FREE_STEPS plus
    STEPS_PER_DIRECTORY for each directory.
    """
    paths = sorted(map(os.fsencode, implicit), key=depth_first_key)
    if not paths or not below:
        return
    with ExitStack() as stack:
        top, *lowers = [_walker(path, stack) for path in (tree, *below)]
        levels = _Levels([top, *lowers], WalkBudget(FREE_STEPS, STEPS_PER_DIRECTORY, len(paths)))
        for path in paths:
            # The walk goes from each directory to the next. From the root each time, one name of
            # 2,000 components would take 2 million steps, in a thread of the server.
            visible = levels.at(path)
            if visible[:1] == [top] and len(visible) > 1:
                _copy_directory(visible[1].open(path), top.open(path))


def _walker(tree: Path, stack: ExitStack) -> DirectoryWalker:
    """Return a walker of a layer's directories. `stack` closes the walker."""
    with closing_fd(os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        return stack.enter_context(DirectoryWalker(root))


class _Levels:
    """Finds the layers whose directory is visible in the overlay: no whiteout, file or opaque
    directory of a higher layer hides it. Caches the result for each directory on the current
    path."""

    def __init__(self, trees: list[DirectoryWalker], budget: WalkBudget) -> None:
        self._budget = budget
        self._levels: list[tuple[bytes, list[DirectoryWalker]]] = [(b"", trees)]

    def at(self, path: bytes) -> list[DirectoryWalker]:
        """Return the layers, top first, whose directory `path` is visible in the overlay. Calls
        must come in the order of `depth_first_key`. Raises KernelError, and
        BadLayer after too many steps over directories."""
        levels = self._levels
        while not (levels[-1][0] in (b"", path) or path.startswith(levels[-1][0] + b"/")):
            levels.pop()
        place, trees = levels[-1]
        for name in filter(None, path[len(place) :].split(b"/")):
            place = place + b"/" + name if place else name
            trees = self._showing(place, trees)
            levels.append((place, trees))
        return trees

    def _showing(self, path: bytes, trees: list[DirectoryWalker]) -> list[DirectoryWalker]:
        self._budget.charge(len(trees))
        showing = []
        for tree in trees:
            try:
                directory = tree.open(path)
            except KernelError as error:
                # The layer does not have the directory, so those below it may show theirs.
                if error.errno == errno.ENOENT:
                    continue
                break  # a file or a whiteout hides what is below
            showing.append(tree)
            if is_opaque(directory):
                break
        return showing


def _copy_directory(source: int, target: int) -> None:
    """Copy owner, mode, time and extended attributes from the directory `source` to `target`. Both
    are O_PATH descriptors."""
    status, names = os.fstat(source), (f"/proc/self/fd/{source}", f"/proc/self/fd/{target}")
    os.chown(names[1], status.st_uid, status.st_gid)
    os.chmod(names[1], stat.S_IMODE(status.st_mode))
    for name in os.listxattr(names[0]):
        # overlayfs' own attributes say how this layer is merged with those below it.
        if not name.startswith("trusted."):
            os.setxattr(names[1], name, os.getxattr(names[0], name))
    os.utime(names[1], ns=(status.st_mtime_ns, status.st_mtime_ns))
