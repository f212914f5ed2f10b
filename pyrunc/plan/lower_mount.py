"""Lowers the operations on mounts and files: root, filesystems, binds, devices, links, masks,
terminal."""

from __future__ import annotations

from errno import EEXIST, EINVAL, EISDIR, ELOOP, ENOENT, ENOTDIR, EPERM
from os import makedev
from struct import pack

from pyrunc.abi import file as f
from pyrunc.abi import ioctl
from pyrunc.abi import mount as mnt
from pyrunc.plan import model as m
from pyrunc.plan.lowering import ATTACH, CLONE, EMPTY, QUIET, Lowering
from pyrunc.plan.mounts import PROC_FILES
from pyrunc.program import macros
from pyrunc.program.macros import IN_ROOT
from pyrunc.program.model import NEXT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pyrunc.program.model import Operand, Slot

_TYPES = {"c": f.S_IFCHR, "u": f.S_IFCHR, "b": f.S_IFBLK, "p": f.S_IFIFO}
INODE_OF_PROC = 1  # include/linux/proc_ns.h, PROC_ROOT_INO
DEVPTS_INODE_OF_PTMX = 2  # fs/devpts/inode.c: the root is 1, ptmx 2, terminals follow


def set_propagation(low: Lowering, op: m.SetPropagation) -> None:
    low.a.sys("mount", 0, "/", 0, op.flags, 0)


def attach_root(low: Lowering, op: m.AttachRoot) -> None:
    # A clone is a peer of its source. pivot_root(2) refuses a shared mount as the place of the old
    # root (EINVAL), and `pivot_root` below puts it on this one.
    low.set_attributes(low.root, propagation=op.propagation)
    _mount_over(low, low.root, op.place)


def attach_empty_root(low: Lowering, op: m.AttachEmptyRoot) -> None:
    # As small as possible: a tmpfs is the host's memory, and what is not limited here could be
    # filled.
    options = (("mode", "755"), ("nr_blocks", "1"), ("nr_inodes", str(len(op.folders) + 2)))
    low.root = root = low.filesystem("tmpfs", "tmpfs", options, 0)
    for name in op.folders:
        low.a.sys("mkdirat", root, name, 0o555)
    low.set_attributes(root, QUIET | mnt.MOUNT_ATTR_RDONLY)
    _mount_over(low, root, "/")


def _mount_over(low: Lowering, root: Operand, place: str) -> None:
    # Mounted on top of `/` of this mount namespace, so that no directory of the host is needed as a
    # mount point. Our own `/` is still the tree below, because a process's root is not looked up
    # again (path_resolution(7)).
    low.a.sys("move_mount", root, "", f.AT_FDCWD, place, mnt.MOVE_MOUNT_F_EMPTY_PATH)


def attach_mount(low: Lowering, op: m.AttachMount) -> None:
    folder = low.place(op.path, True)
    low.attach(low.numbers[op.descriptor], folder)
    low.close(folder)


def mount_fs(low: Lowering, op: m.MountFs) -> None:
    mount = _new_filesystem(low, op)
    destination = (
        low.ordinary_folder(op.destination)
        if op.strict
        else _open_outside_proc(low, op.destination, True)
    )
    low.attach(mount, destination)
    for flags in op.propagation:
        low.set_attributes(mount, propagation=flags)
    if op.recursive_set or op.recursive_clear:
        low.set_attributes(mount, op.recursive_set, op.recursive_clear, recursive=True)
    low.close(mount, destination)


def _new_filesystem(low: Lowering, op: m.MountFs) -> Slot:
    """Emit the calls that create a filesystem as a detached mount; return the slot of the mount.
    Where the kernel refuses that with EPERM, the calls clone the host's mount at `op.fallback`
    instead."""
    if not op.fallback:
        return low.filesystem(op.type, op.source, op.options, op.attributes)
    a, refused, done = low.a, low.a.label(), low.a.label()
    mount = low.filesystem(op.type, op.source, op.options, op.attributes, refused)
    a.goto(done)
    a.place(refused)
    a.sys("open_tree", f.AT_FDCWD, op.fallback, CLONE | f.AT_RECURSIVE, store=mount)
    low.set_attributes(mount, op.attributes, propagation=mnt.MS_SLAVE | mnt.MS_REC)
    a.place(done)
    return mount


