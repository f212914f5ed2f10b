"""Reads and writes the cgroup v2 tree: finds its mount point, and reads or writes one file of one
group.

A group is named by its directory's absolute path. File names come from configurations (`unified`
keys, huge page sizes), so a name that leads out of the group is refused. A plain open is safe,
because cgroupfs has no symbolic links. Source: cgroups(7), and the kernel's
Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import errno
import os
import select
import time

from pyrunc.errors import InvalidArgument, KernelError, Unsupported, WrongState, kernel_errors
from pyrunc.kernel.fd import closing_fd, read_file, write_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

USUAL_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
DELEGATED = "/sys/kernel/cgroup/delegate"
MARK = "trusted.pyrunc"
GONE = (errno.ENOENT, errno.ENODEV)
SHORT_READ_BYTES = 2048  # cgroupfs returns about a page at a time; a shorter read was the last

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_root = ""


def root() -> str:
    """Return the mount point of the v2 tree, on a hybrid host `/sys/fs/cgroup/unified`. Raises
    Unsupported when it is not mounted."""
    global _root
    if not _root:
        _root = _find_root()
    return _root


def _find_root() -> str:
    for candidate in USUAL_ROOTS:
        # Only a v2 group has this file. On a v1 host, /sys/fs/cgroup is a tmpfs with a folder for
        # each hierarchy.
        if os.path.exists(f"{candidate}/cgroup.controllers"):
            return candidate
    from pyrunc.kernel.mountinfo import mount_points

    for mount in mount_points():
        if mount.kind == "cgroup2":
            return mount.path
    raise Unsupported(
        "no cgroup v2 tree is mounted (looked for /sys/fs/cgroup and /sys/fs/cgroup/unified)"
    )


def controllers(directory: str) -> list[str]:
    """Return the controllers that are available in the group `directory` (its
    cgroup.controllers)."""
    return (read(directory, "cgroup.controllers") or "").split()


def own_path(pid: int | str = "self") -> str | None:
    """Return the path of a process's group in the v2 tree (`/a/b`), as seen from our cgroup
    namespace; None if the process is gone."""
    try:
        lines = read_file(f"/proc/{pid}/cgroup").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    for line in lines:
        if line.startswith(b"0::"):
            # The kernel adds the suffix for a zombie whose group was removed meanwhile
            # (cgroup-v2.rst).
            return os.fsdecode(line[3:]).removesuffix(" (deleted)")
    return None


def read(directory: str | int, file: str) -> str | None:
    """Return the content of a file of a group; None when there is no such file or group.
    `directory`: the group's path or descriptor. Raises KernelError."""
    opened = directory if isinstance(directory, int) else None
    path = file if isinstance(directory, int) else _file(directory, file)
    try:
        with closing_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=opened)) as descriptor:
            parts = [os.read(descriptor, 65536)]
            # A read returns whole records, about a page of them. A container can make a list long
            # (cgroup.procs), so it may take many reads.
            while len(parts[-1]) >= SHORT_READ_BYTES:
                parts.append(os.read(descriptor, 65536))
    except OSError as error:
        if error.errno in GONE:
            return None
        raise KernelError.of(error, "read", repr(path)) from None
    return b"".join(parts).decode("utf-8", "surrogateescape")


def write(directory: str, file: str, content: str) -> None:
    """Write `content` to a file of the group with one write(2). Raises KernelError, with ENOENT
    when there is no such file or the group is gone.

    The kernel's ENODEV becomes ENOENT if the group was removed between open and write. It stays
    ENODEV if `content` names a device that does not exist.
    """
    path = _file(directory, file)
    try:
        write_once(path, content.encode("utf-8", "surrogateescape"))
    except OSError as error:
        # A removed group's folder may be visible a moment longer than its files work. systemd
        # removes a scope with its last process: some 20 of 2,000 removals met this moment.
        gone = error.errno == errno.ENODEV and (
            file.startswith("cgroup.") or not os.path.exists(directory)
        )
        raise KernelError(
            "write", f"{content!r} to {path!r}", errno.ENOENT if gone else error.errno or 0
        ) from None


def is_leaf(directory: str) -> bool:
    """Return whether the group has no groups below; True when it is gone."""
    try:
        # A directory has two links, and one more for each subdirectory.
        return os.stat(directory).st_nlink <= 2
    except FileNotFoundError:
        return True


def keyed(content: str | None) -> dict[str, int]:
    """Parse the content of a flat keyed file (`memory.events`, `cgroup.events`, `cpu.stat`) to a
    dict: key -> number. Values that are not numbers are left out. For a missing file (None) the
    result is empty."""
    numbers = {}
    for line in (content or "").splitlines():
        key, _, value = line.partition(" ")
        if value.isdigit():
            numbers[key] = int(value)
    return numbers


def may_move(source: str, target: str) -> bool:
    """Return whether we may move a process from the group `source` to the group `target` (paths in
    the tree). cgroups(7) requires write access to cgroup.procs of their common ancestor."""
    above = os.path.commonpath([source, target])
    return os.access(f"{root()}{above.rstrip('/')}/cgroup.procs", os.W_OK)


