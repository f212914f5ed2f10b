"""Everything a child will need is imported before the first fork, and its memory never written again.

The collector would write into every object's header and so copy each page in each child: it is run once, then the heap is
frozen (gc.freeze) and stays out of later collections. Measured: 0.4 to 0.5 MiB of private memory for an idle child.
"""

from __future__ import annotations

import gc
import sys

from pyrunc.errors import PeerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from pyrunc.ipc import Message


KEPT_FROM = 300
"""Descriptors that all children keep have numbers from here on, above those that are handed to one (`ipc.MOST_FDS` at most)."""

MAY_BE_MISSING = "pyrunc.accelerate."
"""Modules that somebody may have removed: nothing but time and memory depends on them."""

kept: list[int] = []
"""Those, in ascending order."""

_loaded: list[str] = []


def load(modules: Sequence[str]) -> None:
    """Import `modules`; of those that have it call `inherit(lowest)`, which sets what children inherit and returns descriptors
    that they all keep, and `rehearse()`; `freeze` calls their `frozen()` at last. Raises PeerError with the traceback's last line."""
    for module in modules:
        try:
            if not _imported(module):
                continue
            _loaded.append(module)
            inherit = getattr(sys.modules[module], "inherit", None)
            if inherit:
                kept.extend(inherit(KEPT_FROM))
                kept.sort()
            rehearse = getattr(sys.modules[module], "rehearse", None)
            if rehearse:
                rehearse()
        except Exception as error:
            sys.excepthook(*sys.exc_info())
            raise PeerError(f"importing {module}: {type(error).__name__}: {error}") from None


def _imported(module: str) -> bool:
    """Whether the module is there now; one of `MAY_BE_MISSING` may not be."""
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        if module.startswith(MAY_BE_MISSING) and module.startswith(error.name or "?"):
            return False
        raise
    return True


def freeze() -> None:
    """Collect once and take everything that lives out of the collector's sight."""
    gc.collect()
    gc.disable()
    try:
        from pyrunc.accelerate.immortal import make_immortal
    except ImportError:  # that folder may be removed
        pass
    else:
        make_immortal()
    gc.freeze()
    for module in _loaded:
        if frozen := getattr(sys.modules[module], "frozen", None):
            frozen()


def hook(function: str, name: str) -> Callable[[list[int]], Message] | None:
    """The function `name` beside `module:function`, if the module has one."""
    return getattr(sys.modules[function.partition(":")[0]], name, None)


def resolve(function: str) -> Callable[[Message, list[int]], Any]:
    """The function named `module:function`. Raises PeerError if there is none."""
    module, _, name = function.partition(":")
    if module not in sys.modules:
        load([module])
    found = getattr(sys.modules[module], name, None)
    if not callable(found):
        raise PeerError(f"{module} has no function {name!r}")
    return found  # type: ignore[no-any-return]