def mount_tree(low: Lowering, op: m.MountTree) -> None:
    if op.in_root:
        _clone_in_root(low, op)
        return
    # Sources differ from pod to pod, destinations are mostly the same.
    same = op.replace(source="")
    if op.descriptor:
        low.reuse(_attach_tree, same, low.numbers[op.descriptor])
    else:
        low.a.set(low.source, low.a.string(op.source))
        low.reuse(_clone_and_attach, same)


def _clone_and_attach(low: Lowering, op: m.MountTree) -> None:
    """Emit calls that bind-mount a path of the host. They clone the mount at the path, in the
    container's copy of the host's mounts, and attach the clone at `op.destination`.

    The program reads the path from its variable `low.source`. `op.source` is empty, so that binds
    of different sources can use the same cached operations.
    """
    place = _open_source(low, op)
    flags = CLONE | EMPTY | (f.AT_RECURSIVE if op.recursive else 0)
    low.a.sys("open_tree", place, "", flags, store=low.tree)
    low.close(place)
    _attach_tree(low, op, low.tree)


def _clone_in_root(low: Lowering, op: m.MountTree) -> None:
    """Emit calls for a bind mount whose source is in the container's root. The program resolves the
    source's path when it runs: the path may lead into earlier mounts, but not out of the root."""
    a, folder, done = low.a, low.a.label(), low.a.label()
    place = low.beneath(op.source.lstrip("/") or ".")
    flags = CLONE | EMPTY | (f.AT_RECURSIVE if op.recursive else 0)
    a.sys("open_tree", place, "", flags, store=low.tree)
    a.sys("statx", place, "", EMPTY, f.STATX_TYPE, low.scratch)
    low.close(place)
    mode = a.field(low.scratch, f.STATX_FIELDS["mode"][0], 4)
    a.compare(mode, "eq", f.S_IFDIR, mask=f.S_IFMT, true=folder)
    _attach_tree(low, op.replace(directory=False), low.tree)
    a.goto(done)
    a.place(folder)
    _attach_tree(low, op.replace(directory=True), low.tree)
    a.place(done)


def _attach_tree(low: Lowering, op: m.MountTree, tree: Operand) -> None:
    """Emit the calls that set the attributes of the detached mount `tree`, attach it at the
    destination and close it."""
    propagation = op.propagation
    if op.descriptor and not op.peer and not (propagation and propagation[0] & mnt.MS_REC):
        # A clone is a peer of its source: without this, mounts made in the container would appear
        # on the host.
        low.set_attributes(tree, propagation=mnt.MS_SLAVE | mnt.MS_REC)
    if len(propagation) == 1 and not propagation[0] & mnt.MS_REC and (op.set or op.clear):
        low.set_attributes(tree, op.set, op.clear, propagation[0])
    else:
        if op.set or op.clear:
            low.set_attributes(tree, op.set, op.clear)
        for flags in propagation:
            low.set_attributes(tree, propagation=flags)
    if op.recursive_set or op.recursive_clear:
        low.set_attributes(tree, op.recursive_set, op.recursive_clear, recursive=True)
    if op.destination == "/proc":
        require_proc(low, tree, "/proc cannot be mounted because it is not of type proc")
        destination = low.ordinary_folder(op.destination)
    elif op.destination in PROC_FILES:
        destination = low.place(op.destination, op.directory)
    else:
        destination = _open_outside_proc(low, op.destination, op.directory)
    low.attach(tree, destination)
    low.close(tree, destination)


