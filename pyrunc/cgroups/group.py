"""One container's cgroup on the v2 tree, for create, the shim and the server.

`create` makes the group. The first process is cloned into it (`open_directory`, CLONE_INTO_CGROUP)
or moved there by `attach`. Afterwards the caller calls `occupied`. `apply` and `set_devices` set
the limits, `kill` and `remove` end the group. Another process gets the group by passing the
result of `record` to `from_record`.

With the systemd driver the group is a scope. systemd makes no scope without a process, so a
placeholder process stays in the scope until the caller calls `occupied`.
"""

from __future__ import annotations

import errno
import os
import time

from pyrunc.errors import AlreadyExists, DeadlineExceeded, InvalidSpec, KernelError, WrongState
from pyrunc.kernel import cgroup
from pyrunc.kernel.credential import is_machine_root
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.process import send_signal, status_fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set
    from typing import Any

    from pyrunc.cgroups.stats import Stats

SIGKILL = 9
MKDIR_ATTEMPTS = 16
FREEZE_TIMEOUT_S = 10.0
REMOVE_TIMEOUT_S = 5.0
UNMANAGED_BY_SYSTEMD = frozenset({"hugetlb", "misc", "rdma"})


class Placeholder:
    """The first process of a systemd scope. It waits until all copies of its pipe's `write_end` are
    closed. `pid`: its pid; 0 if it is not our child."""

    __slots__ = ("pid", "write_end")

    def __init__(self, write_end: int, pid: int = 0) -> None:
        self.write_end, self.pid = write_end, pid

    def end(self) -> None:
        """Let the placeholder process exit, and reap it if it is our child."""
        os.close(self.write_end)
        if self.pid:
            os.waitpid(self.pid, 0)


