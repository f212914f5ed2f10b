"""One container's control group on the v2 tree: the object that create, the shim and the server
hold.

Its life: `create`, then the first process by CLONE_INTO_CGROUP (`open_directory`) or `attach`, then
`occupied`; `set_devices` and `apply` put the limits on; `kill`, `remove` end it. Everything can be
called again by another process from the `record`, for the group itself is the only state. With the
systemd driver the group is a scope, which systemd refuses to make without a process: a placeholder
sits in it until `occupied`.
"""

from __future__ import annotations

import errno
import os
import time

from pyrunc.errors import AlreadyExists, DeadlineExceeded, InvalidSpec, KernelError, WrongState
from pyrunc.kernel import cgroup as tree
from pyrunc.kernel.credential import is_machine_root
from pyrunc.kernel.process import send_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set
    from typing import Any

    from pyrunc.cgroups.scope import Placeholder
    from pyrunc.cgroups.stats import Stats

SIGKILL = 9
MKDIR_ATTEMPTS = 16
FREEZE_TIMEOUT_S = 10.0
REMOVE_TIMEOUT_S = 5.0
UNMANAGED_BY_SYSTEMD = frozenset({"hugetlb", "misc", "rdma"})


class ReleasedPlaceholder:
    """A placeholder that is another process's child; we have its pipe's write end."""

    __slots__ = ("_write_end",)

    def __init__(self, write_end: int) -> None:
        self._write_end = write_end

    def end(self) -> None:
        os.close(self._write_end)

    def release(self) -> int:
        return self._write_end