def _open_source(low: Lowering, op: m.MountTree) -> Slot:
    """Emit a call that opens the path `low.source` (O_PATH) in the container's copy of the host's
    mounts; return the slot. If the path contains a symbolic link, the program fails with ELOOP."""
    a, opened, swapped = low.a, low.a.label(), low.a.label()
    # O_DIRECTORY makes the kernel mount an automount first.
    flags = f.O_PATH | (low.o_directory if op.directory else 0)
    links = f.RESOLVE_NO_SYMLINKS
    skip = {ELOOP: swapped}
    source = macros.open_at(a, f.AT_FDCWD, low.source, flags, resolve=links, skip=skip, ok=opened)
    a.place(swapped)
    a.fail(ELOOP, m.LINK_CAME)
    a.place(opened)
    return source


def _open_outside_proc(low: Lowering, path: str, directory: bool) -> Slot:
    """Emit calls that open a mount's destination; return the slot. The program fails if the
    destination is inside procfs, whose files the container trusts. A check of the configured path
    is not enough, because a link in the image may lead into procfs (CVE-2019-16884)."""
    place = low.place(path, directory)
    low.a.sys("fstatfs", place, low.scratch)
    kind = low.a.field(low.scratch, 0, 8)
    note = f"{path} cannot be mounted because it is inside /proc"
    macros.require(low.a, kind, "ne", mnt.PROC_SUPER_MAGIC, EPERM, note)
    return place


def require_proc(low: Lowering, tree: Operand, note: str) -> None:
    """Emit a check that `tree`, a descriptor of a mount or folder, is the root directory of a
    procfs. If it is not, the program fails with EPERM and `note`. A bind of a folder inside procfs
    fails, too."""
    a = low.a
    a.sys("fstatfs", tree, low.scratch)
    macros.require(a, a.field(low.scratch, 0, 8), "eq", mnt.PROC_SUPER_MAGIC, EPERM, note)
    inode = macros.status_field(a, macros.status(a, tree), "ino")
    # A bind of a folder of procfs, such as /proc/self/attr or /proc/sys, has the right type as
    # well; only the root has this inode.
    macros.require(a, inode, "eq", INODE_OF_PROC, EPERM, note)


def make_device(low: Lowering, op: m.MakeDevice) -> None:
    a = low.a
    folder, name = low.parent(op.path)
    kind = _TYPES[op.type]
    number = 0 if op.type == "p" else makedev(op.major, op.minor)
    exists, refused, done = a.label(), a.label(), a.label()
    rules = {} if op.fresh else {EEXIST: exists}
    if op.bind and op.type != "p":
        rules[EPERM] = refused
    owned = bool(op.uid or op.gid)
    a.sys(
        "mknodat",
        folder,
        name,
        kind | op.mode,
        number,
        skip=rules,
        ok=done if rules and not owned else NEXT,
    )
    if owned:
        a.sys(
            "fchownat",
            folder,
            name,
            op.uid,
            op.gid,
            f.AT_SYMLINK_NOFOLLOW,
            ok=done if rules else NEXT,
        )
    if EEXIST in rules:
        a.place(exists)
        _require_same_device(low, op, folder, name, kind)
        if EPERM in rules:
            a.goto(done)
    if EPERM in rules:
        a.place(refused)
        _bind_device(low, op.path, folder, name)
    a.place(done)


def attach_device(low: Lowering, op: m.AttachDevice) -> None:
    a, device = low.a, op.device
    folder, name = low.parent(device.path)
    exists, done = a.label(), a.label()
    # An existing file, also a link or a FIFO, is only compared.
    place = macros.create_file(a, folder, name, {EEXIST: exists})
    a.sys("move_mount", low.numbers[op.descriptor], "", place, "", ATTACH)
    low.close(place)
    a.goto(done)
    a.place(exists)
    _require_same_device(low, device, folder, name, _TYPES[device.type])
    a.place(done)


