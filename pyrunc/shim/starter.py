"""The shim's door to the runtime library: start a holder, a container, an exec session; a container's cgroup.

The caller becomes the parent of what is started. Holders and containers are started in a worker (pyrunc.shim.worker), so what
comes back from there goes through a message: `to_message` and `from_message`. Execs are carried out in steps.
"""

from __future__ import annotations

import os
import sys

from pyrunc import jsontext
from pyrunc.abi.mount import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID
from pyrunc.cgroups import naming
from pyrunc.cgroups.group import Cgroup
from pyrunc.compile import descriptors, sources
from pyrunc.container import create, status
from pyrunc.container import pause_process as holder
from pyrunc.container import state as states
from pyrunc.container.exec import ExecRequest, executing, merged
from pyrunc.container.state import State
from pyrunc.errors import VISIBLE
from pyrunc.kernel.mount import open_mount
from pyrunc.kernel.namespace import open_namespace
from pyrunc.launch import hooks
from pyrunc.shim import messages
from pyrunc.spec.model import IdMap, Spec
from pyrunc.spec.parse import parse
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from typing import Any, Protocol

    from pyrunc.shim.session import Container
    from pyrunc.spec.model import Spec

    class Starter(Protocol):
        """What the shim needs somebody to start for it."""

        def holder(self, wanted: dict[str, Any], sandbox_dir: str) -> Holder: ...

        def holder_group(self, wanted: dict[str, Any], sandbox_dir: str) -> Cgroup: ...

        def container(
            self,
            container_id: str,
            directory: str,
            launch: dict[str, Any],
            stdio: tuple[int, int, int],
            holder: Holder | None,
        ) -> Process: ...

        def after_stop(self, container_id: str, directory: str) -> None: ...

        def group(self, container_id: str, directory: str, launch: dict[str, Any]) -> Cgroup: ...

        def execute(
            self, container: Container, process: dict[str, Any], stdio: tuple[int, int, int], tty: bool
        ) -> Generator[int, None, Process]: ...


class Process:
    """A process that was started, our child. `console_fd`, a pty's master, belongs to whoever gets this."""

    __slots__ = ("console_fd", "group", "has_poststop", "pid", "start_time")

    def __init__(self, pid: int, start_time: int, group: Cgroup, console_fd: int | None = None) -> None:
        self.pid, self.start_time, self.group, self.console_fd = pid, start_time, group, console_fd
        self.has_poststop = False

    def to_message(self) -> tuple[dict[str, Any], list[int]]:
        """Fields and descriptors, for the other side's `from_message`."""
        fields = {
            "pid": self.pid,
            "start_time": self.start_time,
            "group": self.group.record(),
            "poststop": self.has_poststop,
        }
        return fields, [] if self.console_fd is None else [self.console_fd]

    @classmethod
    def from_message(cls, fields: dict[str, Any], fds: list[int]) -> Process:
        """The process that `to_message` described; owns the descriptors."""
        console_fd = fds[0] if fds else None
        found = cls(fields["pid"], fields["start_time"], Cgroup.from_record(fields["group"]), console_fd)
        found.has_poststop = fields["poststop"]
        return found


class Holder:
    """The pod's holder and what the shim pins for the pod: the network namespace and detached mounts, by name."""

    __slots__ = ("group", "mounts", "netns_fd", "pid", "start_time")

    def __init__(
        self, pid: int, start_time: int, netns_fd: int | None, mounts: dict[str, int], group: Cgroup | None
    ) -> None:
        self.pid, self.start_time, self.netns_fd, self.mounts, self.group = (
            pid,
            start_time,
            netns_fd,
            mounts,
            group,
        )

    def to_message(self) -> tuple[dict[str, Any], list[int]]:
        """Fields and descriptors, for the other side's `from_message`."""
        fields = {
            "pid": self.pid,
            "start_time": self.start_time,
            "group": self.group and self.group.record(),
            "network": self.netns_fd is not None,
            "mounts": list(self.mounts),
        }
        return fields, [*([] if self.netns_fd is None else [self.netns_fd]), *self.mounts.values()]

    @classmethod
    def from_message(cls, fields: dict[str, Any], fds: list[int]) -> Holder:
        """The holder that `to_message` described; owns the descriptors."""
        netns_fd = fds.pop(0) if fields["network"] else None
        mounts = dict(zip(fields["mounts"], fds, strict=True))
        group = fields["group"] and Cgroup.from_record(fields["group"])
        return cls(fields["pid"], fields["start_time"], netns_fd, mounts, group)

    def fields(self) -> dict[str, Any]:
        """As the answer to `start_holder`."""
        path = None if self.netns_fd is None else f"/proc/{os.getpid()}/fd/{self.netns_fd}"
        return {"pid": self.pid, "start_time": self.start_time, "netns_path": path}

    def ended(self) -> None:
        """The holder has exited: the mounts go, the network namespace stays for the teardown of the network."""
        for fd in self.mounts.values():
            os.close(fd)
        self.mounts = {}