def delegated_files() -> list[str]:
    """Return the names of the cgroup files whose owner changes when a group is delegated, from
    /sys/kernel/cgroup/delegate."""
    try:
        return os.fsdecode(read_file(DELEGATED)).split()
    except FileNotFoundError:
        # The list of runtime-spec ("Cgroup ownership") for a kernel without the file.
        return ["cgroup.procs", "cgroup.subtree_control", "cgroup.threads"]


def open_group(directory: str) -> int:
    """Open the group, for CLONE_INTO_CGROUP and for bpf(2). The caller closes the descriptor."""
    with kernel_errors("open", repr(directory)):
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def open_present_group(pid: int) -> int:
    """Open the group that the process is in now, like `open_group`. Raises KernelError, and
    WrongState when the process has ended."""
    path = own_path(pid)
    if path is None:
        raise WrongState("the container is not running")
    return open_group(root() + path)


def make(directory: str) -> None:
    """Create the group (mkdir) and mark it by an extended attribute, which `is_ours` reads. Does
    nothing if the group exists. Raises KernelError, with ENOENT when the parent is missing."""
    try:
        os.mkdir(directory, 0o755)
    except FileExistsError:
        return
    except OSError as error:
        raise KernelError.of(error, "mkdir", repr(directory)) from None
    try:
        # The mark is on the group itself, because a list on disk could name groups that others
        # have removed and made anew.
        os.setxattr(directory, MARK, b"1")
    except OSError:
        pass  # without the mark (no CAP_SYS_ADMIN) an empty parent is left to its owner


def is_ours(directory: str) -> bool:
    """Return whether `make` created the group. Only then may an empty parent group be removed."""
    try:
        return os.getxattr(directory, MARK) == b"1"
    except OSError:
        return False


def remove(directory: str) -> bool:
    """Remove the group (rmdir). True when the group is gone, False while it is in use (EBUSY).
    Raises KernelError."""
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        # EBUSY: groups or processes are left; a zombie counts until it is reaped.
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise KernelError.of(error, "rmdir", repr(directory)) from None
    return True


def children(directory: str) -> list[str]:
    """Return the directories of the groups right below the group. Empty when the group is gone."""
    try:
        with os.scandir(directory) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        if error.errno in GONE:
            return []
        raise KernelError.of(error, "open", repr(directory)) from None


def walk(directory: str) -> Iterator[tuple[int, str]]:
    """Walk a group and all groups below it. Yields two items for each group:

    - before the groups below it: the group's descriptor and ""
    - after them: the descriptor of the group's parent and the group's name. Not for `directory`
      itself.

    A descriptor is valid until the next item. Yields nothing when `directory` is gone. Uses neither
    paths nor recursion, because a container with a delegated tree can nest groups deeper than these
    allow. Raises KernelError.
    """
    try:
        current = os.open(directory, _FOLDER)
    except OSError as error:
        if error.errno in GONE:
            return
        raise KernelError.of(error, "open", repr(directory)) from None
    try:
        stack = [("", _names(current))]
        yield current, ""
        while True:
            name, names = stack[-1]
            if names:
                below = names.pop()
                try:
                    entered = os.open(below, _FOLDER, dir_fd=current)
                except FileNotFoundError:
                    continue
                os.close(current)
                current = entered
                stack.append((below, _names(current)))
                yield current, ""
            elif len(stack) > 1:
                # `..` needs no check as in `kernel.tree`: a v2 group cannot be renamed or moved.
                above = os.open("..", _FOLDER, dir_fd=current)
                os.close(current)
                current = above
                stack.pop()
                yield current, name
            else:
                return
    except OSError as error:
        if error.errno not in GONE:
            raise KernelError.of(error, "open", repr(directory)) from None
    finally:
        os.close(current)


def _names(group: int) -> list[str]:
    with os.scandir(group) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def remove_below(directory: str) -> bool:
    """Remove all groups below the group, deepest first; False while one of them is in use. Raises
    KernelError."""
    all_gone = True
    for parent, name in walk(directory):
        if name:
            try:
                os.rmdir(name, dir_fd=parent)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                    raise KernelError.of(error, "rmdir", repr(name)) from None
                all_gone = False
    return all_gone


def wait_event(directory: str, key: str, value: int, timeout_s: float) -> bool:
    """Wait until `key` of cgroup.events has `value`, or the group is gone. False after `timeout_s`
    seconds."""
    deadline = time.monotonic() + timeout_s
    try:
        descriptor = os.open(f"{directory}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in GONE:
            return True
        raise KernelError.of(error, "open", repr(f"{directory}/cgroup.events")) from None
    with closing_fd(descriptor):
        waiter = select.poll()
        waiter.register(descriptor, select.POLLPRI)
        while True:
            try:
                # Read before the wait: a read re-arms the notification, and a change before it is
                # seen here.
                events = keyed(os.pread(descriptor, 4096, 0).decode())
            except OSError as error:
                if error.errno in GONE:
                    return True
                raise
            if events.get(key) == value:
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            # cgroup.events signals changes by POLLPRI (cgroup-v2.rst). The limit of half a second
            # covers a group that is removed meanwhile, which signals nothing.
            waiter.poll(min(left_s, 0.5) * 1000)


def _file(directory: str, file: str) -> str:
    if "/" in file or file in ("", ".", "..") or "\0" in file:
        raise InvalidArgument(f"invalid cgroup file name {file!r}")
    return f"{directory}/{file}"
