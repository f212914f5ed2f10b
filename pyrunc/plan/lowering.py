"""Lowers one plan's operations. `Lowering` has the assembler, the descriptors' numbers and the data
that operations share.

Its methods, and the functions of `lower_mount` and `lower_process`, emit system calls: the program
makes them later, in the new process. They reach files below the container's root with methods
of `Lowering`: `beneath` opens an existing file, `place` opens or creates a mount's destination,
`attach` attaches a mount to an open file. Sequences of calls that do not depend on the plan are in
`program.macros`.
"""

from __future__ import annotations

from errno import EINVAL, ELOOP, ENOENT, ENOTDIR, EPERM
from struct import pack

from pyrunc.abi import file as f
from pyrunc.abi import mount as mnt
from pyrunc.program import macros
from pyrunc.program.macros import IN_ROOT
from pyrunc.program.model import NEXT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from pyrunc.plan.lowering_cache import LoweringCache, PlanAssembler
    from pyrunc.program.model import Label, Operand, Slot

EMPTY = f.AT_EMPTY_PATH
QUIET = mnt.MOUNT_ATTR_NOSUID | mnt.MOUNT_ATTR_NODEV | mnt.MOUNT_ATTR_NOEXEC
# By default a tmpfs may take half of the memory; this one holds its root folder only.
MASK_OPTIONS = (("nr_blocks", "1"), ("nr_inodes", "2"), ("mode", "555"))
ATTACH = mnt.MOVE_MOUNT_F_EMPTY_PATH | mnt.MOVE_MOUNT_T_EMPTY_PATH
CLONE = mnt.OPEN_TREE_CLONE | mnt.OPEN_TREE_CLOEXEC
ROOT_NUMBER = 3
"""The root's descriptor number in each plan whose process inherits stdio only (no `preserve`)."""


class SharedSlots:
    """Variables and scratch space with the same address in all programs that are made with one
    `LoweringCache`. The cached calls of an operation contain these addresses."""

    __slots__ = ("argv", "envp", "result", "scratch", "source", "tree")

    def __init__(self, a: PlanAssembler) -> None:
        self.scratch = a.data(4096)
        """Space for results that the next operations read."""
        self.tree = a.slot(4, 0)
        """The descriptor of a mount until it is attached."""
        self.source = a.slot(8, 0)
        """The address of the path of a bind's source."""
        self.argv, self.envp = a.slot(8, 0), a.slot(8, 0)
        """The addresses of the arguments and of the environment of the command to execute."""
        self.result = a.slot(4, 0)
        """The negative errno of the failed execve."""