class LibraryStarter:
    """Starts by the runtime library, with what the server wrote into the folders.

    `oom_score_adj` is for processes whose configuration has none: they would inherit the shim's, which is spared.
    """

    def __init__(self, oom_score_adj: int = 0) -> None:
        self._oom_score_adj = oom_score_adj

    def perform(self, job: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """`holder` or `container` for a worker that got it as a message, see `holder_job` and `container_job`."""
        if job["start"] == "holder":
            return self.holder(job["wanted"], job["sandbox_dir"]).to_message()
        stdio, holder = (
            (fds[0], fds[1], fds[2]),
            job["holder"] and Holder.from_message(job["holder"], fds[3:]),
        )
        return self.container(job["id"], job["directory"], job["launch"], stdio, holder).to_message()

    def holder(self, wanted: dict[str, Any], sandbox_dir: str) -> Holder:
        """The pod's pause process, its /dev/shm as a detached tmpfs, its network namespace. Raises Error."""
        with Undo() as undo:
            mounts: dict[str, int] = {}
            if wanted["namespaces"].get("ipc") == "new":
                mounts["shm"] = _open_shm(wanted["shm_size_bytes"], wanted.get("shm_owner", (0, 0)))
                undo.push("/dev/shm", os.close, mounts["shm"])
            held = holder.holder(
                holder.HolderRequest(
                    id=os.path.basename(sandbox_dir),
                    namespaces=wanted["namespaces"],
                    hostname=wanted.get("hostname", ""),
                    sysctls=wanted.get("sysctls", {}),
                    cgroups_path=wanted.get("cgroups_path", ""),
                    cgroup=descriptors.CgroupChoice(**wanted["cgroup"]),
                    oom_score_adj=wanted.get("oom_score_adj"),
                    seccomp=wanted.get("seccomp"),
                    uid_mappings=_id_maps(wanted.get("uid_mappings", ())),
                    gid_mappings=_id_maps(wanted.get("gid_mappings", ())),
                    mounts={f"/dev/{name}": fd for name, fd in mounts.items()},
                )
            )
            os.close(held.pidfd)
            _warn(held.warnings)
            network = wanted["namespaces"].get("network")
            netns_fd = open_namespace(f"/proc/{held.pid}/ns/net", "net") if network == "new" else None
            undo.commit()
        return Holder(held.pid, held.start_time, netns_fd, mounts, held.cgroup)

    def holder_group(self, wanted: dict[str, Any], sandbox_dir: str) -> Cgroup:
        """Where the holder lives or would have lived. Raises Error."""
        driver = wanted["cgroup"].get("driver", "cgroupfs")
        return naming.place(wanted.get("cgroups_path", ""), os.path.basename(sandbox_dir), driver)

    def container(
        self,
        container_id: str,
        directory: str,
        launch: dict[str, Any],
        stdio: tuple[int, int, int],
        holder: Holder | None,
    ) -> Process:
        """The container of `config.json`; its state file is written as `pyrunc create` does. Raises Error."""
        spec, rootfs = self._spec(directory), launch["rootfs"]
        state = _first_state(container_id, directory, spec)
        if (
            spec.hooks.create_container and spec.root
        ):  # where they find the root, in the container's mounts only
            os.makedirs(os.path.join(directory, spec.root.path), mode=0o700, exist_ok=True)
        created = create.create(
            create.CreateRequest(
                id=container_id,
                bundle=directory,
                spec=spec,
                rootfs=sources.Overlay(**{**rootfs, "lower": tuple(rootfs["lower"])}),
                stdio=stdio,
                state_dir=directory,
                cgroup=descriptors.CgroupChoice(**launch["cgroup"]),
                mount_fds=holder.mounts if holder else {},
                mount_namespace=f"/proc/{holder.pid}/ns/mnt" if holder else "",
                settled=tuple(launch.get("settled", ())),
            )
        )
        os.close(created.pidfd)
        _warn(created.warnings)
        assert created.cgroup is not None
        _record(state, created)
        if spec.hooks.poststart:
            _warn(hooks.run_all(spec.hooks.poststart, "poststart", status.oci_state(state, status.RUNNING)))
        process = Process(created.pid, created.start_time, created.cgroup, created.console_fd)
        process.has_poststop = bool(spec.hooks.poststop)
        return process

    def _spec(self, directory: str) -> Spec:
        spec = _spec(directory)
        process = spec.process
        if process is None or process.oom_score_adj is not None:
            return spec
        return spec.replace(process=process.replace(oom_score_adj=self._oom_score_adj))

    def after_stop(self, container_id: str, directory: str) -> None:
        """The poststop hooks of a container that has exited; what fails is reported on stderr (runtime-spec)."""
        spec = _spec(directory)
        told = status.oci_state(_first_state(container_id, directory, spec), status.STOPPED)
        _warn(hooks.run_all(spec.hooks.poststop, "poststop", told))

    def group(self, container_id: str, directory: str, launch: dict[str, Any]) -> Cgroup:
        """Where the container lives or would have lived. Raises Error."""
        path = _spec(directory).linux.cgroups_path
        return naming.place(path, container_id, launch["cgroup"].get("driver", "cgroupfs"))

    def execute(
        self, container: Container, process: dict[str, Any], stdio: tuple[int, int, int], tty: bool
    ) -> Generator[int, None, Process]:
        """An OCI process object in the container, in steps; what it does not name is the container's. Raises Error."""
        spec, pidfd = self._spec(container.directory), container.open_pidfd()
        try:
            request = ExecRequest(
                pid=container.pid,
                pidfd=pidfd,
                spec=spec,
                process=merged(spec, {**process, "terminal": tty}),
                stdio=stdio,
                cgroup=container.group,
                keyring=_keyring(container.id),
            )
            executed = yield from executing(request)
        finally:
            os.close(pidfd)
        os.close(executed.pidfd)
        _warn(executed.warnings)
        return Process(executed.pid, executed.start_time, container.group, executed.console_fd)


def holder_job(wanted: dict[str, Any], sandbox_dir: str) -> tuple[dict[str, Any], list[int]]:
    """A holder's start as a message for `perform`, and the descriptors that go with it."""
    return {"start": "holder", "wanted": wanted, "sandbox_dir": sandbox_dir}, []


def container_job(
    container_id: str,
    directory: str,
    launch: dict[str, Any],
    stdio: tuple[int, int, int],
    holder: Holder | None,
) -> tuple[dict[str, Any], list[int]]:
    """A container's start as a message for `perform`, and the descriptors that go with it."""
    told, fds = holder.to_message() if holder else (None, [])
    job = {
        "start": "container",
        "id": container_id,
        "directory": directory,
        "launch": launch,
        "holder": told,
    }
    return job, [*stdio, *fds]


def _spec(directory: str) -> Spec:
    with open(f"{directory}/{messages.CONFIG}", "rb", buffering=0) as file:
        return parse(jsontext.loads(file.readall() or b""))


def _first_state(container_id: str, directory: str, spec: Spec) -> State:
    pids = spec.linux.namespace("pid")
    return State(
        directory,
        container_id,
        bundle=directory,
        oci_version=spec.version,
        annotations=dict(spec.annotations),
        created=states.now(),
        private_pids=pids is not None and not pids.path,
        keyring=_keyring(container_id),
    )


def _keyring(container_id: str) -> str:
    """The session keyring that a container's processes share, as `create` calls it."""
    return f"_ses.{container_id}"


def _record(state: State, created: create.Created) -> None:
    assert created.cgroup is not None
    state.pid, state.start_time = created.pid, created.start_time
    state.cgroup_record, state.complete = created.cgroup.record(), True
    state.save()


def _open_shm(size_bytes: int, owner: Sequence[int]) -> int:
    uid, gid = owner
    options = [("mode", "1777"), ("size", str(size_bytes)), ("uid", str(uid)), ("gid", str(gid))]
    attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC
    return open_mount("tmpfs", options, attributes=attributes, source="shm")


def _id_maps(entries: Sequence[Mapping[str, int]]) -> tuple[IdMap, ...]:
    """OCI's `{containerID, hostID, size}` objects."""
    return tuple(IdMap(entry["containerID"], entry["hostID"], entry["size"]) for entry in entries)


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"pyrunc-shim: {warning.translate(VISIBLE)}", file=sys.stderr)
