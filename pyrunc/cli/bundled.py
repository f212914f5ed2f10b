"""The first Python of `pyrunc`'s own program: an importer for the bundle, then the command line. Frozen into it as `_pyrunc_start`.

The bundle has the compiled code of our modules in one file: importing a hundred of them one by one costs 5 ms for looking at
folders alone. A module whose source has changed since (time or size) is loaded from its source, as ever.

    8 bytes      length of the index, little endian
    index        marshal: (magic number of the byte code, folders for sys.path, {name: entry})
                 entry: (offset, length, is a package, path of the source, its mtime_ns, its size);
                 length -1: the path is that of an extension module
    code         marshalled code objects, at the offsets from the end of the index
"""

import gc
import marshal
import posix
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER, ExtensionFileLoader

import _pyrunc  # type: ignore[import-not-found]

LENGTH_BYTES = 8

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType

    Entry = tuple[int, int, bool, str, int, int]


class Importer:
    """A finder and loader for sys.meta_path."""

    def __init__(self, view: memoryview, index: "dict[str, Entry]", start: int) -> None:
        self.view, self.index, self.start = view, index, start

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module's place in the bundle; None when it is not there or its source is another one now."""
        entry = self.index.get(name)
        if entry is None:
            return None
        _, length, is_package, source, mtime_ns, size = entry
        try:
            status = posix.stat(source)
        except OSError:
            return None
        if status.st_mtime_ns != mtime_ns or status.st_size != size:
            return None
        if length < 0:
            return ModuleSpec(name, ExtensionFileLoader(name, source), origin=source)
        spec = ModuleSpec(name, self, origin=source, is_package=is_package)  # type: ignore[arg-type]
        spec.has_location = True
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(source.rpartition("/")[0])
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual kind."""

    def exec_module(self, module: "ModuleType") -> None:
        """Run its code."""
        exec(self.get_code(module.__name__), module.__dict__)

    def get_code(self, name: str) -> "CodeType":
        """What was compiled from its source."""
        offset, length = self.index[name][:2]
        start = self.start + offset
        code: CodeType = marshal.loads(self.view[start : start + length])
        return code

    def get_source(self, name: str) -> str:
        """For tracebacks."""
        with open(self.index[name][3], encoding="utf-8") as file:
            return file.read()


def install() -> None:
    """Put the importer first, and our folders last in sys.path. Without a bundle the program cannot know these folders."""
    view = _pyrunc.bundle()
    end = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
    magic, folders, index = marshal.loads(view[LENGTH_BYTES:end])
    if magic == MAGIC_NUMBER:
        sys.meta_path.insert(0, Importer(view, index, end))
    sys.path += folders


gc.disable()  # a command ends before circles could matter
install()
from pyrunc.cli.main import main  # noqa: E402

posix._exit(main())
