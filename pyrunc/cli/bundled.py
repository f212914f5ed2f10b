"""The first Python of `pyrunc`'s own program: an importer for the bundle, then the command line. Frozen into it as `_pyrunc_start`.

The bundle has the compiled code of our modules in one file, in batches of what is needed together: `importlib` takes longer to
find and make a module than most need to run, 5 ms for those of one command. The first import of one of a batch makes all of it.
A module whose source has changed since (time or size) is loaded from its source, as ever.

    8 bytes      length of the head, little endian
    head         marshal: (magic number of the byte code, folders for sys.path, {name: entry}, [(offset, length) of a batch])
                 entry: (number of its batch, is a package, path of the source, its mtime_ns, its size);
                 number -1: the path is that of an extension module
    batches      marshalled {name: code}, at the offsets from the end of the head; what a module imports comes before it
"""

import gc
import marshal
import posix
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER, ExtensionFileLoader

import _pyrunc  # type: ignore[import-not-found]

LENGTH_BYTES = 8
EXTENSION = -1
Module = type(sys)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType

    Entry = tuple[int, bool, str, int, int]


class Importer:
    """A finder and loader for sys.meta_path."""

    def __init__(
        self, view: memoryview, index: "dict[str, Entry]", batches: "list[tuple[int, int]]", start: int
    ) -> None:
        self.view, self.index, self.batches, self.start = view, index, batches, start
        self.loaded: set[int] = set()
        self.codes: dict[str, CodeType] = {}  # of modules that were not run yet

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module's place in the bundle, after its batch was made; None when it is not there, or stale."""
        spec = self.place(name)
        if spec is not None and (batch := self.index[name][0]) != EXTENSION:
            self.load_batch(batch)
        return spec

    def place(self, name: str) -> ModuleSpec | None:
        """The module's place in the bundle; None when it is not there or its source is another one now."""
        entry = self.index.get(name)
        if entry is None:
            return None
        batch, is_package, source, mtime_ns, size = entry
        if not _pyrunc.is_unchanged(source, mtime_ns, size):
            return None
        if batch == EXTENSION:
            return ModuleSpec(name, ExtensionFileLoader(name, source), origin=source)
        spec = ModuleSpec(name, self, origin=source, is_package=is_package)  # type: ignore[arg-type]
        spec.has_location = True
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(source.rpartition("/")[0])
        return spec

    def load_batch(self, number: int) -> None:
        """Make the modules of a batch, once; those that are stale are left to others."""
        if number in self.loaded:
            return
        self.loaded.add(number)
        offset, length = self.batches[number]
        start = self.start + offset
        codes: dict[str, CodeType] = marshal.loads(self.view[start : start + length])
        self.codes |= codes
        for name in codes:
            if name not in sys.modules and (spec := self.place(name)) is not None:
                self.load(spec)

    def load(self, spec: ModuleSpec) -> None:
        """Make a module; what it imports from its batch is there."""
        package, _, last = spec.name.rpartition(".")
        if package and package not in sys.modules:
            __import__(package)
        module = Module(spec.name)
        module.__spec__, module.__package__, module.__file__ = spec, spec.parent, spec.origin
        if spec.submodule_search_locations is not None:
            module.__path__ = spec.submodule_search_locations
        sys.modules[spec.name] = module
        self.exec_module(module)
        if package:
            setattr(sys.modules[package], last, module)

    def create_module(self, spec: ModuleSpec) -> "ModuleType | None":
        """The one that was made with its batch; None for one that is imported meanwhile."""
        return sys.modules.get(spec.name)

    def exec_module(self, module: "ModuleType") -> None:
        """Run its code, once."""
        code = self.codes.pop(module.__name__, None)
        if code is not None:
            exec(code, module.__dict__)

    def get_source(self, name: str) -> str:
        """For tracebacks."""
        with open(self.index[name][2], encoding="utf-8") as file:
            return file.read()


def install() -> None:
    """Put the importer first, and our folders last in sys.path. Without a bundle the program cannot know these folders."""
    sys.modules["encodings"].__path__ = [f"{sys.path[0]}/encodings"]  # it is frozen, the rarer codecs are not
    view = _pyrunc.bundle()
    end = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
    magic, folders, index, batches = marshal.loads(view[LENGTH_BYTES:end])
    if magic == MAGIC_NUMBER:
        sys.meta_path.insert(0, Importer(view, index, batches, end))
    sys.path += folders


gc.disable()  # a command ends before circles could matter
install()
from pyrunc.cli.main import main  # noqa: E402

posix._exit(main())
