"""The Python side of the executable `pyrunc` (front.c), which starts each command from a snapshot
of its memory after all imports.

`prepare` runs at installation, before the snapshot is taken. `resume` runs in each command, in a
copy of the snapshot. So `prepare` must not store anything that differs between two processes:
environment, time, descriptors, pids.
"""

from __future__ import annotations

import _imp
import _signal  # type: ignore[import-not-found]
import gc
import io
import os
import posix
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any, NoReturn

# The modules of the commands; their imports come along. Modules that load a shared object cannot be
# among them.
MODULES = (
    "pyrunc.cli.main", "pyrunc.cli.fast", "pyrunc.cli.container", "pyrunc.cli.execute",
    "pyrunc.cli.inspect", "pyrunc.container.create", "pyrunc.container.bundle",
    "pyrunc.container.run", "pyrunc.accelerate.exec_cache", "pyrunc.container.start",
    "pyrunc.container.kill", "pyrunc.container.delete", "pyrunc.container.exec",
    "pyrunc.container.list", "pyrunc.spec.check", "pyrunc.spec.parse", "pyrunc.cgroups.group",
    "pyrunc.cgroups.naming", "pyrunc.cgroups.limits", "pyrunc.cgroups.device_filter",
    "pyrunc.kernel.bpf", "pyrunc.kernel.reaper", "pyrunc.seccomp.compiler", "pyrunc.launch.steps",
    "pyrunc.cli.process",
)  # fmt: skip
# Of pymalloc in CPython 3.10 and later: size and header of a pool, and the sizes of pooled objects
# that a bytes object can have.
POOL, POOL_HEADER, GRAIN, SMALLEST, LARGEST = 16384, 48, 16, 48, 512
EMPTY = sys.getsizeof(b"")
MOST_FREE = 1 << 14
filling: list[list[bytes]] = []
STREAMS = ("stdin", "stdout", "stderr")


def prepare(path: str) -> bytes:
    """Import the commands' modules and rehearse commands, before the snapshot is taken. Returns a
    stamp for each source file. `pyrunc` later detects changed files with these stamps.

    A stamp is the mtime in ns and the size, each as signed 64 bits, then the path and a zero byte.
    `path`: where the snapshot will be. Raises ImportError when a module lies in a shared object.
    """
    import _pyrunc  # type: ignore[import-not-found]

    next_section = getattr(_pyrunc, "next_section", None)  # in heap_order.c, which arm64 lacks
    for name in MODULES:
        __import__(name)
        if next_section is not None:
            next_section()
    from pyrunc import jsontext
    from pyrunc.accelerate.command_rehearsal import rehearse

    # Every command loads it; importlib's search along sys.path touches many pages of the snapshot.
    jsontext.load = _load_without_search("_json")
    rehearse(f"{os.path.abspath(path)}.rehearsal")
    use_plain_json()
    files = [
        module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)
    ]
    sources = [sys.executable, *(file for file in files if file is not None)]
    if shared := [source for source in sources if source.endswith(".so")]:
        raise ImportError(f"shared objects cannot be in a snapshot: {', '.join(shared)}")
    # Garbage in the snapshot would take memory in every command.
    gc.collect()
    gc.disable()  # a command ends before cycles of references matter
    stamps = b"".join(map(_stamp, dict.fromkeys(sources)))
    _fill_pools()
    return stamps


def run_watched(path: str) -> None:
    """Run commands in child processes while heap_order.c records which blocks of memory they write.
    In the snapshot these blocks lie side by side, so that a command copies fewer pages.

    Called after `prepare`, in a fork of the process that writes the snapshot. `path`: where the
    snapshot will be.
    """
    from _pyrunc import watch

    from pyrunc.accelerate.command_rehearsal import run_once

    def fill_and_watch(phase: int) -> None:
        _fill_pools()
        watch(phase)

    run_once(f"{os.path.abspath(path)}.rehearsal", fill_and_watch, resume)


def use_plain_json() -> None:
    """Make `jsontext` use the functions of json.c. If json.c refuses a value, `jsontext` uses those
    of `_json` for this value and all later ones."""
    from _pyrunc import read_json, write_json

    from pyrunc import jsontext

    def scan(text: str, start: int) -> tuple[Any, int]:
        return read_json(text, start) or jsontext._load()[0](text, start)

    def encode(value: object, depth: int) -> tuple[str, ...]:
        text = write_json(value)
        return (text,) if text is not None else jsontext._load()[1](value, depth)

    jsontext._halves = scan, encode


def _load_without_search(name: str) -> Callable[[], ModuleType]:
    """Return a function that loads the C module `name` from its present path, so that a command
    need not search the folders of sys.path."""
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)
    spec = next(spec for spec in specs if spec is not None)
    if not spec.has_location:  # part of the interpreter, as on Debian 13
        return lambda: __import__(name)

    def load() -> ModuleType:
        module: ModuleType = _imp.create_dynamic(spec)
        _imp.exec_dynamic(module)
        return module

    return load


def _fill_pools() -> None:
    """Fill the partly used pools of pymalloc (Objects/obmalloc.c), so that a command's objects lie
    side by side in fewer pages."""
    for size in range(SMALLEST, LARGEST + 1, GRAIN):
        objects = [bytes(size - EMPTY)]
        # An object at the start of a pool shows that all other pools of its size are full.
        while id(objects[-1]) % POOL != POOL_HEADER and len(objects) < MOST_FREE:
            objects.append(bytes(size - EMPTY))
        filling.append(objects)


def _stamp(source: str) -> bytes:
    status = os.stat(source)
    return struct.pack("=qq", status.st_mtime_ns, status.st_size) + os.fsencode(source) + b"\0"


def resume(
    arguments: list[str], environment: dict[bytes, bytes], interrupt_ignored: int
) -> NoReturn:
    """Turn this copy of the snapshot into the command's process, run the command line and exit.
    `interrupt_ignored`: not 0 if the caller of the command had set SIGINT to be ignored."""
    from pyrunc.cli.main import main

    sys.argv = arguments
    posix.environ = os.environ._data = os.environb._data = environment  # type: ignore[attr-defined]
    _signal.signal(
        _signal.SIGINT, _signal.SIG_IGN if interrupt_ignored else _signal.default_int_handler
    )
    for number, name in enumerate(STREAMS):
        stream = _stream(number, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # No clean-up of the interpreter: it would write to, and so copy, most pages of the snapshot.
    posix._exit(main())


def _stream(number: int, stream: io.TextIOWrapper) -> io.TextIOWrapper | None:
    """Return `stream` with the settings that a starting Python gives the standard stream `number`;
    None when this descriptor is closed."""
    try:
        posix.fstat(number)
    except OSError:
        return None
    if number == 1 and posix.isatty(number):
        stream.reconfigure(line_buffering=True)
    return stream