class Lowering:
    """Lowers one plan to a program. The methods emit the system calls of the program."""

    def __init__(
        self, a: PlanAssembler, numbers: dict[str, int], cache: LoweringCache | None = None
    ) -> None:
        """Begin to append operations to `a`.

        - `numbers`: the descriptor number of each name in the plan
        - `cache`: the cache whose data block was copied into `a`; None if `a` is empty
        """
        self.a = a
        self.numbers = numbers
        self.sync_number = max(numbers.values(), default=2) + 1
        self.o_directory, self.o_nofollow = a.arch.o_directory, a.arch.o_nofollow
        self.root: Operand = numbers.get("root", -1)
        self.start: Slot | None = None
        self.start_number = -1
        self.preserve, self.filtered = 0, False
        self.line = 0
        """The plan's line that is being lowered: the process reports it when it waits for its
        parent."""
        self.mask: Slot | None = None
        self.null: Slot | None = None
        self.entered: Slot | None = None
        self._folders: dict[str, Slot] = {}
        # Plans without the descriptor of a root have no cached operations that refer to it.
        self._cache = cache if numbers.get("root", ROOT_NUMBER) == ROOT_NUMBER else None
        self.shared = shared = SharedSlots(a) if cache is None else cache.shared
        self.scratch, self.tree, self.source = shared.scratch, shared.tree, shared.source
        self.argv, self.envp, self.result = shared.argv, shared.envp, shared.result

    def forget(self) -> None:
        """Forget the slots of descriptors that earlier operations opened: later operations will
        open the files again. The program does not close the earlier descriptors."""
        self.mask = self.null = self.entered = None
        self._folders.clear()

    def reuse(self, lower: Callable[..., None], *arguments: Hashable) -> None:
        """Emit the operations of `lower(self, *arguments)`, from the cache if they are there. They
        are cached at the second call with the same arguments (`LoweringCache.append`).

        The operations may depend only on `arguments` and on the number of the root's descriptor, if
        the plan has one.
        """
        cache = self._cache
        if cache is None or not cache.append(self.a, lower, arguments):
            lower(self, *arguments)
        # The appended operations may attach a mount over an open folder (see `attach`).
        self._folders.clear()

    def container_root(self) -> Operand:
        """Return the descriptor of the container's root. The plan of an exec has no such
        descriptor, because its process is inside the container; there, emit the call that opens `/`
        and return the slot of its result."""
        if isinstance(self.root, int) and self.root < 0:
            self.root = slot = self.a.slot(4)
            self.a.sys(
                "openat", f.AT_FDCWD, "/", f.O_PATH | self.o_directory | f.O_CLOEXEC, 0, store=slot
            )
        return self.root

    def close(self, *operands: Operand) -> None:
        for operand in operands:
            self.a.sys("close", operand)

    # ---- paths

    def beneath(
        self,
        path: str,
        flags: int = f.O_PATH,
        resolve: int = IN_ROOT,
        missing: Label | None = None,
    ) -> Slot:
        """Emit a call that opens a path inside the container's root; return the slot of its
        descriptor.

        `missing`: the label to which the program jumps when the path does not exist. Without a
        label, a missing path ends the program with an error.
        """
        skip = {} if missing is None else {ENOENT: missing, ENOTDIR: missing}
        root = self.container_root()
        return macros.open_at(self.a, root, path.lstrip("/"), flags, resolve=resolve, skip=skip)

    def folder(self, path: str) -> Slot:
        """Emit calls that open the container's directory `path` (O_PATH); return the slot. They
        make missing directories on the path.

        Later calls for the same path emit nothing and return the same slot, until something is
        mounted. So the caller must not close the descriptor.
        """
        slot = self._folders.get(path)
        if slot is None:
            slot = self._folders[path] = self.place(path, True)
        return slot

    def parent(self, path: str) -> tuple[Slot, str]:
        """Call `folder` for the directory that contains `path`; return the directory's slot and the
        last name of `path`. The caller must not close the directory's descriptor."""
        above, _, name = path.rpartition("/")
        return self.folder(above or "/"), name

    def place(self, path: str, directory: bool) -> Slot:
        """Emit calls that open a mount's destination (O_PATH); return the slot. They create a
        missing destination: a directory (0755) if `directory`, else an empty file (0644). They also
        create missing parents (0755).

        An existing directory is opened also without `directory`; the mount then fails with ENOTDIR.
        """
        if directory:
            return macros.make_directories(self.a, self.container_root(), path)
        return macros.make_file(self.a, self.container_root(), path)

    def ordinary_folder(self, path: str) -> Slot:
        """Emit calls that open the directory on which procfs or sysfs will be mounted; return its
        slot. They create the directory if it is missing.

        If the path contains a symlink or a non-directory, the program fails, so that an image
        cannot redirect the mount (CVE-2019-19921, CVE-2023-27561).
        """
        a, root = self.a, self.container_root()
        opened, missing, wrong = a.label(), a.label(), a.label()
        name = path.lstrip("/")
        flags = f.O_PATH | self.o_directory | self.o_nofollow
        resolve = IN_ROOT | f.RESOLVE_NO_SYMLINKS
        rules = {ELOOP: wrong, ENOTDIR: wrong}
        skip = {ENOENT: missing, **rules}
        slot = macros.open_at(a, root, name, flags, resolve=resolve, skip=skip, ok=opened)
        a.place(missing)
        self.close(macros.make_directories(a, root, path))
        macros.open_at(a, root, name, flags, resolve=resolve, store=slot, skip=rules, ok=opened)
        a.place(wrong)
        # The text is runc's.
        a.fail(ENOTDIR, f"{path} must be mounted on ordinary directory")
        a.place(opened)
        return slot

    # ---- mounts

    def attach(self, mount: Operand, destination: Operand) -> None:
        """Emit move_mount(2), which attaches a detached mount to an open file or directory."""
        self.a.sys("move_mount", mount, "", destination, "", ATTACH)
        # The mount may cover a folder that is open here: what is made in it then would be hidden.
        self._folders.clear()

    def set_attributes(
        self,
        mount: Operand,
        to_set: int = 0,
        to_clear: int = 0,
        propagation: int = 0,
        recursive: bool = False,
    ) -> None:
        """Emit mount_setattr(2) on a mount's descriptor. An atime attribute in `to_set` also clears
        all other atime attributes."""
        # mount_setattr(2): the atime settings are an enumeration, and EINVAL answers a change that
        # does not name the whole field in attr_clr.
        if to_set & mnt.MOUNT_ATTR__ATIME:
            to_clear |= mnt.MOUNT_ATTR__ATIME
        recursive = recursive or bool(propagation & mnt.MS_REC)
        attributes = self.a.constant(pack("<4Q", to_set, to_clear, propagation & ~mnt.MS_REC, 0))
        flags = EMPTY | (f.AT_RECURSIVE if recursive else 0)
        self.a.sys("mount_setattr", mount, "", flags, attributes, mnt.MOUNT_ATTR_SIZE)

    def filesystem(
        self,
        kind: str,
        source: str,
        options: tuple[tuple[str, str | None], ...],
        attributes: int,
        refused: Label | None = None,
    ) -> Slot:
        """Emit the calls that create a filesystem as a detached mount; return the slot of the
        mount. `refused`: the label to which the program jumps on EPERM.

        If the user namespace does not map the group of a devpts (5, `tty`), the kernel refuses the
        group with EINVAL: new kernels when the option `gid` is set, older ones when the filesystem
        is created. In both cases the devpts is mounted without `gid`, and its terminals have the
        group of their opener.
        """
        a = self.a
        context = self.a.slot(4)
        mount = self.a.slot(4)
        created = self.a.label()
        # Mounting fails with EINVAL for a group that the user namespace does not map. Every default
        # configuration asks for gid=5.
        grouped = kind == "devpts" and any(key == "gid" for key, _ in options)
        rules = {} if refused is None else {EPERM: refused}
        self._configure(context, kind, source, options, EINVAL if grouped else 0, rules)
        if grouped:
            a.sys(
                "fsconfig",
                context,
                mnt.FSCONFIG_CMD_CREATE,
                0,
                0,
                0,
                skip={EINVAL: NEXT},
                ok=created,
            )
            # A context in which a creation has failed cannot be used again (EBUSY), so a new one is
            # configured.
            self.close(context)
            rest = tuple(option for option in options if option[0] != "gid")
            self._configure(context, kind, source, rest, 0, rules)
        a.sys("fsconfig", context, mnt.FSCONFIG_CMD_CREATE, 0, 0, 0, skip=rules)
        a.place(created)
        a.sys("fsmount", context, mnt.FSMOUNT_CLOEXEC, attributes, store=mount, skip=rules)
        self.close(context)
        return mount

    def _configure(
        self,
        context: Slot,
        kind: str,
        source: str,
        options: tuple[tuple[str, str | None], ...],
        refusal: int,
        rules: dict[int, Label],
    ) -> None:
        """Emit fsopen(2) for a filesystem of type `kind`, and fsconfig(2) for its source and each
        option.

        - `refusal`: the errno to ignore for the option `gid`, which the kernel may refuse for an
          unmapped group; 0 for none
        - `rules`: errno of fsopen -> label to which the program jumps
        """
        a = self.a
        a.sys("fsopen", kind, mnt.FSOPEN_CLOEXEC, store=context, skip=rules)
        if source:
            a.sys("fsconfig", context, mnt.FSCONFIG_SET_STRING, "source", source, 0)
        for key, value in options:
            if value is None:
                a.sys("fsconfig", context, mnt.FSCONFIG_SET_FLAG, key, 0, 0)
            else:
                skip = {refusal: NEXT} if refusal and key == "gid" else None
                a.sys("fsconfig", context, mnt.FSCONFIG_SET_STRING, key, value, 0, skip=skip)

    def new_mask(self) -> Slot:
        """Emit the calls that create a detached, empty, read-only tmpfs with which folders are
        masked; return the slot of the mount."""
        return self.filesystem("tmpfs", "tmpfs", MASK_OPTIONS, QUIET | mnt.MOUNT_ATTR_RDONLY)

    def hide_folder(self, store: Slot) -> None:
        """Emit calls that create an empty, detached tmpfs and put its descriptor into `store`. The
        caller attaches the tmpfs over a directory to hide it. The tmpfs is a clone of `self.mask`,
        or a new one where the kernel cannot clone detached mounts (Linux before 6.15)."""
        if self.mask is not None:
            self.a.sys("open_tree", self.mask, "", CLONE | EMPTY, store=store)
        else:
            self.a.set(store, self.new_mask())