def _require_same_device(
    low: Lowering, op: m.MakeDevice, folder: Slot, name: str, kind: int
) -> None:
    """Emit a check that the existing file is the device in the configuration (runtime-spec,
    linux.devices)."""
    a = low.a
    buffer = low.scratch
    wrong = low.a.label()
    right = low.a.label()
    a.sys("statx", folder, name, f.AT_SYMLINK_NOFOLLOW, f.STATX_BASIC_STATS, buffer)
    a.compare(a.field(buffer, f.STATX_FIELDS["mode"][0], 4), "eq", kind, mask=f.S_IFMT, false=wrong)
    if op.type != "p":
        a.compare(a.field(buffer, f.STATX_FIELDS["rdev_major"][0], 4), "eq", op.major, false=wrong)
        a.compare(a.field(buffer, f.STATX_FIELDS["rdev_minor"][0], 4), "eq", op.minor, false=wrong)
    a.goto(right)
    a.place(wrong)
    a.fail(EEXIST, f"{op.path} exists and is not the configured device")
    a.place(right)


def _bind_device(low: Lowering, path: str, folder: Slot, name: str) -> None:
    """Emit calls that bind-mount the host's device `path` over a new file `name` in `folder`,
    because a user namespace may not use mknod. The path is resolved in the container's copy of the
    host's mounts."""
    a, node = low.a, low.a.slot(4)
    a.sys("open_tree", f.AT_FDCWD, path, CLONE, store=node)
    low.set_attributes(node, mnt.MOUNT_ATTR_NOSUID | mnt.MOUNT_ATTR_NOEXEC)
    place = macros.create_file(a, folder, name)
    a.sys("move_mount", node, "", place, "", ATTACH)
    low.close(node, place)


def symlink(low: Lowering, op: m.Symlink) -> None:
    folder, name = low.parent(op.path)
    if op.over:
        # An image may bring a node or another link as /dev/ptmx. A folder there (EISDIR, EPERM)
        # stays.
        low.a.sys("unlinkat", folder, name, 0, skip={ENOENT: NEXT, EISDIR: NEXT, EPERM: NEXT})
    low.a.sys("symlinkat", op.target, folder, name, skip={EEXIST: NEXT})


def pivot_root(low: Lowering, op: m.PivotRoot) -> None:
    a = low.a
    a.sys("fchdir", low.root)
    # Both on one directory: the old root ends up on top of the new one and is taken off
    # (pivot_root(2), "pivot_root(".", ".")").
    a.sys("pivot_root", ".", ".")
    # Lazily, because the old root is busy: our program and its descriptors are in it until execve.
    a.sys("umount2", ".", mnt.MNT_DETACH)
    a.sys("chdir", "/")


def cover_root(low: Lowering, op: m.CoverRoot) -> None:
    """Emit calls that mount the new root over the old one, as switch_root(8) does. The old root's
    files are not deleted.

    Before that, the program unmounts each path in `op.hide`. If the kernel refuses, because the
    mount is locked in a user namespace, the program mounts an empty folder over the path.
    """
    a = low.a
    for place in op.hide:
        gone, locked = a.label(), a.label()
        a.sys(
            "umount2",
            place,
            mnt.MNT_DETACH,
            ok=gone,
            skip={EINVAL: locked, EPERM: locked, ENOENT: gone},
        )
        a.place(locked)
        empty = low.new_mask()
        attach = mnt.MOVE_MOUNT_F_EMPTY_PATH
        a.sys(
            "move_mount", empty, "", f.AT_FDCWD, place, attach, skip={ENOENT: NEXT, ENOTDIR: NEXT}
        )
        low.close(empty)
        a.place(gone)
    if op.move:
        _mount_over(low, low.root, "/")
    change_root(low, m.ChangeRoot())
    a.sys("chdir", "/")


def label_mount(low: Lowering, op: m.LabelMount) -> None:
    folder = low.beneath(op.path, f.O_RDONLY | low.o_directory)
    label = op.label.encode("utf-8", "surrogateescape")
    low.a.sys("fsetxattr", folder, "security.selinux", low.a.constant(label), len(label), 0)
    low.close(folder)


def share_root(low: Lowering, op: m.ShareRoot) -> None:
    low.set_attributes(low.root, propagation=op.propagation)


