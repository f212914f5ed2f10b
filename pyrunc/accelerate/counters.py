"""What CPython counts in objects while it runs: references, calls of a function, tries of an instruction.

Nothing of it means anything in a fork for which an older value would do as well: these are the words in which a page may differ from
the zygote's and still be the zygote's (`template`). Each Python is asked whether its words lie where they are sought.
"""

from __future__ import annotations

import ctypes
import sys
import types

from pyrunc.accelerate.immortal import lasting

PYTHON = sys.version_info[:2]
KNOWN = ((3, 11), (3, 12), (3, 13))
REFERENCES_COUNT = (3, 11)  # in each object; later `immortal` sees to it that they are not written
CALLS_COUNT = (3, 11)  # until a function is specialised
WARM_UP_OFFSET = (
    52  # of PyCodeObject.co_warmup in bytes (Include/cpython/code.h): -8 at first, 0 once specialised
)


class Counters:
    """`objects`: whose reference counts are such words. `code`: addresses of instructions, and the same before they were specialised.
    `caches`: by operation code, how many 16-bit units follow an instruction, the first of which is a counter."""

    __slots__ = ("caches", "code", "objects")

    def __init__(self, objects: list[object], code: list[tuple[int, bytes]], caches: bytes) -> None:
        self.objects, self.code, self.caches = objects, code, caches


def find() -> Counters:
    """Those of all objects that last; none of a Python that is not known."""
    if PYTHON not in KNOWN or (PYTHON == CALLS_COUNT and not _is_warm_up_there()):
        return Counters([], [], bytes(256))
    things = lasting()
    codes = [thing for thing in things if isinstance(thing, types.CodeType)]
    if PYTHON == CALLS_COUNT:
        codes = [code for code in codes if _is_specialised(code)]
    first = types.CodeType.__basicsize__  # co_code_adaptive is the last member
    return Counters(
        things if PYTHON == REFERENCES_COUNT else [],
        [(id(code) + first, code.co_code) for code in codes],
        _caches(),
    )


def _is_specialised(code: types.CodeType) -> bool:
    """Code that is not has hardly run: it never will be from here on, so that nobody counts its calls."""
    warm_up = _warm_up(code)
    if not warm_up.value:
        return True
    warm_up.value = 0
    return False


def _is_warm_up_there() -> bool:
    made: dict[str, types.FunctionType] = {}
    exec("def function(): pass", made)
    function = made["function"]
    before = _warm_up(function.__code__).value
    function()
    return (before, _warm_up(function.__code__).value) == (-8, -7)


def _warm_up(code: types.CodeType) -> ctypes.c_short:
    return ctypes.c_short.from_address(id(code) + WARM_UP_OFFSET)


def _caches() -> bytes:
    import opcode

    entries = opcode._inline_cache_entries  # type: ignore[attr-defined]
    if isinstance(entries, dict):  # from 3.13 on
        entries = [entries.get(name, 0) for name in opcode.opname]
    return bytes(entries[:256])
