"""Plans the operations for masked and read-only paths. Read-only paths come first, so that a masked
path beneath one of them stays masked."""

from __future__ import annotations

from pyrunc.kernel.path import clean
from pyrunc.plan.model import MaskPath, ReadonlyPath

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.plan.model import Op
    from pyrunc.spec.model import Linux


def operations(linux: Linux, clones_detached: bool) -> list[Op]:
    """Plan one operation for each distinct masked or read-only path. `clones_detached`: as in
    `HostFacts`."""
    ops: list[Op] = [ReadonlyPath(path) for path in dict.fromkeys(map(clean, linux.readonly_paths))]
    ops += [
        MaskPath(path, clones_detached) for path in dict.fromkeys(map(clean, linux.masked_paths))
    ]
    return ops