def change_root(low: Lowering, op: m.ChangeRoot) -> None:
    low.a.sys("fchdir", low.root)
    low.a.sys("chroot", ".")


def _open_null(low: Lowering) -> Slot:
    """Emit calls that open the container's /dev/null; return the slot. Later calls emit nothing and
    return the same slot. The program fails unless the file is the character device 1:3
    (CVE-2025-31133)."""
    if low.null is None:
        low.null = low.beneath("/dev/null", f.O_PATH, IN_ROOT | f.RESOLVE_NO_SYMLINKS)
        macros.require_device(low.a, low.null, 1, 3, "/dev/null")
    return low.null


def reopen_null(low: Lowering, op: m.ReopenNull) -> None:
    low.reuse(_reopen_null, op.descriptors)


def _reopen_null(low: Lowering, descriptors: tuple[int, ...]) -> None:
    opened = low.beneath("/dev/null", f.O_RDWR, IN_ROOT | f.RESOLVE_NO_SYMLINKS)
    macros.require_device(low.a, opened, 1, 3, "/dev/null")
    for number in descriptors:
        # The host's inode would stay open in the container, whose root could change its mode for
        # the whole machine (fchmod(2)).
        low.a.sys("dup3", opened, number, 0)
    low.close(opened)


def make_folder(low: Lowering, op: m.MakeFolder) -> None:
    low.close(low.place(op.path, True))


def open_terminal(low: Lowering, op: m.OpenTerminal) -> None:
    """Emit calls that open a pty of the container's devpts. Once the pty is open, they use only its
    descriptors, because a path could be swapped (CVE-2025-52565)."""
    a = low.a
    if op.of_host:
        master = a.slot(4)
        a.sys(
            "openat", f.AT_FDCWD, "/dev/ptmx", f.O_RDWR | f.O_NOCTTY | f.O_CLOEXEC, 0, store=master
        )
        macros.require_device(a, master, 5, 2, "/dev/ptmx")
    else:
        master = low.beneath(
            "/dev/pts/ptmx", f.O_RDWR | f.O_NOCTTY, IN_ROOT | f.RESOLVE_NO_SYMLINKS
        )
        _check_ptmx(low, master)
    slave = a.slot(4)
    a.sys("ioctl", master, ioctl.TIOCSPTLCK, low.a.constant(pack("<i", 0)))
    # Linux 4.13: opens the other side by the master, without a path in a devpts that may be covered
    # by another one.
    a.sys("ioctl", master, ioctl.TIOCGPTPEER, f.O_RDWR | f.O_NOCTTY | f.O_CLOEXEC, store=slave)
    if op.size is not None:
        size = low.a.constant(pack("<4H", op.size.height, op.size.width, 0, 0))
        a.sys("ioctl", slave, ioctl.TIOCSWINSZ, size)
    # The program must be able to open /dev/console and /proc/self/fd/0 again after it has changed
    # its user.
    if op.uid:
        a.sys("fchown", slave, op.uid, -1 & 0xFFFFFFFF)
    if op.console:
        tree = a.slot(4)
        a.sys("open_tree", slave, "", CLONE | EMPTY, store=tree)
        place = _console_place(low)
        low.attach(tree, place)
        low.close(tree, place)
    # By SCM_RIGHTS: pidfd_getfd(2) needs the right to ptrace, which a rootless runtime does not
    # have over a non-dumpable process, nor root with Yama's ptrace_scope 3.
    macros.send_fd(a, master)
    a.sys("ioctl", slave, ioctl.TIOCSCTTY, 0)
    for number in (0, 1, 2):
        a.sys("dup3", slave, number, 0)
    low.close(master, slave)


def _console_place(low: Lowering) -> Slot:
    """Emit calls that open the container's /dev/console (O_PATH); return the slot. They create the
    file if it is missing. If it is a symbolic link, the program fails, because the terminal would
    be mounted at the link's target (CVE-2025-52565)."""
    a = low.a
    folder = low.folder("/dev")
    exists = low.a.label()
    low.close(macros.create_file(a, folder, "console", {EEXIST: exists}))
    a.place(exists)
    return macros.open_at(a, folder, "console", f.O_PATH, resolve=macros.BENEATH)