class Cgroup:
    """A control group. `path`: its path in the v2 tree. `driver`: `cgroupfs` or `systemd`. `slice`
    and `unit` are set only with `systemd`."""

    __slots__ = ("_pids_max_due", "_placeholder", "driver", "path", "slice", "unit")

    def __init__(
        self, path: str, driver: str = "cgroupfs", slice: str = "", unit: str = ""
    ) -> None:
        self.path = path
        self.driver = driver
        self.slice = slice
        self.unit = unit
        self._placeholder: Placeholder | None = None
        self._pids_max_due = False  # `occupied` has to write the limit of 1 process

    @classmethod
    def from_record(cls, record: Mapping[str, str]) -> Cgroup:
        """Make a group from the result of `record`, which a state file has stored."""
        return cls(
            record["path"], record["driver"], record.get("slice", ""), record.get("unit", "")
        )

    def record(self) -> dict[str, str]:
        """Return the fields that a state file stores, so that `from_record` can make the group from
        them."""
        fields = {"path": self.path, "driver": self.driver}
        return fields | ({"slice": self.slice, "unit": self.unit} if self.unit else {})

    @property
    def directory(self) -> str:
        """Return the group's absolute directory."""
        return cgroup.root() + self.path

    def exists(self) -> bool:
        return os.path.isdir(self.directory)

    def may_be_made(self) -> bool:
        """Return whether we have the right to make the group: we can write to its nearest existing
        parent."""
        parent = os.path.dirname(self.directory)
        while not os.path.isdir(parent):
            parent = os.path.dirname(parent)
        return os.access(parent, os.W_OK)

    # -- creation

    def create(
        self,
        resources: Mapping[str, Any] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Make the group and its parents, and enable the parents' controllers. Only systemd uses
        `resources` and `annotations`.

        Raises:

        - AlreadyExists when processes live in the group
        - WrongState when the group is frozen, or another process keeps removing it
        - InvalidSpec for the root group and for a path with `..`
        - KernelError, and PeerError or DeadlineExceeded (systemd)
        """
        self._require_own()
        self._refuse_if_in_use()
        if self.driver == "systemd":
            from pyrunc.cgroups import scope

            self._placeholder = scope.start(self, resources or {}, annotations or {})
        else:
            self._make_directories()

    def _require_own(self) -> None:
        """Raise InvalidSpec if the path may lead to the root of the v2 tree: killing that group
        would kill every process of the machine."""
        names = self.path.strip("/").split("/")
        if any(name in ("", ".", "..") for name in names):
            raise InvalidSpec("linux.cgroupsPath", f"{self.path!r} cannot be a container's cgroup")

    def _refuse_if_in_use(self) -> None:
        events = cgroup.keyed(cgroup.read(self.directory, "cgroup.events"))
        # Another container's group under the same path: its limits would be overwritten, and its
        # processes killed with ours.
        if events.get("populated"):
            raise AlreadyExists(f"container's cgroup is not empty: {self.path}")
        # A process that is cloned into a frozen group stops before it has done anything, and the
        # start would hang.
        if events.get("frozen"):
            raise WrongState(f"container's cgroup unexpectedly frozen: {self.path}")

    def _make_directories(self) -> None:
        for _ in range(MKDIR_ATTEMPTS):
            try:
                return self._make_each_level()
            except KernelError as error:
                # ENOENT: another container's delete removed an empty parent meanwhile.
                if error.errno != errno.ENOENT:
                    raise
        raise WrongState(f"another process keeps removing cgroup {self.path}")

    def _make_each_level(self) -> None:
        directory = self.directory
        if _enables_all_controllers(os.path.dirname(directory)):
            cgroup.make(directory)
        else:
            directory = cgroup.root()
            for name in self.path.strip("/").split("/"):
                # Before the folder is made: a controller of a child exists only if its parent
                # enables it, and a parent that has processes cannot (cgroups(7), "no internal
                # processes").
                _enable_controllers(directory)
                directory += "/" + name
                cgroup.make(directory)
        # Below a threaded group a new group takes no process until it is threaded, too
        # (cgroups(7)).
        if (cgroup.read(directory, "cgroup.type") or "").strip() == "domain invalid":
            cgroup.write(directory, "cgroup.type", "threaded")

    def enable_unmanaged_controllers(self) -> None:
        """Enable the controllers that systemd does not manage, such as hugetlb, from the root to
        this group.

        runc does the same for its containers. kubelet does it only from the root to the pod's
        slice. Without these controllers, containers would fail on a node with huge pages, because
        kubelet sets a limit for each page size.
        """
        directory = cgroup.root()
        for name in self.path.strip("/").split("/"):
            _enable_controllers(directory, UNMANAGED_BY_SYSTEMD)
            directory += "/" + name

    def open_directory(self) -> int:
        """Open the group for CLONE_INTO_CGROUP. The caller closes the descriptor."""
        return cgroup.open_group(self.directory)

    def reach(self) -> None:
        """Make sure that this process can clone children into the group. For an ordinary user, this
        may move the process to another group."""
        if self.driver == "systemd" and not is_machine_root():
            from pyrunc.cgroups import scope

            scope.reach(self)

    def attach(self, pid: int) -> None:
        """Move a process into the group. A move ignores pids.max and takes longer than
        CLONE_INTO_CGROUP. Raises KernelError."""
        # A move can wait for an RCU grace period (4 to 16 ms at 250 Hz), which a clone into the
        # group does not.
        cgroup.write(self.directory, "cgroup.procs", str(pid))

    def occupied(self) -> None:
        """End a systemd scope's placeholder process. The caller calls this when the container's
        first process is in the group. Does nothing for cgroupfs. Raises KernelError."""
        if self._placeholder is not None:
            self._placeholder.end()
            self._placeholder = None
        if self._pids_max_due:
            self._pids_max_due = False
            self._write_unless_gone("pids.max", "1")

    def release_placeholder(self) -> int | None:
        """Hand a systemd scope's placeholder process to the caller: return the write end of the
        pipe at which it waits; None without a placeholder. The scope lives at least until the
        caller closes the write end."""
        placeholder, self._placeholder = self._placeholder, None
        return None if placeholder is None else placeholder.write_end

    def take_placeholder(self, write_end: int) -> None:
        """Take over the placeholder process of a systemd scope from another process, so that
        `occupied` ends it. `write_end`: the result of `release_placeholder` in the other
        process."""
        self._placeholder = Placeholder(write_end)

    def give_to(self, uid: int) -> None:
        """Make `uid` the owner of the group and of its delegated files. The user can then make
        groups below and move processes there, but not change this group's limits.

        Does nothing for an id that our user namespace does not map, because setresuid(2) reports it
        later. Raises KernelError.
        """
        for path in (
            self.directory,
            *(f"{self.directory}/{name}" for name in cgroup.delegated_files()),
        ):
            try:
                # The uid alone: runtime-spec names the user only, and the limits' files keep their
                # owner.
                os.chown(path, uid, -1)
            except FileNotFoundError:  # a file of a controller that is not enabled
                continue
            except OSError as error:
                # EINVAL: our user namespace does not map the id.
                if error.errno == errno.EINVAL:
                    return
                raise KernelError.of(error, "chown", repr(path)) from None

    # -- limits

    def apply(self, resources: Mapping[str, Any], missing_controllers: str = "error") -> list[str]:
        """Write OCI `linux.resources` (all but `devices`). Returns warnings, a line each.

        `missing_controllers`: `error` or `warn`, for a limit whose controller is not on the v2
        tree. `error` raises Unsupported. Also raises KernelError, InvalidSpec for contradictions,
        and InvalidArgument for a value that the kernel refuses.
        """
        from pyrunc.cgroups import limits

        warnings = limits.write(self.directory, resources, missing_controllers)
        # With a limit of 1, only the placeholder process would be allowed, and the clone of the
        # container's process would fail (EAGAIN).
        if self._placeholder and (cgroup.read(self.directory, "pids.max") or "").strip() == "1":
            cgroup.write(self.directory, "pids.max", "2")
            self._pids_max_due = True
        return warnings

    def update(self, resources: Mapping[str, Any], missing_controllers: str = "error") -> list[str]:
        """Change the limits of a running container in the cgroup's files and, with the systemd
        driver, in systemd. Limits that are not in `resources` stay. If the update fails, the files
        get their old values again.

        `missing_controllers`, the result and the errors are those of `apply`. Also raises PeerError
        and DeadlineExceeded (systemd).
        """
        from pyrunc.cgroups import limits

        def update_systemd() -> None:
            from pyrunc.cgroups import scope

            scope.update(self, resources)

        then = update_systemd if self.driver == "systemd" else None
        return limits.replace(self.directory, resources, missing_controllers, then)

    def set_devices(self, rules: Sequence[Mapping[str, Any]]) -> None:
        """Load the device filter for OCI `resources.devices` and the default devices. It replaces
        an earlier filter. Raises InvalidSpec, KernelError."""
        from pyrunc.cgroups import device_filter
        from pyrunc.kernel import bpf

        program = device_filter.program(rules)
        with closing_fd(cgroup.open_group(self.directory)) as group:
            bpf.replace_device_program(group, program)

    # -- facts

    def processes(self) -> list[int]:
        """Return the pids of the group and of all groups below, as seen from our pid namespace.
        Empty when the group is gone."""
        pids: set[int] = set()
        # Nearly every container's group is a leaf. kubelet asks for statistics all the time, so a
        # leaf is read without a walk.
        if cgroup.is_leaf(self.directory):
            return sorted(map(int, _read_pids(self.directory).split()))
        for group, left in cgroup.walk(self.directory):
            if not left:
                pids.update(int(pid) for pid in _read_pids(group).split())
        return sorted(pids)

    def populated(self) -> bool:
        """Return whether any living process is in the group or below. False when the group is
        gone."""
        return cgroup.keyed(cgroup.read(self.directory, "cgroup.events")).get("populated") == 1

    def frozen(self) -> bool:
        """Return whether this group's own cgroup.freeze is set; a frozen ancestor does not
        count."""
        return (cgroup.read(self.directory, "cgroup.freeze") or "").strip() == "1"

    def oom_kills(self) -> int | None:
        """Return how many processes the OOM killer has killed in the group or below; None without
        the memory controller."""
        content = cgroup.read(self.directory, "memory.events")
        return None if content is None else cgroup.keyed(content).get("oom_kill", 0)

    def stats(self) -> Stats:
        """Return all statistics of the group; a field whose files are missing is None or empty."""
        from pyrunc.cgroups import stats

        return stats.read(self.directory)

    def usage(self) -> Stats:
        """Return the part of `stats` that kubelet reads every few seconds: cpu, memory and
        pressure."""
        # `from pyrunc.cgroups import stats` takes ten times as long.
        from pyrunc.cgroups.stats import read_usage

        return read_usage(self.directory)

    # -- freezer, end

    def freeze(self, timeout_s: float = FREEZE_TIMEOUT_S) -> None:
        """Freeze every process of the group, and return when all are frozen. If this takes longer
        than `timeout_s`, thaw them and raise DeadlineExceeded."""
        self._require_own()
        cgroup.write(self.directory, "cgroup.freeze", "1")
        if not cgroup.wait_event(self.directory, "frozen", 1, timeout_s):
            # A container that is frozen in part would be neither paused nor running.
            cgroup.write(self.directory, "cgroup.freeze", "0")
            raise DeadlineExceeded(f"cgroup {self.path} did not freeze within {timeout_s:g} s")

    def thaw(self) -> None:
        """Thaw the processes of the group; does nothing when the group is gone."""
        self._write_unless_gone("cgroup.freeze", "0")

    def _write_unless_gone(self, file: str, text: str) -> None:
        try:
            cgroup.write(self.directory, file, text)
        except KernelError as error:
            if error.errno not in cgroup.GONE:
                raise

    def kill(self) -> None:
        """Send SIGKILL to every process of the group and of the groups below, also to frozen ones.
        Does nothing when the group is gone.

        Raises KernelError, and InvalidSpec for the root group, because all processes of the machine
        are in or below it.
        """
        self._require_own()
        try:
            # Linux 5.14: one write kills all, also what is forked meanwhile; a loop over
            # cgroup.procs may lose against a fork bomb.
            cgroup.write(self.directory, "cgroup.kill", "1")
        except KernelError as error:
            if error.errno == errno.ENOENT and not self.exists():
                return
            if error.errno not in (errno.ENOENT, errno.EOPNOTSUPP):
                raise
            self._kill_one_by_one()

    def _kill_one_by_one(self) -> None:
        """Kill the processes of a threaded group, which has no cgroup.kill, until no new process
        appears."""
        for _ in range(100):
            pids = self.processes()
            if not pids:
                return
            for pid in pids:
                self.send_signal(pid, SIGKILL)
            time.sleep(0.001)

    def send_signal(self, pid: int, number: int) -> bool:
        """Send a signal to a process of the group, or of a group below. Return False if the process
        has ended or is in no such group. Raises KernelError."""
        try:
            process = os.pidfd_open(pid)
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):  # ended, or a thread now
                return False
            raise KernelError.of(error, "pidfd_open", str(pid)) from None
        with closing_fd(process):
            return self._contains(pid) and send_signal(process, number)

    def _contains(self, pid: int) -> bool:
        """Return whether the process is in the group or below. In a threaded group, one thread of
        the process suffices."""
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            return False
        own = (cgroup.own_path(pid if task == str(pid) else f"{pid}/task/{task}") for task in tasks)
        return any(f"{path}/".startswith(f"{self.path}/") for path in own)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no living process is left in the group and below; False after `timeout_s`
        seconds."""
        return cgroup.wait_event(self.directory, "populated", 0, timeout_s)

    def remove(self, timeout_s: float = REMOVE_TIMEOUT_S) -> None:
        """Remove the group and all groups below it, then those parents that `create` made and that
        are empty. A group that is gone is no error.

        Waits for processes that were just killed. Raises WrongState when processes are left after
        `timeout_s`.
        """
        self._require_own()
        self.occupied()
        if self.driver == "systemd":
            from pyrunc.cgroups import scope

            scope.stop(self)
        self._remove_tree(time.monotonic() + timeout_s)
        _remove_empty_parents(os.path.dirname(self.directory))

    def _remove_tree(self, deadline: float) -> None:
        pause_s = 0.001
        while not (cgroup.remove_below(self.directory) and cgroup.remove(self.directory)):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                pids = " ".join(map(str, self.processes()[:20])) or "none that can be seen"
                raise WrongState(f"cgroup {self.path} cannot be removed, processes left: {pids}")
            if self.populated():
                self.wait_empty(left_s)
            else:  # a dying descendant, or a zombie that its parent has not reaped
                time.sleep(min(pause_s, left_s))
                pause_s *= 2


def _read_pids(directory: int | str) -> str:
    try:
        return cgroup.read(directory, "cgroup.procs") or ""
    except KernelError as error:
        # A threaded group lists its processes only in the group of its domain.
        if error.errno == errno.EOPNOTSUPP:
            return _pids_of_threads(cgroup.read(directory, "cgroup.threads") or "")
        raise


def _pids_of_threads(threads: str) -> str:
    pids = []
    for thread in threads.split():
        try:
            pids.append(status_fields(thread)[b"Tgid"].decode())
        except OSError:
            continue
    return " ".join(pids)


def _enables_all_controllers(directory: str) -> bool:
    """Return whether the group exists and enables all controllers of the v2 tree for its children.
    If it does, all groups above it enable them, too."""
    enabled = (cgroup.read(directory, "cgroup.subtree_control") or "").split()
    return bool(enabled) and set(enabled).issuperset(cgroup.controllers(cgroup.root()))


def _enable_controllers(directory: str, only: Set[str] | None = None) -> None:
    """Enable the group's controllers, or only those in `only`, for its children.

    Skips a controller that the kernel refuses; a later write of its limits reports that. The kernel
    refuses a controller if the group has processes or cgroup v1 uses the controller.
    """
    missing = set(cgroup.controllers(directory)) - set(
        (cgroup.read(directory, "cgroup.subtree_control") or "").split()
    )
    if only is not None:
        missing &= only
    if not missing:
        return
    try:
        cgroup.write(
            directory, "cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(missing))
        )
        return
    except KernelError:
        pass
    # One by one after a failure: the kernel takes all or none of a list.
    for name in sorted(missing):
        try:
            cgroup.write(directory, "cgroup.subtree_control", f"+{name}")
        except KernelError:
            pass


def _remove_empty_parents(directory: str) -> None:
    while (
        directory.startswith(cgroup.root() + "/")
        # A parent that was there before belongs to its owner, such as kubelet's pod group, even if
        # it is empty now.
        and cgroup.is_ours(directory)
        and cgroup.remove(directory)
    ):
        directory = os.path.dirname(directory)
