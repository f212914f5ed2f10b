"""`list`: reports all containers below a root with their status. A container that is removed at the
same time is left out."""

from __future__ import annotations

from pyrunc.container import state as states
from pyrunc.container import status
from pyrunc.errors import Error, NotFound

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def containers(root: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return two lists about the containers below `root`: the objects that `pyrunc state` prints,
    and a line of text for each container that cannot be read. Raises NotFound if `root` does not
    exist."""
    reports, broken = [], []
    try:
        names = states.ids(root)
    except FileNotFoundError:
        raise NotFound(f"the root {root!r} does not exist") from None
    for name in names:
        try:
            reports.append(status.report(states.find(root, name)))
        # Deleted between the list of names and this look.
        except NotFound:
            continue
        except (Error, ValueError, OSError) as error:
            broken.append(f"container {name}: {error}")
    return reports, broken