def _check_ptmx(low: Lowering, master: Slot) -> None:
    a = low.a
    macros.require_device(a, master, 5, 2, "/dev/pts/ptmx")
    inode = macros.status_field(a, macros.status(a, master), "ino")
    macros.require(
        a, inode, "eq", DEVPTS_INODE_OF_PTMX, ENOTDIR, "/dev/pts/ptmx is not the one of a devpts"
    )
    a.sys("fstatfs", master, low.scratch)
    kind = a.field(low.scratch, 0, 8)
    macros.require(a, kind, "eq", mnt.DEVPTS_SUPER_MAGIC, ENOTDIR, "/dev/pts is not a devpts")


def change_mount(low: Lowering, op: m.ChangeMount) -> None:
    if op.path == "/":
        low.set_attributes(low.root, op.set, op.clear)
        return
    mount = low.beneath(op.path)
    low.set_attributes(mount, op.set, op.clear)
    low.close(mount)


def readonly_path(low: Lowering, op: m.ReadonlyPath) -> None:
    a, tree, end = low.a, low.a.slot(4), low.a.label()
    # Missing paths are normal: the lists name files of optional parts of the kernel, and in this
    # image a parent may be a file.
    place = low.beneath(op.path, missing=end)
    # With the mounts below, which would be gone beneath the new mount; they keep their own flags.
    a.sys("open_tree", place, "", CLONE | EMPTY | f.AT_RECURSIVE, store=tree)
    low.set_attributes(tree, mnt.MOUNT_ATTR_RDONLY)
    low.attach(tree, place)
    low.close(tree, place)
    a.place(end)


def mask_path(low: Lowering, op: m.MaskPath) -> None:
    a, tree = low.a, low.a.slot(4)
    end, hidden, folder = a.label(), a.label(), a.label()
    null = _open_null(low)
    if low.mask is None and op.copy:  # also when no folder is hidden after all
        low.mask = low.new_mask()
    place = low.beneath(op.path, missing=end)
    a.sys("statx", place, "", EMPTY, f.STATX_TYPE, low.scratch)
    mode = a.field(low.scratch, f.STATX_FIELDS["mode"][0], 4)
    # A mount point and what is put on it must both be folders, or neither.
    a.compare(mode, "eq", f.S_IFDIR, mask=f.S_IFMT, true=folder)
    a.sys("open_tree", null, "", CLONE | EMPTY, store=tree, ok=hidden)
    a.place(folder)
    low.hide_folder(tree)
    a.place(hidden)
    low.attach(tree, place)
    low.close(tree, place)
    a.place(end)


CALLS: dict[type, Callable[[Lowering, Any], None]] = {
    m.SetPropagation: set_propagation,
    m.AttachRoot: attach_root,
    m.AttachEmptyRoot: attach_empty_root,
    m.AttachMount: attach_mount,
    m.MountFs: mount_fs,
    m.MountTree: mount_tree,
    m.MakeDevice: make_device,
    m.AttachDevice: attach_device,
    m.Symlink: symlink,
    m.PivotRoot: pivot_root,
    m.CoverRoot: cover_root,
    m.LabelMount: label_mount,
    m.ShareRoot: share_root,
    m.ChangeRoot: change_root,
    m.ReopenNull: reopen_null,
    m.MakeFolder: make_folder,
    m.OpenTerminal: open_terminal,
    m.ChangeMount: change_mount,
    m.ReadonlyPath: readonly_path,
    m.MaskPath: mask_path,
}
NEEDS: dict[type, Callable[[Any], tuple[str, ...]]] = {
    m.AttachRoot: lambda op: ("root",),
    m.ChangeRoot: lambda op: ("root",),
    m.AttachMount: lambda op: (op.descriptor,),
    m.AttachDevice: lambda op: (op.descriptor,),
    m.MountTree: lambda op: (op.descriptor,) if op.descriptor else (),
}