class Cgroup:
    """`path` counts from the root of the v2 tree; `driver` is `cgroupfs` or `systemd` (then with
    `slice` and `unit`)."""

    __slots__ = ("_placeholder", "driver", "path", "slice", "unit")

    def __init__(
        self, path: str, driver: str = "cgroupfs", slice: str = "", unit: str = ""
    ) -> None:
        self.path = path
        self.driver = driver
        self.slice = slice
        self.unit = unit
        self._placeholder: Placeholder | ReleasedPlaceholder | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, str]) -> Cgroup:
        """The group that `record` described."""
        return cls(
            record["path"], record["driver"], record.get("slice", ""), record.get("unit", "")
        )

    def record(self) -> dict[str, str]:
        """What a state file needs to find the group again."""
        found = {"path": self.path, "driver": self.driver}
        return found | ({"slice": self.slice, "unit": self.unit} if self.unit else {})

    @property
    def directory(self) -> str:
        """The group's absolute directory."""
        return tree.root() + self.path

    def exists(self) -> bool:
        return os.path.isdir(self.directory)

    def may_be_made(self) -> bool:
        """Whether we have the right to make it: the nearest group above that exists can be written
        to."""
        parent = os.path.dirname(self.directory)
        while not os.path.isdir(parent):
            parent = os.path.dirname(parent)
        return os.access(parent, os.W_OK)

    # -- birth

    def create(
        self,
        resources: Mapping[str, Any] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Make the group and its parents, controllers handed down. `resources` and `annotations`
        matter to systemd only.

        Raises AlreadyExists when processes live in it, WrongState when it is frozen, KernelError,
        PeerError (systemd).
        """
        self._require_own()
        self._refuse_a_used_one()
        if self.driver == "systemd":
            from pyrunc.cgroups import scope

            self._placeholder = scope.start(self, resources or {}, annotations or {})
        else:
            self._make_directories()

    def _require_own(self) -> None:
        """The root of the tree is nobody's: killing it would kill every process of the machine."""
        names = self.path.strip("/").split("/")
        if any(name in ("", ".", "..") for name in names):
            raise InvalidSpec(
                "linux.cgroupsPath", f"{self.path!r} is no group of a container's own"
            )

    def _refuse_a_used_one(self) -> None:
        events = tree.keyed(tree.read(self.directory, "cgroup.events"))
        if events.get("populated"):
            raise AlreadyExists(f"container's cgroup is not empty: {self.path}")
        if events.get("frozen"):
            raise WrongState(f"container's cgroup unexpectedly frozen: {self.path}")

    def _make_directories(self) -> None:
        for _ in range(MKDIR_ATTEMPTS):
            try:
                return self._make_each_level()
            except (
                KernelError
            ) as error:  # another container's delete removed an empty parent in between
                if error.errno != errno.ENOENT:
                    raise
        raise WrongState(f"cgroup {self.path} is removed as fast as it is made")

    def _make_each_level(self) -> None:
        directory = tree.root()
        for name in self.path.strip("/").split("/"):
            _hand_down(directory)
            directory += "/" + name
            tree.make(directory)
        if (tree.read(directory, "cgroup.type") or "").strip() == "domain invalid":
            tree.write(directory, "cgroup.type", "threaded")

    def hand_down_unmanaged(self) -> None:
        """Hand down what systemd leaves alone, from the root to this group: with every other
        controller it follows its units.

        runc does it, and kubelet above a pod's slice; inside that slice it is the runtime's turn.
        Left alone, every container of a node with huge pages fails, for kubelet names a limit for
        each of their sizes.
        """
        directory = tree.root()
        for name in self.path.strip("/").split("/"):
            _hand_down(directory, UNMANAGED_BY_SYSTEMD)
            directory += "/" + name

    def open_directory(self) -> int:
        """A descriptor for CLONE_INTO_CGROUP. The caller closes it."""
        return tree.open_group(self.directory)

    def reach(self) -> None:
        """Make sure that a child of ours may be born in the group: an ordinary user's process may
        have to move first."""
        if self.driver == "systemd" and not is_machine_root():
            from pyrunc.cgroups import scope

            scope.reach(self)

    def attach(self, pid: int) -> None:
        """Move a process in (no pids.max check; slower than CLONE_INTO_CGROUP). Raises KernelError."""
        tree.write(self.directory, "cgroup.procs", str(pid))

    def occupied(self) -> None:
        """The container's first process is in: end the placeholder of a systemd scope. Nothing to
        do for cgroupfs."""
        if self._placeholder is not None:
            self._placeholder.end()
            self._placeholder = None

    def release_placeholder(self) -> int | None:
        """The write end of the pipe that a systemd scope's placeholder waits at, the caller's from
        here on: the scope lives as long as somebody has it open. None when there is no placeholder.
        """
        placeholder, self._placeholder = self._placeholder, None
        return None if placeholder is None else placeholder.release()

    def take_placeholder(self, write_end: int) -> None:
        """Own what `release_placeholder` gave away, until `occupied`."""
        self._placeholder = ReleasedPlaceholder(write_end)

    def give_to(self, uid: int) -> None:
        """Make `uid` the owner of the group and of what the kernel says may be delegated: it can
        make groups below and move its processes there, its limits stay ours. An id that does not
        exist here is left to setresuid. Raises KernelError.
        """
        for path in (
            self.directory,
            *(f"{self.directory}/{name}" for name in tree.delegated_files()),
        ):
            try:
                os.chown(path, uid, -1)
            except FileNotFoundError:  # of a controller that is not here
                continue
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return
                raise KernelError.of(error, "chown", repr(path)) from None

    # -- limits

    def apply(self, resources: Mapping[str, Any], missing_controllers: str = "error") -> list[str]:
        """Write OCI `linux.resources` (all but `devices`). Returns warnings, a line each.

        `missing_controllers`: a limit whose controller is not on the v2 tree is an Unsupported
        error ("error") or a warning ("warn"). Raises InvalidSpec for contradictions, KernelError
        for a refused value.
        """
        from pyrunc.cgroups import limits

        return limits.write(self.directory, resources, missing_controllers)

    def update(self, resources: Mapping[str, Any], missing_controllers: str = "error") -> list[str]:
        """Like `apply` on a living container: what is not named stays, and a failure puts the old
        values back."""
        from pyrunc.cgroups import limits

        def tell_systemd() -> None:
            from pyrunc.cgroups import scope

            scope.update(self, resources)

        then = tell_systemd if self.driver == "systemd" else None
        return limits.replace(self.directory, resources, missing_controllers, then)

    def set_devices(self, rules: Sequence[Mapping[str, Any]]) -> None:
        """Put the device filter of OCI `resources.devices` (plus the default nodes) in force,
        replacing an earlier one.

        Raises InvalidSpec, KernelError.
        """
        from pyrunc.cgroups import device_filter
        from pyrunc.kernel import bpf

        program = device_filter.program(rules)
        group = tree.open_group(self.directory)
        try:
            bpf.replace_device_program(group, program)
        finally:
            os.close(group)

    # -- facts

    def processes(self) -> list[int]:
        """The pids of the group and of all groups below, as seen from our pid namespace; none when
        it is gone."""
        found: set[int] = set()
        if tree.is_leaf(self.directory):
            return sorted(map(int, _procs(self.directory).split()))
        for group, left in tree.walk(self.directory):
            if not left:
                found.update(int(pid) for pid in _procs(group).split())
        return sorted(found)

    def populated(self) -> bool:
        """Whether any living process is in the group or below; False when it is gone."""
        return tree.keyed(tree.read(self.directory, "cgroup.events")).get("populated") == 1

    def frozen(self) -> bool:
        """Whether the group was asked to freeze (by us: a frozen ancestor does not count)."""
        return (tree.read(self.directory, "cgroup.freeze") or "").strip() == "1"

    def oom_kills(self) -> int | None:
        """How many processes the OOM killer took here or below; None without the memory controller."""
        content = tree.read(self.directory, "memory.events")
        return None if content is None else tree.keyed(content).get("oom_kill", 0)

    def stats(self) -> Stats:
        """Usage now; a part whose files are not there is not in the answer."""
        from pyrunc.cgroups import stats

        return stats.read(self.directory)

    def usage(self) -> Stats:
        """Of `stats` what is asked for every few seconds: cpu, memory and pressure."""
        from pyrunc.cgroups.stats import (
            read_usage,
        )  # of a module, not a package: a tenth of what the statement costs

        return read_usage(self.directory)

    # -- freezer, end

    def freeze(self, timeout_s: float = FREEZE_TIMEOUT_S) -> None:
        """Stop every process; returns when all stand still. Thaws again and raises DeadlineExceeded
        if they do not."""
        self._require_own()
        tree.write(self.directory, "cgroup.freeze", "1")
        if not tree.wait_event(self.directory, "frozen", 1, timeout_s):
            tree.write(self.directory, "cgroup.freeze", "0")
            raise DeadlineExceeded(f"cgroup {self.path} did not freeze within {timeout_s:g} s")

    def thaw(self) -> None:
        """Let them run on; fine when the group is gone."""
        try:
            tree.write(self.directory, "cgroup.freeze", "0")
        except KernelError as error:
            if error.errno not in tree.GONE:
                raise

    def kill(self) -> None:
        """SIGKILL to every process of the group and below, frozen ones too; fine when the group is
        gone.

        Never to the root group, whose processes are all that have no other: InvalidSpec.
        """
        self._require_own()
        try:
            tree.write(self.directory, "cgroup.kill", "1")
        except KernelError as error:
            if error.errno == errno.ENOENT and not self.exists():
                return
            if error.errno not in (errno.ENOENT, errno.EOPNOTSUPP):
                raise
            self._kill_one_by_one()

    def _kill_one_by_one(self) -> None:
        """For a threaded group, which has no cgroup.kill: repeat until no new process turns up."""
        for _ in range(100):
            pids = self.processes()
            if not pids:
                return
            for pid in pids:
                self.send_signal(pid, SIGKILL)
            time.sleep(0.001)

    def send_signal(self, pid: int, number: int) -> bool:
        """Signal one of `processes`, by a pidfd that is opened before its membership is looked at
        again: the number may be another process's since it was listed. False when it is none of the
        group's and those below any more. Raises KernelError.
        """
        try:
            process = os.pidfd_open(pid)
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):  # gone, or a thread now
                return False
            raise KernelError.of(error, "pidfd_open", str(pid)) from None
        try:
            return self._has(pid) and send_signal(process, number)
        finally:
            os.close(process)

    def _has(self, pid: int) -> bool:
        """Whether the process is in the group or below; in a threaded one, a thread of it."""
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            return False
        own = (tree.own_path(pid if task == str(pid) else f"{pid}/task/{task}") for task in tasks)
        return any(f"{path}/".startswith(f"{self.path}/") for path in own)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no living process is left in the group and below; False when the time is up
        first."""
        return tree.wait_event(self.directory, "populated", 0, timeout_s)

    def remove(self, timeout_s: float = REMOVE_TIMEOUT_S) -> None:
        """Remove the group with all below it, and the parents that `create` made once they are
        empty. Idempotent.

        Processes that were just killed are waited for. Raises WrongState when some are left after
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
        while not (tree.remove_below(self.directory) and tree.remove(self.directory)):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                pids = " ".join(map(str, self.processes()[:20])) or "none that can be seen"
                raise WrongState(f"cgroup {self.path} cannot be removed, processes left: {pids}")
            if self.populated():
                self.wait_empty(left_s)
            else:  # a dying descendant, or a zombie that its parent has not reaped
                time.sleep(min(pause_s, left_s))
                pause_s *= 2


def _procs(directory: int | str) -> str:
    try:
        return tree.read(directory, "cgroup.procs") or ""
    except KernelError as error:
        # a threaded group lists its processes at its domain only
        if error.errno == errno.EOPNOTSUPP:
            return _owners(tree.read(directory, "cgroup.threads") or "")
        raise


def _owners(threads: str) -> str:
    found = []
    for thread in threads.split():
        try:
            with open(f"/proc/{thread}/status") as file:
                found += [line.split()[1] for line in file if line.startswith("Tgid:")]
        except OSError:
            continue
    return " ".join(found)


def _hand_down(directory: str, only: Set[str] | None = None) -> None:
    """Enable every controller that the group has (of `only`) for its children: all at once, else
    one by one; the limit's own write tells about what could not be (a group with processes, a
    controller in use on v1)."""
    wanted = set(tree.controllers(directory)) - set(
        (tree.read(directory, "cgroup.subtree_control") or "").split()
    )
    if only is not None:
        wanted &= only
    if not wanted:
        return
    try:
        tree.write(
            directory, "cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(wanted))
        )
        return
    except KernelError:
        pass
    for name in sorted(wanted):
        try:
            tree.write(directory, "cgroup.subtree_control", f"+{name}")
        except KernelError:
            pass


def _remove_empty_parents(directory: str) -> None:
    while (
        directory.startswith(tree.root() + "/")
        and tree.is_ours(directory)
        and tree.remove(directory)
    ):
        directory = os.path.dirname(directory)
